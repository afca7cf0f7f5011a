"""pruned.channels: dense convolutions of the remaining channels and filters, if whole ones are zero.

    y[:, live] = conv(x[:, used], weight[live, used]) + bias[live]        y[:, dead] = bias[dead]        then residual,
    activation

Another engine computes the smaller convolution. The numbers of filters and channels are rounded up to a multiple of 8 by
keeping some dead ones: vectorised kernels are faster with a few zeros than with odd sizes. On a GPU the engine is
`pruned.channels_gpu`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray

from convoy.engines.activations import finish
from convoy.engines.base import Buffers, Engine, Executable, Knobs, Packed
from convoy.engines.delegating.delegating import delegate_workspace_bytes
from convoy.engines.library import aten, onednn
from convoy.engines.manifest import load_engine
from convoy.engines.scratch import Scratch
from convoy.engines.sparse_weights.codegen.lower_mask import positions
from convoy.engines.sparse_weights.mask_check import check_zeros
from convoy.engines.sparse_weights.mask_support_checks import masked_convolution
from convoy.engines.support_checks import storage
from convoy.problem import ConvProblem, Epilogue, Problem
from convoy.support import Support
from convoy.target import Target
from convoy.typed_torch import from_numpy

MULTIPLE: Final = 8
"""Channels of a vector of AVX2; libraries pad to it, or take a slower way."""

LEAST_SAVED: Final = 0.1
"""Share of the multiply-adds that must go: less does not pay for gathering channels, a pass over x or y."""


def kept(problem: ConvProblem) -> tuple[list[int], list[int]]:
    """Filters and input channels that the smaller convolution has, ascending."""
    assert problem.mask is not None
    mask = positions(problem.mask)
    return _rounded(np.any(mask, axis=(1, 2, 3))), _rounded(np.any(mask, axis=(0, 2, 3)))


def _rounded(live: NDArray[np.bool_]) -> list[int]:
    """Live places and as many dead ones as make a multiple, or all."""
    wanted = min(-(-max(int(live.sum()), 1) // MULTIPLE) * MULTIPLE, len(live))
    order = np.argsort(~live, kind="stable")[:wanted]
    return sorted(int(place) for place in order)


def smaller(problem: ConvProblem) -> ConvProblem:
    """The dense convolution that is left. It has the whole epilogue where no filter is missing, else the bias alone."""
    filters, channels = kept(problem)
    whole = len(filters) == problem.k
    epilogue = problem.epilogue if whole else Epilogue(bias=problem.epilogue.bias)
    return replace(problem.with_mask(None), k=len(filters), c=len(channels), epilogue=epilogue)


def inner_knobs(engine: str, problem: ConvProblem, target: Target) -> list[Knobs]:
    """An engine's knobs for the smaller convolution that need no workspace, its default first; none if it does not support it."""
    inner = load_engine(engine)
    if not inner.accepts(problem, target):
        return []
    return [knobs for knobs in inner.space(problem, target) if delegate_workspace_bytes(inner, problem, knobs) == 0]


