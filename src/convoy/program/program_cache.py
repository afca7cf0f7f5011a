"""Serving: which program an optimised module's call goes to, and what the programs assume about the module."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from torch import nn

from convoy.errors import PlanError
from convoy.plan.plan import Plan
from convoy.program import calls
from convoy.program.contents import contents_checks
from convoy.program.module_state import ModuleState
from convoy.user_warning import warn_user

if TYPE_CHECKING:
    from convoy.program.module import Program

Tuner = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Plan | None], "Program"]
"""Makes a program for a module and arguments: under a plan, or by tuning where there is none."""

MOST_STRIDES: Final = 64
"""Strides of inputs, besides the tuned ones, for which the stock module's output strides are remembered."""

Outputs = calls.Strides | Literal["as made", "unknown", "stock"]
"""Strides that a call's outputs must have. They are not known before the stock module has run with such inputs once; "stock":
only the stock module can give them."""


class CachedProgram:
    """A program with the calls that it serves.

    Args:
        program: the program.
        example: the arguments that it was made for.
        signature: of such a call.
        by_name: the signature of all arguments by their names, defaults included; None where they have none.
    """

    def __init__(
        self, program: Program, example: calls.CallExample, signature: calls.Signature, by_name: calls.Signature | None
    ) -> None:
        self.program, self.example, self.signature, self.by_name = program, example, signature, by_name
        self._outputs: dict[calls.Strides, Outputs] = {example.strides: "as made"}

    def outputs(self, strides: calls.Strides) -> Outputs:
        """How the outputs must lie for inputs of these strides."""
        unknown = "unknown" if len(self._outputs) <= MOST_STRIDES else "stock"
        return self._outputs.get(strides, unknown)

    def learn(self, strides: calls.Strides, made: Any) -> None:
        """Remember how the stock module's outputs lie for inputs of these strides."""
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
    """Programs by the calls that they serve, with the state of the module that they were made from.

    One object, so that a snapshot of a larger module around an optimised one does not take its bookkeeping for state.

    Args:
        model: the stock module.
        tuner: makes programs.
        check: how changes of the module are noticed (`Settings.check`).

    Attributes:
        tuned: programs by the signature that each was made for.
        state: the module as it was when they were made.
    """

    def __init__(self, model: nn.Module, tuner: Tuner, check: str = "identity") -> None:
        self.tuner, self.check = tuner, check
        self.tuned: dict[calls.Signature, CachedProgram] = {}
        self._take(model)
        self._forward = calls.ForwardSignature(model.forward)
        self._routes: dict[calls.Signature, tuple[CachedProgram, bool]] = {}
        self._by_name: dict[calls.Signature, CachedProgram] = {}
        self._warned: set[str] = set()
        self._lock = threading.RLock()

    @property
    def programs(self) -> list[Program]:
        """All programs, in the order in which they were made."""
        return [served.program for served in self.tuned.values()]

    def add(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], program: Program) -> None:
        """Serve calls with arguments like these by a program."""
        bound = self._forward.bind(args, kwargs)
        by_name = None if bound is None else calls.signature_of((), bound)
        self.put(CachedProgram(program, calls.CallExample.of(args, kwargs), calls.signature_of(args, kwargs), by_name))

    def put(self, served: CachedProgram) -> None:
        """Serve a program's calls by it."""
        self.tuned[served.signature] = served
        self._routes[served.signature] = served, False
        if served.by_name is not None:
            self._by_name[served.by_name] = served

    def copied(self, model: nn.Module) -> ProgramCache:
        """The same programs for a copy of the module, whose values they hold: they are shared.

        Programs that return buffers of their own are made anew: two modules would overwrite each other's results.
        """
        made = ProgramCache(model, self.tuner, self.check)
        for served in self.tuned.values():
            own = getattr(served.program.runnable, "static_outputs", False)
            program = self._anew(model, served) if own else served.program
            made.put(CachedProgram(program, served.example, served.signature, served.by_name))
        made.state.outdate(self.change(wait=True))
        return made

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CachedProgram, bool] | None:
        """The program for a call, and whether the arguments must be put into the form that it was made for."""
        signature = calls.signature_of(args, kwargs)
        route = self._routes.get(signature)
        if route is not None:
            return route
        bound = self._forward.bind(args, kwargs)
        served = None if bound is None else self._by_name.get(calls.signature_of((), bound))
        if served is None:
            return None
        route = self._routes[signature] = served, True
        return route

    def arranged(
        self, served: CachedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call's arguments by position and by keyword as the program was made for them."""
        bound = self._forward.bind(args, kwargs)
        assert bound is not None
        return served.example.arranged(bound)

    def refresh(self, model: nn.Module) -> None:
        """Make every program anew from the module as it is now; raises what the tuner raises, and then changes nothing."""
        made = [(served, self._anew(model, served)) for served in self.tuned.values()]
        self.tuned, self._routes, self._by_name = {}, {}, {}
        self._forward = calls.ForwardSignature(model.forward)
        for served, program in made:
            args, kwargs = served.example.zeros()
            self.add(args, kwargs, program)
        self.renew(model)

    def renew(self, model: nn.Module) -> None:
        """Take the module as it is now for what the programs were made from."""
        self._take(model)
        self._warned.clear()

    def change(self, *, wait: bool = False) -> str | None:
        """What was changed since the programs were made; None where nothing was, or where the device has not said so yet.

        Args:
            wait: whether to wait for the device.
        """
        found = self.state.change()
        for check in self._contents:
            found = found or check.change(wait=wait)
        return found

    def why_stale(self) -> str | None:
        """Why the programs are out of date; None where they are not."""
        change = self.change()
        return None if change is None else f"{change} after tuning: the stock module runs; call .refresh()"

    def warn(self, kind: str, reason: str) -> None:
        """Warn at the user's line, once for each kind of reason until the next refresh."""
        if kind not in self._warned:
            self._warned.add(kind)
            warn_user(reason)

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Evaluation mode, although the stock module may have been in training mode all along; flags are put back.

        Training mode that was switched on after tuning counts: the module stays as it is.
        """
        training = [module for module in model.modules() if module.training]
        if not training or self.state.trains():
            yield
            return
        with self._lock:  # another thread would take the flags of this one for the user's
            try:
                for module in training:
                    module.training = False
                yield
            finally:
                for module in training:
                    module.training = True

    def _take(self, model: nn.Module) -> None:
        self.state = ModuleState(model)
        self._contents = contents_checks(self.state.tensors) if self.check == "contents" else []

    def _anew(self, model: nn.Module, served: CachedProgram) -> Program:
        args, kwargs = served.example.zeros()
        with calls.autocast_as(served.program.autocast):
            if not served.program.plan.baseline:
                with contextlib.suppress(PlanError):  # the module computes something else by now
                    return self.tuner(model, args, kwargs, served.program.plan)
            return self.tuner(model, args, kwargs, None)


def stock_names(state_dict: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    """A state dict under the stock module's names: `model.` in front of all of them, as a wrapper adds it, is left out."""
    own = model.state_dict().keys()
    wrapped = bool(state_dict) and all(key.startswith("model.") for key in state_dict) and not own >= state_dict.keys()
    if not wrapped:
        return state_dict
    found = OrderedDict((key.removeprefix("model."), value) for key, value in state_dict.items())
    versions = getattr(state_dict, "_metadata", None)
    if versions is not None:
        found._metadata = {key.removeprefix("model").removeprefix("."): value for key, value in versions.items()}  # type: ignore[attr-defined]
    return found
