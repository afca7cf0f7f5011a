"""OptimizedModule: a drop-in for the user's module, with a program for each input shape that was tuned."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import nn

from convoy import plan as plans
from convoy.capture import Captured
from convoy.errors import InputError, PlanError
from convoy.measurement.device.heap import keep_freed_memory
from convoy.measurement.device.memory_limit import refresh_memory_limit
from convoy.measurement.processes.parallel_compile import ParallelCompile
from convoy.plan.plan import Plan
from convoy.program import calls
from convoy.program.bind import PackedSteps, Regions, bind
from convoy.program.cuda_graph import CudaGraphProgram
from convoy.program.eager import EagerProgram
from convoy.program.native_chains import ChainedProgram
from convoy.program.program_cache import CachedProgram, ProgramCache, Tuner, stock_names
from convoy.program.serialization import copy_module, reduce_module
from convoy.settings import Settings
from convoy.target import Target


class Runnable(Protocol):
    """What `Program` drives: tensors in call order → tensors in return order."""

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run once."""
        ...


class Program:
    """A plan, bound and ready for one signature.

    Attributes:
        plan: what it runs.
        captured: the graph, and how its arguments and results nest; its constants were packed and are not kept.
        runnable: what runs it; None where the plan is the baseline and the stock module runs.
        resident_bytes: bytes of packed constants.
        autocast: where autocast was on when it was made; it computes that.
    """

    def __init__(
        self, plan: Plan, captured: Captured | None, runnable: Runnable | None, resident_bytes: int = 0
    ) -> None:
        self.plan = plan
        self.captured = None if captured is None else dataclasses.replace(captured, constants={})
        self.runnable = runnable
        self.resident_bytes = resident_bytes
        self.autocast = calls.autocast_state()

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        """Itself: nothing changes it, and several modules may run it at once."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Its plan alone: what it runs belongs to this process. A pickled OptimizedModule binds the plan again."""
        return Program, (self.plan, None, None)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], strides: calls.Strides | str = "as made") -> Any:
        """Run on arguments of the captured structure; outputs that lie otherwise than `strides` says are copied.

        "as made": for arguments that lie as those did that the program was made for.
        """
        if self.runnable is None or self.captured is None:
            raise InputError("plan", "baseline", "a plan with steps")
        made = self.runnable(self.captured.flatten_inputs(args, kwargs))
        if isinstance(strides, str):
            for index, wanted in enumerate(self.captured.strides):
                if wanted is not None and not calls.has_strides(made[index], wanted):
                    made = [*made[:index], calls.in_strides(made[index], wanted), *made[index + 1 :]]
        else:
            made = [calls.in_strides(tensor, wanted) for tensor, wanted in zip(made, strides, strict=True)]
        return self.captured.unflatten_outputs(made)


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

    On a GPU the launches are captured as one CUDA graph. Where that fails they run one by one, and a note of the program's plan
    says why. `packed`, `ahead` and `tuned` are those of `bind`.

    Raises:
        PlanError: the plan is for another graph.
        CompileError: an engine could not build.
    """
    from convoy.graph.text import digest

    found = digest(captured.graph)
    if plan.graph_digest != found:
        raise PlanError("plan", plan.graph_digest, f"a plan of this model, digest {found}", "Tune the model anew.")
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
            plan = _with_refusal(plan, runnable.refused)
        else:
            if settings.keep_freed_memory:
                keep_freed_memory()
            runnable = ChainedProgram(bound, device)
    return Program(plan, captured, runnable, bound.resident_bytes)


def _with_refusal(plan: Plan, refused: str) -> Plan:
    """A plan with a note of why its launches are no CUDA graph, where they are none."""
    note = f"the launches could not be captured as a CUDA graph and run one by one: {refused}"
    return plan if not refused or note in plan.notes else dataclasses.replace(plan, notes=(*plan.notes, note))


class OptimizedModule(nn.Module):
    """Runs a tuned program where one fits the call, the stock module where none does, and says so once.

    It computes inference results: outputs carry no gradient. The stock module runs instead when an input requires a gradient,
    when the module is in training mode, when something that the program depends on was changed (`refresh` packs the new
    values), inside autocast or a transform of `torch.func`, and for shapes that have no plan (`tune` makes one).
    `docs/concepts/stale-weights.md` lists the changes that are noticed. While tracing (`torch.compile`, `torch.export`,
    `torch.jit`) the stock module is traced.

    A fallback computes evaluation, as the program does, although the stock module may have been in training mode when it was
    tuned. Training mode that is switched on later counts: by `train()` here, or on the stock module or a part of it.

    Args:
        model: the stock module; its parameters stay its own.
        program: the first program.
        args: the arguments that it was made for.
        kwargs: keyword arguments likewise.
        tuner: makes a program for further arguments.
        check: how changes of the stock module are noticed (`Settings.check`).
    """

    model: nn.Module

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tuner: Tuner,
        check: str = "identity",
    ) -> None:
        super().__init__()
        self.model = model
        self._serving = ProgramCache(model, tuner, check)
        self._serving.add(args, kwargs, program)
        self.training = False

    @property
    def plan(self) -> Plan:
        """The first plan."""
        return self.programs[0].plan

    @property
    def plans(self) -> list[Plan]:
        """All plans, one for each tuned shape."""
        return [program.plan for program in self.programs]

    @property
    def programs(self) -> list[Program]:
        """All programs, one for each tuned shape."""
        return self._serving.programs

    def explain(self, layer: str | None = None) -> str:
        """The plan in words: every step's engine, layout and time, or all that is known of one layer."""
        return plans.explain(self.plan, layer)

    def save(self, path: str | Path) -> list[Path]:
        """Write the plan; with several shapes, one file each (`net.plan.json`, `net.plan.1.json`, ...)."""
        first = Path(path)
        written: list[Path] = []
        for index, plan in enumerate(self.plans):
            target = first if index == 0 else first.with_suffix(f".{index}{first.suffix}")
            plans.save(plan, target)
            written.append(target)
        return written

    def tune(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Plan:
        """Make a plan for arguments of other shapes; later calls with such arguments use it."""
        program = self._serving.tuner(self.model, args, kwargs or {}, None)
        self._serving.add(args, kwargs or {}, program)
        return program.plan

    def add(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], program: Program) -> None:
        """Serve calls with arguments like these by a program."""
        self._serving.add(args, kwargs, program)

    def refresh(self) -> None:
        """Make the programs fit the stock module as it is now.

        The parameters' present values are packed under the plans that are there. A shape for which the module computes
        something else by now, because a layer was swapped or a dtype changed, is tuned anew.
        """
        self._serving.refresh(self.model)

    def renew(self) -> None:
        """Take the stock module as it is now for what the programs were made from."""
        self._serving.renew(self.model)

    def stale(self) -> str | None:
        """What was changed since the programs were made, such as "0.weight was changed in place"; None if nothing was."""
        return self._serving.change(wait=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The stock module's forward, by the program that fits."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return self.model(*args, **kwargs)
        serving = self._serving
        tensors = tuple(calls.tensors_of((args, kwargs)))
        found = serving.find(args, kwargs)
        served = None if found is None else found[0]
        reason = self._why_stock(served, tensors)
        if reason is not None or found is None or served is None:
            return self._run_stock(args, kwargs, reason or "")
        given = serving.arranged(served, args, kwargs) if found[1] else (args, kwargs)
        strides = tuple([tensor.stride() for tensor in calls.tensors_of(given)])
        wanted = served.outputs(strides)
        if wanted == "stock":
            return self._run_stock(args, kwargs, _OTHER_STRIDES)
        # A GPU has its work before the module's state is looked at, which takes tens of microseconds (ResNet-50 has 320
        # tensors). If the state has changed, the result is thrown away.
        with torch.no_grad():
            ahead = isinstance(served.program.runnable, CudaGraphProgram) and wanted != "unknown"
            made = served.program(*given, wanted) if ahead else None
            reason = serving.why_stale()
            if reason is None and wanted != "unknown":
                return made if ahead else served.program(*given, wanted)
        made = self._run_stock(args, kwargs, reason or "", kind="stale")
        if reason is None:
            served.learn(strides, made)
        return made

    # --- a drop-in for the stock module -------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """The stock module's attributes and methods, such as `num_classes`, besides its own."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_modules", {}).get("model")
            if model is None or name.startswith("__"):
                raise
            return getattr(model, name)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The stock module's state dict, under its own names."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the stock module's state dict; names may begin with `model.`, as this module's once did. Call `refresh` then."""
        return self.model.load_state_dict(stock_names(state_dict, self.model), strict=strict, assign=assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """As a part of a larger module that loads its state dict: put the names where `model` will look for them."""
        part = {key.removeprefix(prefix): state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
        found = stock_names(part, self.model)
        state_dict.update((f"{prefix}model.{key}", value) for key, value in found.items())
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizedModule:
        """A module that works by itself, bound to a copy of the stock module."""
        return copy_module(self, memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A pickle holds the stock module and the plans; see `convoy.program.serialization`."""
        return reduce_module(self)

    # --- which of the two runs ----------------------------------------------------------------------------------------------

    def _why_stock(self, served: CachedProgram | None, tensors: Sequence[torch.Tensor]) -> str | None:
        """Why the stock module must run; empty where it need not be said; None where the program may run."""
        if served is not None and served.program.runnable is None:
            return ""
        reason = calls.why_not_plain(tensors)
        if reason is not None:
            return f"{reason}: the stock module runs"
        if served is None:
            return "no plan for these input shapes or dtypes: the stock module runs; call .tune(args) to make one"
        if self.training:
            return "the module is in training mode: the stock module runs; call .eval()"
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return "an input requires a gradient: the stock module runs"
        reason = calls.why_modes_forbid(served.program.autocast)
        return None if reason is None else f"{reason}: the stock module runs"

    def _run_stock(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], reason: str, kind: str = "") -> Any:
        if reason:
            self._serving.warn(kind or reason, reason)
        if self.training:
            return self.model(*args, **kwargs)
        with self._serving.evaluating(self.model):
            return self.model(*args, **kwargs)


_OTHER_STRIDES: Final = (
    "the inputs have other strides than were tuned for, and outputs in the strides that PyTorch gives them cannot be copied, or "
    "the inputs come in too many strides: the stock module runs; call .contiguous() on the inputs, or .tune(args)"
)


def eager_of(runnable: Runnable) -> EagerProgram:
    """The launches one by one: what a graph program captured, or the program itself."""
    eager = runnable.eager if isinstance(runnable, CudaGraphProgram) else runnable
    assert isinstance(eager, EagerProgram)
    return eager
