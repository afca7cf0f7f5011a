"""ProgramCache: finds the program for a call of an optimized module, and detects that the programs are stale."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any, Final, Literal

import torch
from torch import nn

from convoy.errors import CaptureError, PlanError
from convoy.plan.plan import Plan
from convoy.program import calls
from convoy.program.call_forms import Arrangement, CallArguments, ForwardSignature
from convoy.program.known_calls import KnownCalls
from convoy.program.runnable_program import Program
from convoy.program.state.contents import contents_checks
from convoy.program.state.module_state import ModuleState
from convoy.user_warning import warn_user

Tuner = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Plan | None], Program]
"""(module, args, kwargs, plan) → a program: of that plan, or tuned if the plan is None."""

MOST_STRIDES: Final = 64
"""Input strides, besides the tuned ones, for which the stock module's output strides are remembered."""

OutputStrides = calls.Strides | Literal["as made", "unknown", "stock"]
"""Strides that the outputs of a call must have. "as made": those of the program. "unknown": the stock module must run once with
such inputs. "stock": only the stock module can give them."""


class CachedProgram:
    """A program with the calls that it is used for.

    Args:
        program: the program.
        example: the arguments that it was made for.
        signature: signature of such a call.
        normal: signature of the normal form of such a call (`ForwardSignature`); None if it has none.
    """

    def __init__(
        self, program: Program, example: calls.CallExample, signature: calls.Signature, normal: calls.Signature | None
    ) -> None:
        self.program, self.example, self.signature, self.normal = program, example, signature, normal
        self._outputs: dict[calls.Strides, OutputStrides] = {example.strides: "as made"}

    def outputs(self, strides: calls.Strides) -> OutputStrides:
        """Strides that the outputs must have for inputs of these strides."""
        unknown = "unknown" if len(self._outputs) <= MOST_STRIDES else "stock"
        return self._outputs.get(strides, unknown)

    def learn(self, strides: calls.Strides, made: Any) -> None:
        """Remember the strides of the stock module's outputs for inputs of these strides."""
        found = list(calls.tensors_of(made))
        captured = self.program.captured
        assert captured is not None
        shapes = [captured.graph.values[name].spec.shape for name in captured.graph.outputs]
        fits = [tuple(tensor.shape) for tensor in found] == [tuple(shape) for shape in shapes]
        if fits and all(calls.is_plain(tensor) and not calls.has_internal_overlap(tensor) for tensor in found):
            self._outputs[strides] = tuple(tensor.stride() for tensor in found)
        else:
            self._outputs[strides] = "stock"


