"""Program: a bound plan that runs for the arguments of one call signature."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, Protocol

import torch
from torch import nn

from convoy.capture import Captured
from convoy.errors import InputError, PlanError
from convoy.graph.text import digest
from convoy.measurement.device.heap import keep_freed_memory
from convoy.measurement.device.memory_limit import refresh_memory_limit
from convoy.measurement.processes.parallel_compile import ParallelCompile
from convoy.plan.plan import Plan
from convoy.program import calls
from convoy.program.bind import PackedSteps, bind
from convoy.program.cuda.cuda_graph import CudaGraphProgram
from convoy.program.eager import EagerProgram
from convoy.program.native_chains import ChainedProgram
from convoy.program.verification.verify_plan import Regions
from convoy.settings import Settings
from convoy.target import Target
from convoy.tensor_strides import in_known_strides, in_strides


class Runnable(Protocol):
    """Runs a plan: tensors in call order → tensors in return order."""

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run once."""
        ...


@dataclass(frozen=True, eq=False)
class Program:
    """A plan, bound and ready for one signature.

    Attributes:
        plan: the plan that it runs.
        captured: the graph, and how its arguments and results nest, without the constants, which are packed.
        runnable: runs the plan; None if the plan is the baseline, which the stock module runs.
        resident_bytes: bytes of packed constants.
        autocast: where autocast was on when the program was made. The program computes the results of that state.
        default_dtype: PyTorch's when the program was made: tensors that the model makes in its code may have it.
    """

    plan: Plan
    captured: Captured | None
    runnable: Runnable | None
    resident_bytes: int = 0
    autocast: calls.Autocast = field(default_factory=calls.autocast_state)
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    def __post_init__(self) -> None:
        if self.captured is not None and self.captured.constants:  # they would keep the unpacked weights alive
            object.__setattr__(self, "captured", dataclasses.replace(self.captured, constants={}))

    def with_plan(self, plan: Plan) -> Program:
        """The same program with another plan to show, such as one with more notes."""
        return dataclasses.replace(self, plan=plan)

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Program:
        """Itself: a program does not change, and several modules may run it at once."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle holds the plan only: executables belong to this process. A loaded OptimizedModule binds the plan again."""
        return Program, (self.plan, None, None)

    def __call__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        strides: calls.Strides | str = "as made",
        model: nn.Module | None = None,
        *,
        flat: bool = False,
    ) -> Any:
        """Run on arguments of the captured structure. Outputs with other strides than `strides` are copied.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            strides: strides of the outputs; "as made": as for the arguments that the program was made for.
            model: the module whose own tensors are returned where the captured module returns its own; None: copies are.
            flat: `is_flat` said so of a call with tensors of the same kinds: they are not looked at again.
        """
        if self.runnable is None or self.captured is None:
            raise InputError("plan", "baseline", "a plan with steps")
        made = self.runnable(args if flat else self.captured.flatten_inputs(args, kwargs))
        if isinstance(strides, str):
            made = in_known_strides(made, self.captured.strides)
        else:
            made = [in_strides(tensor, wanted) for tensor, wanted in zip(made, strides, strict=True)]
        if model is not None and self.captured.returned:
            made = with_own_tensors(made, self.captured.returned, model)
        return self.captured.unflatten_outputs(made)

    def is_flat(self, args: tuple[Any, ...]) -> bool:
        """Whether these positional arguments are the graph's inputs, in order."""
        if self.captured is None:
            return False
        inputs = self.captured.flatten_inputs(args)
        return len(inputs) == len(args) and all(map(is_, inputs, args))


def with_own_tensors(
    outputs: Sequence[torch.Tensor], returned: Sequence[tuple[int, str]], model: nn.Module
) -> list[torch.Tensor]:
    """Outputs with a module's own parameters and buffers in place of their copies.

    A tensor that the module does not have under its name, such as a constant in the code of `forward`, stays a copy.
    """
    found = list(outputs)
    for index, name in returned:
        own: Any = model
        for part in name.split("."):
            own = getattr(own, part, None)
        if isinstance(own, torch.Tensor) and own.shape == found[index].shape and own.dtype == found[index].dtype:
            found[index] = own
    return found


def build_program(
    plan: Plan,
    captured: Captured,
    regions: Regions,
    target: Target,
    settings: Settings,
    packed: PackedSteps | None = None,
    ahead: ParallelCompile | None = None,
    *,
    tuned: bool = False,
) -> Program:
    """Bind a plan and make it runnable on its target's device.

    On a GPU the launches are captured as one CUDA graph. If that fails, they run one by one, and a note of the program's plan
    gives the reason. `packed`, `ahead` and `tuned` are those of `bind`.

    Raises:
        PlanError: the plan is for another graph.
        CompileError: the baseline could not be built.
    """
    found = digest(captured.graph)
    if plan.graph_digest != found:
        todo = f"It was tuned with the weights {plan.weights}: give these, or tune" if plan.weights else "Tune"
        raise PlanError("plan", plan.graph_digest, f"a plan of this model, digest {found}", f"{todo} the model again.")
    if plan.baseline:
        return Program(plan, captured, None)
    device = torch.device("cuda", torch.cuda.current_device()) if target.device == "cuda" else torch.device("cpu")
    refresh_memory_limit()
    with torch.no_grad(), ParallelCompile(target, settings) as own:
        bound = bind(plan, captured, regions, target, settings.engines, packed, ahead or own, tuned=tuned)
        plan = bound.plan or plan
        runnable: Runnable
        if target.device == "cuda":
            runnable = CudaGraphProgram(bound, device, static_outputs=settings.static_outputs)
            plan = _with_capture_note(plan, runnable.refused)
        else:
            if settings.keep_freed_memory:
                keep_freed_memory()
            runnable = ChainedProgram(bound, device)
    return Program(plan, captured, runnable, bound.resident_bytes)


def _with_capture_note(plan: Plan, refused: str) -> Plan:
    """The plan; with a note if its launches could not be captured as a CUDA graph."""
    note = f"the launches could not be captured as a CUDA graph and run one by one: {refused}"
    return plan if not refused or note in plan.notes else dataclasses.replace(plan, notes=(*plan.notes, note))


def eager_of(runnable: Runnable) -> EagerProgram:
    """The program that launches kernel by kernel: the one that a CUDA graph was captured from, or `runnable` itself."""
    eager = runnable.eager if isinstance(runnable, CudaGraphProgram) else runnable
    assert isinstance(eager, EagerProgram)
    return eager