class SmallerConvolution(Executable):
    """One problem: gather, the library's convolution, scatter."""

    def __init__(self, problem: ConvProblem, knobs: Knobs, target: Target) -> None:
        assert problem.mask is not None
        self._problem = problem
        self._mask = from_numpy(positions(problem.mask))
        filters, channels = kept(problem)
        self._filters, self._channels = torch.tensor(filters), torch.tensor(channels)
        self._gathers, self._scatters = len(channels) < problem.c, len(filters) < problem.k
        inner, engine = smaller(problem), str(knobs["inner"])
        self._inner = load_engine(engine).build(inner, inner_knobs(engine, inner, target)[0], target)
        self._nhwc = problem.layout == "nhwc"
        self._scratch = _scratch(problem)
        self.workspace_bytes = self._scratch.size_bytes
        self.allocates_results = self._inner.allocates_results and not self._scatters
        self.deterministic = self._inner.deterministic

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Places of channels and filters, what dead filters give, then the inner convolution's constants."""
        weight, *bias = (constant.detach() for constant in constants)
        check_zeros(weight, self._mask)
        filters, channels = self._filters.to(weight.device), self._channels.to(weight.device)
        small = weight[filters][:, channels].contiguous()
        inner = self._inner.pack((small, *(b[filters].contiguous() for b in bias)))
        return channels, filters, bias[0] if bias else None, *inner

    def resident_bytes(self, constants: Packed) -> int:
        """The inner convolution's, and the places."""
        channels, filters, _, *inner = constants
        return self._inner.resident_bytes(tuple(inner)) + 8 * (len(channels) + len(filters))

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Gather channels, convolve, scatter filters and finish."""
        channels, filters, bias, *inner = buffers.constants
        x, *residual = buffers.args
        scratch = iter(self._scratch.views(workspace))
        if self._gathers:
            x = self._gathered(x, channels, next(scratch))
        if not self._scatters:
            whole = Buffers((x, *residual), buffers.results, tuple(inner))
            self._inner.launch(whole, None)
            return
        y = buffers.results[0]
        assert y is not None
        made: list[torch.Tensor | None] = [None if self._inner.allocates_results else self._as_image(next(scratch))]
        results = Buffers((x,), made, tuple(inner))
        self._inner.launch(results, None)
        if bias is None:
            y.zero_()
        else:
            y.copy_(bias.view(1, -1, 1, 1).expand_as(y))
        assert results.results[0] is not None
        y.index_copy_(1, filters, results.results[0])
        finish(y, None, residual[0] if residual else None, self._problem.epilogue.activation)

    def _gathered(self, x: torch.Tensor, channels: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        axis = 3 if self._nhwc else 1
        torch.index_select(x.permute(0, 2, 3, 1) if self._nhwc else x, axis, channels, out=into)
        return self._as_image(into)

    def _as_image(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.permute(0, 3, 1, 2) if self._nhwc else tensor


def _scratch(problem: ConvProblem) -> Scratch:
    """Gathered input and the smaller output, each where it is wanted; the output may go unused."""
    small, scratch = smaller(problem), Scratch()
    for wanted, spec in ((small.c < problem.c, small.x_spec), (small.k < problem.k, small.y_spec)):
        if wanted:
            n, c, h, w = spec.shape
            scratch.add((n, h, w, c) if problem.layout == "nhwc" else (n, c, h, w), storage(problem))
    return scratch


class PrunedChannels(Engine):
    """Any forward convolution without groups whose mask has dead filters or channels."""

    id = "pruned.channels"
    family = "library"
    devices = ("cpu",)
    reads_mask = True

    inner: ClassVar[tuple[str, ...]] = (onednn.ENGINE.id, aten.ENGINE.id)
    """Engines for the smaller convolution."""

    def supports(self, problem: Problem, target: Target) -> Support:
        """Masked forward convolutions that become a tenth smaller."""
        if target.device not in self.devices:
            return Support.no(f"needs a {'CPU' if self.devices == ('cpu',) else 'GPU'}, got {target.device}")
        if not (support := masked_convolution(problem, empty=True)):
            return support
        assert isinstance(problem, ConvProblem)
        if problem.groups != 1:
            return Support.no(f"needs groups = 1, got {problem.groups}")
        small = smaller(problem)
        saved = 1 - small.k * small.c / (problem.k * problem.c)
        if saved < LEAST_SAVED:
            dead = f"would leave {small.k} of {problem.k} filters and {small.c} of {problem.c} channels"
            return Support.no(f"needs whole filters or channels of zeros: {dead}")
        return (
            Support.yes()
            if self.space(problem, target)
            else Support.no("no library computes the convolution of the remaining channels")
        )

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """`inner`: the engine of the smaller convolution."""
        assert isinstance(problem, ConvProblem)
        small = smaller(problem)
        return [Knobs.of(inner=name) for name in self.inner if inner_knobs(name, small, target)]

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """Gathered input and the smaller output."""
        assert isinstance(problem, ConvProblem)
        return _scratch(problem).size_bytes

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Nothing is compiled."""
        assert isinstance(problem, ConvProblem)
        return SmallerConvolution(problem, knobs, target)


ENGINE = PrunedChannels()
