"""conv2d by any engine, and the list of engines: what a user calls on single tensors."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from convoy.engines.base import Engine
from convoy.engines.manifest import MANIFEST, load_engine
from convoy.functional.autograd import FORMATS, ConvolutionFunction, device_context
from convoy.functional.config_choice import choose_config, with_mask
from convoy.functional.conv_arguments import (
    Size,
    cast_for_autocast,
    check_dtypes,
    check_tensors,
    layout_of,
    pad_odd_same,
    problem_of,
)
from convoy.measurement.device.detect import detect_target
from convoy.program import calls
from convoy.settings import Settings, checked_settings
from convoy.target import Target

__all__ = ["conv2d", "engines"]


def engines() -> list[Engine]:
    """Every engine there is, the baseline first. One whose package or device is missing says so when it is asked."""
    return [load_engine(engine) for engine in MANIFEST]


@lru_cache(maxsize=16)
def _target(device: torch.device, threads: int) -> Target:
    """The target of a device, which is its current one; detecting it takes longer than a small convolution."""
    del threads  # part of the key: a CPU's target names them
    return detect_target(device.type)


def conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    engine: str = "auto",
    *,
    settings: Settings | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.conv2d`, by an engine of one's choice.

    Nothing is measured here. The weight is packed in every call: to pack it once, optimise a module.

    Args:
        x: [n, c, h, w] or, unbatched, [c, h, w]; fp64, fp32, fp16 or bf16; any strides. The result has its memory format.
        weight: [k, c / groups, r, s], of x's dtype and device.
        bias: [k], likewise, or None.
        stride: one integer, or one each for height and width.
        padding: likewise, or `valid`, or `same` (stride 1 only).
        dilation: likewise.
        groups: a divisor of c and k.
        engine: an engine's id, used with its default knobs (one for pruned weights gets the zeros of this one, and writes code
            for them at the first call); or `auto`: the fastest config that the database has measured for
            this very problem on this target, if it beats the baseline by more than the spread, else the baseline.
        settings: `numerics`, `deterministic`, `db`, `engines`, and for `auto` which engines are allowed.

    Returns:
        [n, k, p, q], or [k, p, q] for an unbatched x. Gradients flow to x, weight and bias: by the same engine where it does
        that direction, else by ATen's convolution_backward. They are not differentiable in turn.

    Tensors that no kernel can read (on the meta device, a FakeTensor, another subclass, one that `torch.func` has wrapped), and
    calls that are traced, go to torch's own convolution, whatever the engine.

    Raises:
        InputError: an argument that torch would refuse too, an unknown engine, tensors on different devices.
        UnsupportedError: the engine cannot do it; with the engine's reason.
    """
    settings = checked_settings(settings)
    check_tensors(x, weight, bias)
    x, weight, bias = cast_for_autocast(x, weight, bias)
    check_dtypes(x, weight, bias)
    batch = x.unsqueeze(0) if x.dim() == 3 else x
    given = [tensor for tensor in (x, weight, bias) if tensor is not None]
    if torch.compiler.is_compiling() or calls.why_not_plain(given) is not None or calls.why_modes_forbid() is not None:
        return torch.nn.functional.conv2d(x, weight, bias, stride, padding, dilation, groups)
    problem = problem_of(x, weight, bias, stride, padding, dilation, groups, settings)
    with device_context(x.device):
        target = _target(x.device, torch.get_num_threads())
        config, problem = choose_config(engine, with_mask(engine, problem, weight, settings), target, settings)
        convolve: Any = ConvolutionFunction  # autograd declares no types of `apply`
        made: torch.Tensor = convolve.apply(
            pad_odd_same(batch, problem), weight, bias, problem, config, target, settings
        )
    y = made.contiguous(memory_format=FORMATS[layout_of(batch)])
    return y.squeeze(0) if x.dim() == 3 else y
