"""CpuSubgraphEngine: base of the CPU engines in C that compute a subgraph of one operator on 4-D values."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from convoy.engines.base import Engine
from convoy.engines.compilers.host_compiler import compiler_support
from convoy.engines.cost_model import KernelWork, estimate_us
from convoy.engines.subgraph import torch_support
from convoy.problem import Knobs, Problem, SubgraphProblem, kind_in_words
from convoy.support import Support
from convoy.target import Target


class CpuSubgraphEngine(Engine):
    """One pass over memory by C code that is compiled once for all problems.

    Attributes:
        does: a phrase such as `computes poolings`, for reasons.
        layouts: memory formats that the engine accepts.
    """

    does: ClassVar[str]
    layouts: ClassVar[tuple[str, ...]]
    family = "direct"
    trusted = False

    def supports(self, problem: Problem, target: Target) -> Support:
        """Accepts the engine's kind of subgraph, in one of its memory formats, on a CPU with a C compiler."""
        if not isinstance(problem, SubgraphProblem):
            return Support.no(f"{self.does}, got {kind_in_words(problem)}")
        if target.device != "cpu":
            return Support.no(f"runs on CPUs, got {target.device}")
        if problem.layout not in self.layouts:
            return Support.no(f"needs layout {' or '.join(self.layouts)}, got {problem.layout}")
        if not (found := torch_support(problem)):
            return found
        if reason := self.refusal(problem):
            return Support.no(reason)
        return compiler_support()

    @abstractmethod
    def refusal(self, problem: SubgraphProblem) -> str:
        """Why the engine cannot compute a subgraph; empty if it can."""

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float | None:
        """A pass over memory."""
        del knobs
        return estimate_us(KernelWork(0.0, problem.bytes_min, 1), target)
