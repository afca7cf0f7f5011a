"""padded: convolutions whose channels are no multiple of a vector, on tensors that are: zeros are put behind the channels.

    y[:, :k] = conv(x with zeros up to c', weight with zeros up to [k', c'])

Kernels that copy by TMA want rows of whole 16 bytes. The weight is padded once; x is copied in every launch where c is odd, and y
where k is. That pays where the product is long beside these copies; a candidate like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from convoy.engines.activations import finish
from convoy.engines.base import Buffers, Engine, Executable, Knobs, Packed
from convoy.engines.delegating import delegating
from convoy.engines.manifest import load_engine
from convoy.engines.scratch import Scratch
from convoy.engines.support_checks import plain_convolution, storage
from convoy.problem import ConvProblem, Epilogue, Problem
from convoy.problem.spec import DTYPE_BYTES
from convoy.support import Support
from convoy.target import Target

INNER: Final = ("cuda.implicit_gemm", "triton.persistent", "triton.swapped")
"""Engines that want whole vectors."""

LEAST_CHANNELS: Final = 5
"""Fewer are a first layer's, for which there are kernels that read windows."""

MOST_SETTINGS: Final = 4
"""Of an inner engine."""

_COPY_BYTES_US: Final = 2.0e6
_COPY_US: Final = 3.0
"""What a copy moves, and its launches: PyTorch's copy of a slice with a stride, and the zeros."""


def whole(problem: ConvProblem) -> ConvProblem:
    """The convolution on padded tensors. It has no residual where y is copied: that comes after."""
    multiple = 16 // DTYPE_BYTES[problem.x_dtype]
    c, k = (-(-size // multiple) * multiple for size in (problem.c, problem.k))
    epilogue = problem.epilogue
    if k != problem.k and epilogue.residual:
        epilogue = Epilogue(bias=epilogue.bias)
    return replace(problem, c=c, k=k, epilogue=epilogue)


def _room(problem: ConvProblem) -> Scratch:
    """The padded x and y, each where it is wanted; what the inner kernel wants comes behind them."""
    padded, scratch = whole(problem), Scratch()
    for wanted, spec in ((padded.c > problem.c, padded.x_spec), (padded.k > problem.k, padded.y_spec)):
        if wanted:
            n, c, h, w = spec.shape
            scratch.add((n, h, w, c), storage(problem))
    return scratch


class PaddedConvolution(Executable):
    """One inner kernel on padded tensors."""

    def __init__(self, problem: ConvProblem, executable: Executable) -> None:
        self._problem, self._inner, self._whole = problem, executable, whole(problem)
        self._scratch = _room(problem)
        self.workspace_bytes = self._scratch.size_bytes + executable.workspace_bytes
        self.deterministic = executable.deterministic

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Weight and bias with zeros, as the inner kernel wants them."""
        weight, *bias = (constant.detach() for constant in constants)
        more_c, more_k = self._whole.c - self._problem.c, self._whole.k - self._problem.k
        weight = torch.nn.functional.pad(weight, (0, 0, 0, 0, 0, more_c, 0, more_k))
        return self._inner.pack([weight, *(torch.nn.functional.pad(b, (0, more_k)) for b in bias)])

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Copy x, convolve, copy y."""
        problem = self._problem
        x, *residual = buffers.args
        pieces = iter(self._scratch.views(workspace))
        if self._whole.c > problem.c:
            wide = next(pieces)
            wide[..., problem.c :].zero_()
            wide[..., : problem.c].copy_(x.permute(0, 2, 3, 1))
            x = wide.permute(0, 3, 1, 2)
        room = workspace if self._inner.workspace_bytes else None
        more = None if room is None else room[self._scratch.size_bytes :]
        if self._whole.k == problem.k:
            self._inner.launch(Buffers((x, *residual), buffers.results, buffers.constants), more)
            return
        y = buffers.results[0]
        assert y is not None
        made = next(pieces).permute(0, 3, 1, 2)
        self._inner.launch(Buffers((x,), [made], buffers.constants), more)
        y.copy_(made[:, : problem.k])
        if residual:
            finish(y, None, residual[0], problem.epilogue.activation)


class Padded(Engine):
    """Any forward convolution in NHWC without groups whose channels are no multiple of 16 bytes."""

    id = "padded"
    family = "implicit_gemm"
    trusted = False
    quick_settings = 1

    def supports(self, problem: Problem, target: Target) -> Support:
        """Where zeros make an engine for whole vectors possible."""
        if target.device != "cuda":
            return Support.no(f"needs an NVIDIA GPU, got {target.device}")
        if not (support := plain_convolution(problem)):
            return support
        assert isinstance(problem, ConvProblem)
        if problem.layout != "nhwc" or problem.groups != 1:
            return Support.no(f"needs layout nhwc without groups, got {problem.layout} with {problem.groups}")
        if problem.c < LEAST_CHANNELS or problem.n == 0:
            return Support.no(f"needs at least {LEAST_CHANNELS} channels and an image, got {problem.c} and {problem.n}")
        padded = whole(problem)
        if (padded.c, padded.k) == (problem.c, problem.k):
            return Support.no(f"pads c and k to a multiple of 16 bytes, which {problem.c} and {problem.k} are")
        if not any(delegating.settings(engine, padded, target) for engine in INNER):
            return Support.no("no engine for whole vectors takes the padded convolution")
        return Support.yes()

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """The first settings of every inner engine, the best guess first."""
        assert isinstance(problem, ConvProblem)
        padded = whole(problem)
        found = [
            delegating.wrap(engine, knobs)
            for engine in INNER
            for knobs in delegating.settings(engine, padded, target)[:MOST_SETTINGS]
        ]
        return sorted(found, key=lambda knobs: self.estimate_us(problem, knobs, target))

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """The padded tensors, and what the inner kernel wants."""
        assert isinstance(problem, ConvProblem)
        engine, setting = delegating.unwrap(knobs, INNER)
        return _room(problem).size_bytes + load_engine(engine).workspace_bytes(whole(problem), setting)

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """The inner engine's guess, and two operations for each tensor that is padded."""
        assert isinstance(problem, ConvProblem)
        engine, setting = delegating.unwrap(knobs, INNER)
        padded = whole(problem)
        copies = [
            _COPY_US + (a.size_bytes + b.size_bytes) / _COPY_BYTES_US
            for a, b in ((problem.x_spec, padded.x_spec), (problem.y_spec, padded.y_spec))
            if a != b
        ]
        return (load_engine(engine).estimate_us(padded, setting, target) or 0.0) + sum(copies)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Build the inner kernel for the padded convolution."""
        assert isinstance(problem, ConvProblem)
        engine, setting = delegating.unwrap(knobs, INNER)
        return PaddedConvolution(problem, load_engine(engine).build(whole(problem), setting, target))


ENGINE = Padded()
