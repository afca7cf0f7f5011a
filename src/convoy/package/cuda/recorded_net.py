"""RecordedNet: a program of a package for a GPU, called with the arguments of the exported module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from convoy.capture.captured import Captured
from convoy.package.cuda.cuda_program import PackagedCudaProgram
from convoy.plan.plan import Plan
from convoy.tensor_strides import in_known_strides


@dataclass(frozen=True, eq=False)
class RecordedNet:
    """What `Program` is for a bound plan, without what binding needs.

    Attributes:
        plan: the plan that was recorded.
        captured: its graph, and how arguments and results nest.
        runnable: runs the recorded graph.
    """

    plan: Plan
    captured: Captured
    runnable: PackagedCudaProgram

    @property
    def resident_bytes(self) -> int:
        """Device memory of the program, constants that it shares included."""
        return self.runnable.resident_bytes

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run on arguments of the captured structure."""
        made = self.runnable(self.captured.flatten_inputs(args, kwargs))
        return self.captured.unflatten_outputs(in_known_strides(made, self.captured.strides))
