"""Convolutions whose weight changes from call to call, as in training: any engine, with its packing made part of the launch."""

from __future__ import annotations

from dataclasses import replace

import torch

from convoy.engines.base import Buffers, Engine, Executable, Knobs
from convoy.problem import ConvolutionProblem, Problem
from convoy.target import Target


class _Fresh(Executable):
    """An executable that takes the weight and the bias as args and arranges them in every launch.

    args = (x, weight), then the bias and the residual where the epilogue has them. The weight comes in the problem's memory
    format: an engine that wants it so has nothing to do.
    """

    def __init__(self, inner: Executable, problem: ConvolutionProblem) -> None:
        self._inner = inner
        self._constants = 1 + problem.epilogue.bias
        self.workspace_bytes = inner.workspace_bytes
        self.allocates_results = inner.allocates_results
        self.deterministic = inner.deterministic

    def accept_slice(self, result: int, pitch: int, offset: int) -> bool:
        """Slices that the wrapped executable accepts."""
        return self._inner.accept_slice(result, pitch, offset)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        x, *rest = buffers.args
        packed = self._inner.pack(rest[: self._constants])
        inner = Buffers((x, *rest[self._constants :]), buffers.results, packed)
        self._inner.launch(inner, workspace)


def build(engine: Engine, problem: Problem, knobs: Knobs, target: Target) -> Executable:
    """Build an engine's executable; if the weight is dynamic, every launch packs it.

    Raises:
        CompileError: with the tool's log inside.
    """
    if isinstance(problem, ConvolutionProblem) and problem.dynamic_weight:
        return _Fresh(engine.build(replace(problem, dynamic_weight=False), knobs, target), problem)
    return engine.build(problem, knobs, target)
