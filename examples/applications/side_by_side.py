"""What the examples beside this file print: PyTorch's time, Convoy's time, and the largest difference of their outputs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import convoy


def same_order(found: Any, wanted: Any) -> tuple[Any, Any]:
    """Outputs that stand side by side as they are."""
    return found, wanted


def compare(
    name: str,
    model: nn.Module,
    args: tuple[Any, ...],
    settings: convoy.Settings | None = None,
    paired: Callable[[Any, Any], tuple[Any, Any]] = same_order,
) -> tuple[nn.Module, float]:
    """Optimize a model for these arguments and print how it compares with the model itself.

    Args:
        name: printed before the figures.
        model: in evaluation mode.
        args: example inputs.
        settings: `Settings()` by default, which measures for a minute.
        paired: brings the outputs of the faster module and of the model into one order.

    Returns:
        The faster module, and the largest difference of an output, relative to the largest output.
    """
    fast = convoy.optimize(model, args, settings=settings)
    with torch.no_grad():
        found, wanted = map(floats, paired(fast(*args), model(*args)))
        stock_ms, convoy_ms = median_ms(lambda: model(*args)), median_ms(lambda: fast(*args))
    difference = largest_difference(found, wanted)
    print(f"{name}: PyTorch {stock_ms:.2f} ms, Convoy {convoy_ms:.2f} ms, largest difference {difference:.1e}")
    return fast, difference


def floats(outputs: Any) -> list[torch.Tensor]:
    """The floating-point tensors of nested outputs."""
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def largest_difference(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest value of the tensor that it is in."""
    pairs = [(one, other) for one, other in zip(found, wanted, strict=True) if other.numel()]
    return max((float((one - other).abs().max() / other.abs().max()) for one, other in pairs), default=0.0)


def median_ms(run: Callable[[], object], rounds: int = 5) -> float:
    """The median time of a call, milliseconds."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model with statistics of batch norms as training leaves them, in evaluation mode."""
    torch.manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_var is not None:
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return model.eval()
