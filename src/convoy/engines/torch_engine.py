"""TorchEngine: base of the engines that use PyTorch's operations and compile nothing."""

from __future__ import annotations

from abc import abstractmethod

from convoy.engines.base import Engine, Executable, Knobs
from convoy.engines.cost_model import KernelWork, estimate_us
from convoy.problem import Problem
from convoy.target import Target


class TorchEngine(Engine):
    """An engine whose executables are cheap to make and know their own workspace and work."""

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """The executable's workspace."""
        return self.executable(problem, knobs).workspace_bytes

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float | None:
        """Products, passes over memory and calls, each at its rate."""
        return estimate_us(self.executable(problem, knobs).work(), target)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """The executable; nothing is compiled."""
        del target
        return self.executable(problem, knobs)

    @abstractmethod
    def executable(self, problem: Problem, knobs: Knobs) -> TorchExecutable:
        """Lay out one supported problem's launch; allocates no tensors."""


class TorchExecutable(Executable):
    """An executable that reports the work of its launch."""

    @abstractmethod
    def work(self) -> KernelWork:
        """The work of one launch."""
