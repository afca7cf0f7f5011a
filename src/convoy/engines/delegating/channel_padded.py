"""padded: pads the channels of a convolution with zeros to a multiple of 16 bytes and delegates to a kernel that needs that.

    y[:, :k] = conv(x with zeros up to c', weight with zeros up to [k', c'])

Kernels that load by TMA need rows of a multiple of 16 bytes. The weight is padded once. Every launch copies x if c needs padding,
and y if k does. That pays if the convolution takes long compared with these copies.
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

DELEGATES: Final = ("cuda.implicit_gemm", "triton.persistent", "triton.swapped")
"""Engines that need channels in multiples of 16 bytes."""

LEAST_CHANNELS: Final = 5
"""First layers have fewer; other engines have kernels for them."""

MOST_DELEGATE_KNOBS: Final = 4
"""Knob settings tried of each delegate."""

_COPY_BYTES_US: Final = 2.0e6
_COPY_US: Final = 3.0
"""Bytes a microsecond that a copy moves, and the time of its two launches: PyTorch's strided copy, and the zero fill."""


def padded_problem(problem: ConvProblem) -> ConvProblem:
    """The convolution on padded tensors. If y is copied, the residual is added after the copy, not by the delegate."""
    multiple = 16 // DTYPE_BYTES[problem.x_dtype]
    c, k = (-(-size // multiple) * multiple for size in (problem.c, problem.k))
    epilogue = problem.epilogue
    if k != problem.k and epilogue.residual:
        epilogue = Epilogue(bias=epilogue.bias)
    return replace(problem, c=c, k=k, epilogue=epilogue)


def _padded_tensors(problem: ConvProblem) -> Scratch:
    """Scratch for the padded x and y, each if it is needed; the delegate's workspace lies behind them."""
    padded, scratch = padded_problem(problem), Scratch()
    for wanted, spec in ((padded.c > problem.c, padded.x_spec), (padded.k > problem.k, padded.y_spec)):
        if wanted:
            n, c, h, w = spec.shape
            scratch.add((n, h, w, c), storage(problem))
    return scratch


class ChannelPaddedExecutable(Executable):
    """A delegate's kernel on padded tensors."""

    def __init__(self, problem: ConvProblem, executable: Executable) -> None:
        self._problem, self._delegate, self._padded = problem, executable, padded_problem(problem)
        self._scratch = _padded_tensors(problem)
        self.workspace_bytes = self._scratch.size_bytes + executable.workspace_bytes
        self.deterministic = executable.deterministic

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Pad weight and bias with zeros and pack them for the delegate."""
        weight, *bias = (constant.detach() for constant in constants)
        more_c, more_k = self._padded.c - self._problem.c, self._padded.k - self._problem.k
        weight = torch.nn.functional.pad(weight, (0, 0, 0, 0, 0, more_c, 0, more_k))
        return self._delegate.pack([weight, *(torch.nn.functional.pad(b, (0, more_k)) for b in bias)])

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Copy x, convolve, copy y."""
        problem = self._problem
        x, *residual = buffers.args
        scratch = iter(self._scratch.views(workspace))
        if self._padded.c > problem.c:
            wide = next(scratch)
            wide[..., problem.c :].zero_()
            wide[..., : problem.c].copy_(x.permute(0, 2, 3, 1))
            x = wide.permute(0, 3, 1, 2)
        rest = workspace if self._delegate.workspace_bytes else None
        more = None if rest is None else rest[self._scratch.size_bytes :]
        if self._padded.k == problem.k:
            self._delegate.launch(Buffers((x, *residual), buffers.results, buffers.constants), more)
            return
        y = buffers.results[0]
        assert y is not None
        made = next(scratch).permute(0, 3, 1, 2)
        self._delegate.launch(Buffers((x,), [made], buffers.constants), more)
        y.copy_(made[:, : problem.k])
        if residual:
            finish(y, None, residual[0], problem.epilogue.activation)


class ChannelPaddedEngine(Engine):
    """Forward convolutions in NHWC without groups whose channels are not a multiple of 16 bytes."""

    id = "padded"
    family = "implicit_gemm"
    devices = ("cuda",)
    trusted = False
    quick_settings = 1

    def supports(self, problem: Problem, target: Target) -> Support:
        """Yes, if padding makes a delegate possible."""
        if target.device != "cuda":
            return Support.no(f"needs an NVIDIA GPU, got {target.device}")
        if not (support := plain_convolution(problem)):
            return support
        assert isinstance(problem, ConvProblem)
        if problem.layout != "nhwc" or problem.groups != 1:
            return Support.no(f"needs layout nhwc and groups = 1, got {problem.layout} and {problem.groups}")
        if problem.c < LEAST_CHANNELS or problem.n == 0:
            return Support.no(f"needs at least {LEAST_CHANNELS} channels and an image, got {problem.c} and {problem.n}")
        padded = padded_problem(problem)
        if (padded.c, padded.k) == (problem.c, problem.k):
            return Support.no(
                f"is for c or k that is not a multiple of 16 bytes, got c = {problem.c} and k = {problem.k}"
            )
        if not any(delegating.delegate_knobs(engine, padded, target) for engine in DELEGATES):
            return Support.no("no engine that it could delegate to takes the padded convolution")
        return Support.yes()

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """The first knob settings of every delegate, by rising estimated time."""
        assert isinstance(problem, ConvProblem)
        padded = padded_problem(problem)
        found = [
            delegating.wrap_knobs(engine, knobs)
            for engine in DELEGATES
            for knobs in delegating.delegate_knobs(engine, padded, target)[:MOST_DELEGATE_KNOBS]
        ]
        return sorted(found, key=lambda knobs: self.estimate_us(problem, knobs, target))

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """The padded tensors and the delegate's workspace."""
        assert isinstance(problem, ConvProblem)
        engine, setting = delegating.unwrap_knobs(knobs, DELEGATES)
        return _padded_tensors(problem).size_bytes + load_engine(engine).workspace_bytes(
            padded_problem(problem), setting
        )

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """The delegate's estimate, and two operations for each padded tensor."""
        assert isinstance(problem, ConvProblem)
        engine, setting = delegating.unwrap_knobs(knobs, DELEGATES)
        padded = padded_problem(problem)
        copies = [
            _COPY_US + (a.size_bytes + b.size_bytes) / _COPY_BYTES_US
            for a, b in ((problem.x_spec, padded.x_spec), (problem.y_spec, padded.y_spec))
            if a != b
        ]
        return (load_engine(engine).estimate_us(padded, setting, target) or 0.0) + sum(copies)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Build the delegate for the padded convolution."""
        assert isinstance(problem, ConvProblem)
        engine, setting = delegating.unwrap_knobs(knobs, DELEGATES)
        return ChannelPaddedExecutable(problem, load_engine(engine).build(padded_problem(problem), setting, target))


ENGINE = ChannelPaddedEngine()