class ProgramCache:
    """Programs by call signature, with the state of the module that they were made from.

    All of this is one object, so that a snapshot of a larger module around an optimized one does not take it for state.

    Args:
        model: the stock module.
        tuner: makes programs.
        check: how changes of the module are detected (`Settings.check`).

    Attributes:
        tuned: programs by the signature that each was made for.
        state: the module's state when they were made.
        known: calls that its programs have run. Another object takes its place where programs are exchanged, so that a call that
            runs meanwhile in another thread adds nothing to it.
    """

    def __init__(self, model: nn.Module, tuner: Tuner, check: str = "identity") -> None:
        self.tuner, self.check = tuner, check
        self.tuned: dict[calls.Signature, CachedProgram] = {}
        self._take(model)
        self._forward = ForwardSignature(model.forward)
        self._routes: dict[calls.Signature, tuple[CachedProgram, Arrangement | None]] = {}
        self._by_normal: dict[calls.Signature, CachedProgram] = {}
        self.known = KnownCalls()
        self._warned: set[str] = set()
        self._lock = threading.RLock()

    @property
    def programs(self) -> list[Program]:
        """All programs, in the order in which they were made."""
        return [cached.program for cached in self.tuned.values()]

    def add(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], program: Program) -> None:
        """Use a program for calls with arguments like these."""
        normal = self._forward.normal(args, kwargs)
        example = calls.CallExample.of(args, kwargs)
        signed = None if normal is None else calls.signature_of(*normal)
        self.put(CachedProgram(program, example, calls.signature_of(args, kwargs), signed))

    def put(self, cached: CachedProgram) -> None:
        """Add a program with its calls."""
        self.tuned[cached.signature] = cached
        self._allow_leftovers(cached.program)
        self._routes[cached.signature] = cached, None
        if cached.normal is not None:
            self._by_normal[cached.normal] = cached
        self.known = KnownCalls()

    def copied(self, model: nn.Module) -> ProgramCache:
        """The same programs for a copy of the module with the same values: programs are shared.

        Programs that return static output buffers are made again: two modules would overwrite each other's results.
        """
        made = ProgramCache(model, self.tuner, self.check)
        for cached in self.tuned.values():
            own = getattr(cached.program.runnable, "static_outputs", False)
            program = self._remade(model, cached, cached.example) if own else cached.program
            made.put(CachedProgram(program, cached.example, cached.signature, cached.normal))
        made.state.outdate(self.change(wait=True), trains=self.state.trains())
        return made

    def swap(self, cached: CachedProgram, program: Program) -> None:
        """Use another program for the calls of a cached one. Calls that run now end with the old one."""
        made = CachedProgram(program, cached.example, cached.signature, cached.normal)
        with self._lock:
            self.tuned = {key: made if one is cached else one for key, one in self.tuned.items()}
            self._by_normal = {key: made if one is cached else one for key, one in self._by_normal.items()}
            self._routes = {key: (made if one is cached else one, named) for key, (one, named) in self._routes.items()}
            self.known = KnownCalls()

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CachedProgram, Arrangement | None] | None:
        """The program for a call, and how the arguments are arranged for it; None: as they are."""
        signature = calls.signature_of(args, kwargs)
        route = self._routes.get(signature)
        if route is not None:
            return route
        normal = self._forward.normal(args, kwargs)
        with self._lock:  # `swap` must not miss a route that is added meanwhile
            cached = None if normal is None else self._by_normal.get(calls.signature_of(*normal))
            if cached is None:
                return None
            arrangement = self._forward.arrangement(args, kwargs, (cached.example.args, cached.example.kwargs))
            route = self._routes[signature] = cached, arrangement
        return route

    def in_form(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], example: calls.CallExample
    ) -> tuple[CallArguments, Arrangement | None] | None:
        """A call's arguments in the form of an example, and how they are brought into it (None: they have it).

        Returns:
            None if they cannot be, or if the call has a value, such as an option's, that the example's form leaves out.
        """
        if len(args) == len(example.args) and list(kwargs) == list(example.kwargs):
            return (args, kwargs), None
        arrangement = self._forward.arrangement(args, kwargs, (example.args, example.kwargs))
        if arrangement is None:
            return None
        arranged = arrangement(args, kwargs)
        before, after = self._forward.normal(args, kwargs), self._forward.normal(*arranged)
        if before is None or after is None or calls.signature_of(*before) != calls.signature_of(*after):
            return None
        return arranged, arrangement

    def why_unknown(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why there is no program for a call, and what to do."""
        given = sorted(_shown(tensor) for tensor in calls.tensors_of((args, kwargs)))
        unclear = self._forward.open_parameters
        for cached in self.tuned.values() if unclear else ():
            example = cached.example
            wanted = sorted(_shown(tensor) for tensor in calls.tensors_of((example.args, example.kwargs)))
            same_form = len(args) == len(example.args) and kwargs.keys() == example.kwargs.keys()
            if given == wanted and not same_form:
                count = f"{len(example.args)} arguments by position" if example.args else ""
                form = " and ".join(filter(None, [count, ", ".join(f"{name}=" for name in example.kwargs)]))
                return (
                    f"the model's forward has {unclear}, so Convoy cannot tell whether this call is that of the example: the "
                    f"stock module runs; call it with {form}, or call .tune(args, kwargs)"
                )
        return (
            "no plan for these input shapes or dtypes, or for an option's value: the stock module runs; "
            "call .tune(args) to make one"
        )

    def refresh(self, model: nn.Module) -> None:
        """Make every program again from the module's present state. If the tuner raises, nothing is changed."""
        examples = [(cached, self.example_now(model, cached.example)) for cached in self.tuned.values()]
        made = [(example, self._remade(model, cached, example)) for cached, example in examples]
        self.tuned, self._routes, self._by_normal = {}, {}, {}
        self.known = KnownCalls()
        self._forward = ForwardSignature(model.forward)
        for example, program in made:
            args, kwargs = example.zeros()
            self.add(args, kwargs, program)
        self.renew(model)

    def example_now(self, model: nn.Module, example: calls.CallExample) -> calls.CallExample:
        """An example of calls as the module takes them now: `half()` and `to(device)` change the tensors that it takes."""
        return example.moved(self._kind, calls.TensorKind.of(model))

    def renew(self, model: nn.Module) -> None:
        """Take the module's present state for the one that the programs were made from."""
        self._take(model)
        self._warned.clear()

    def change(self, *, wait: bool = False) -> str | None:
        """What was changed since the programs were made; None if nothing was, or if the device has not answered yet.

        Args:
            wait: whether to wait for the device.
        """
        found = self.state.change()
        for check in self._contents:
            found = found or check.change(wait=wait)
        return found

    def why_stale(self) -> str | None:
        """Why the programs are stale; None if they are not."""
        change = self.change()
        return None if change is None else f"{change} after tuning: the stock module runs; call .refresh()"

    def warn(self, kind: str, reason: str) -> None:
        """Warn at the user's line, once for each kind of reason until the next refresh."""
        if kind not in self._warned:
            self._warned.add(kind)
            warn_user(reason)

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Generator[None]:
        """Put the stock module in evaluation mode for a while; training flags are restored.

        If training mode was switched on after tuning, the module stays as it is.
        """
        training = [module for module in model.modules() if module.training]
        if not training or self.state.trains():
            yield
            return
        with self._lock:  # another thread would take this thread's flags for the user's
            try:
                for module in training:
                    module.training = False
                yield
            finally:
                for module in training:
                    module.training = True

    def _take(self, model: nn.Module) -> None:
        self.state, self._kind = ModuleState(model), calls.TensorKind.of(model)
        for cached in self.tuned.values():
            self._allow_leftovers(cached.program)
        self._contents = contents_checks(self.state.tensors) if self.check == "contents" else []

    def _allow_leftovers(self, program: Program) -> None:
        if program.captured is not None:
            self.state.allow(program.captured.leftovers)

    def _remade(self, model: nn.Module, cached: CachedProgram, example: calls.CallExample) -> Program:
        args, kwargs = example.zeros()
        with calls.autocast_as(cached.program.autocast):
            if not cached.program.plan.baseline:
                with contextlib.suppress(PlanError, CaptureError):  # the module computes something else now
                    return self.tuner(model, args, kwargs, cached.program.plan)
            return self.tuner(model, args, kwargs, None)


def _shown(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
