"""OptimizedModule: a drop-in for the user's module, with a program for each input shape that was tuned."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from convoy import plan as plans
from convoy.capture import Captured
from convoy.errors import InputError, PlanError
from convoy.measurement.ahead import Ahead
from convoy.measurement.heap import keep_freed_memory
from convoy.measurement.room import keep_room
from convoy.plan.plan import Plan
from convoy.program.bind import PackedSteps, Regions, bind
from convoy.program.chained import ChainedProgram
from convoy.program.eager import EagerProgram
from convoy.program.graph import GraphProgram
from convoy.settings import Settings
from convoy.target import Target

_VERSION = attrgetter("_version")

Signature = tuple[Any, ...]
"""What a call's arguments must equal for a program to serve it: shapes, dtypes, devices, and the values of the rest."""


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
    """

    def __init__(
        self, plan: Plan, captured: Captured | None, runnable: Runnable | None, resident_bytes: int = 0
    ) -> None:
        self.plan = plan
        self.captured = None if captured is None else dataclasses.replace(captured, constants={})
        self.runnable = runnable
        self.resident_bytes = resident_bytes

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run on arguments of the captured structure."""
        if self.runnable is None or self.captured is None:
            raise InputError("plan", "baseline", "a plan with steps")
        return self.captured.unflatten_outputs(self.runnable(self.captured.flatten_inputs(args, kwargs)))


def build_program(
    plan: Plan,
    captured: Captured,
    regions: Regions,
    target: Target,
    settings: Settings,
    packed: PackedSteps | None = None,
    ahead: Ahead | None = None,
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
    keep_room()
    with torch.no_grad(), Ahead(target, settings) as own:
        bound = bind(plan, captured, regions, target, settings.engines, packed, ahead or own, tuned=tuned)
        plan = bound.plan or plan
        runnable: Runnable
        if target.device == "cuda":
            runnable = GraphProgram(bound, device, static_outputs=settings.static_outputs)
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

    It computes inference results: outputs carry no gradient. The stock module runs instead when an input requires a
    gradient, when the module is in training mode, when a parameter was changed after tuning (`refresh` packs the new
    values), and for shapes that have no plan (`tune` makes one).

    Args:
        model: the stock module; its parameters stay its own.
        program: the first program.
        signature: the call that it serves.
        tuner: makes a program for further arguments.
    """

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        signature: Signature,
        tuner: Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Plan | None], Program],
    ) -> None:
        super().__init__()
        self.model = model
        self._programs: dict[Signature, Program] = {signature: program}
        self._tuner = tuner
        self._warned: set[str] = set()
        # Tensors made in inference mode count no versions.
        self._tensors = [t for t in (*model.parameters(), *model.buffers()) if not t.is_inference()]
        self._stamp = self._versions()
        self.training = model.training

    @property
    def plan(self) -> Plan:
        """The first plan."""
        return next(iter(self._programs.values())).plan

    @property
    def plans(self) -> list[Plan]:
        """All plans, one for each tuned shape."""
        return [program.plan for program in self._programs.values()]

    @property
    def programs(self) -> list[Program]:
        """All programs, one for each tuned shape."""
        return list(self._programs.values())

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
        program = self._tuner(self.model, args, kwargs or {}, None)
        self._programs[signature_of(args, kwargs or {})] = program
        return program.plan

    def add(self, signature: Signature, program: Program) -> None:
        """Serve calls of a further signature by a program."""
        self._programs[signature] = program

    def refresh(self) -> None:
        """Pack the parameters' present values anew, under the plans that are there."""
        for signature, program in list(self._programs.items()):
            args, kwargs = _example(signature)
            self._programs[signature] = self._tuner(self.model, args, kwargs, program.plan)
        self._stamp = self._versions()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The stock module's forward, by the program that fits."""
        program = self._programs.get(signature_of(args, kwargs))
        reason = self._why_stock(program, args, kwargs)
        if reason is None and program is not None:
            # A GPU has its work before the versions of all parameters are looked at, which takes tens of microseconds: ResNet-50
            # has 320 tensors. Where they have changed, what it makes is thrown away.
            with torch.no_grad():
                made = program(args, kwargs) if isinstance(program.runnable, GraphProgram) else None
                reason = self._why_stale()
                if reason is None:
                    return program(args, kwargs) if made is None else made
        if reason:
            self._warn_once(reason)
        return self.model(*args, **kwargs)

    def train(self, mode: bool = True) -> OptimizedModule:
        """Training mode runs the stock module."""
        super().train(mode)
        return self

    def _why_stock(self, program: Program | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why the stock module must run; empty where it need not be said; None where the program may run."""
        if program is None:
            return "no plan for these input shapes or dtypes: the stock module runs; call .tune(args) to make one"
        if program.runnable is None:
            return ""
        if self.training:
            return "the module is in training mode: the stock module runs; call .eval()"
        if torch.is_grad_enabled() and any(t.requires_grad for t in _tensors((args, kwargs))):
            return "an input requires a gradient: the stock module runs"
        return None

    def _why_stale(self) -> str | None:
        """Why what was packed is out of date; None where it is not."""
        if self._versions() == self._stamp:
            return None
        return "parameters were changed after tuning: the stock module runs; call .refresh()"

    def _warn_once(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"convoy: {reason}", stacklevel=4)

    def _versions(self) -> int:
        return sum(map(_VERSION, self._tensors))


def eager_of(runnable: Runnable) -> EagerProgram:
    """The launches one by one: what a graph program captured, or the program itself."""
    eager = runnable.eager if isinstance(runnable, GraphProgram) else runnable
    assert isinstance(eager, EagerProgram)
    return eager


def signature_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """The signature of a call: nested tuples with tensors replaced by shape, dtype and device."""
    return tuple(map(_sign, args)), tuple((name, _sign(kwargs[name])) for name in sorted(kwargs))


def _sign(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.dtype, value.device)
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(_sign, value))
    if isinstance(value, dict):
        return ("dict", *((key, _sign(item)) for key, item in value.items()))
    return ("value", value if isinstance(value, (int, float, str, bool, type(None))) else id(value))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _example(signature: Signature) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a signature, zero-filled: what capture needs to see shapes."""
    args, kwargs = signature
    return tuple(map(_unsign, args)), {name: _unsign(value) for name, value in kwargs}


def _unsign(entry: Any) -> Any:
    kind, *rest = entry
    if kind == "tensor":
        shape, dtype, device = rest
        return torch.zeros(shape, dtype=dtype, device=device)
    if kind in ("tuple", "list"):
        items = [_unsign(item) for item in rest]
        return tuple(items) if kind == "tuple" else items
    if kind == "dict":
        return {key: _unsign(item) for key, item in rest}
    return rest[0]
