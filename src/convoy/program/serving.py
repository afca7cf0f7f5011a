"""Serving: which program an optimised module's call goes to, and what the programs assume about the module."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from torch import nn

from convoy.errors import PlanError
from convoy.plan.plan import Plan
from convoy.program import calls
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


class Served:
    """A program with the calls that it serves.

    Args:
        program: the program.
        example: the arguments that it was made for.
    """

    def __init__(self, program: Program, example: calls.Example) -> None:
        self.program, self.example = program, example
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
        if fits and all(calls.is_plain(tensor) and not calls.overlaps(tensor) for tensor in found):
            self._outputs[strides] = tuple(tensor.stride() for tensor in found)
        else:
            self._outputs[strides] = "stock"


class Serving:
    """Programs by the calls that they serve, with the state of the module that they were made from.

    One object, so that a snapshot of a larger module around an optimised one does not take its bookkeeping for state.

    Args:
        model: the stock module.
        tuner: makes programs.
    """

    def __init__(self, model: nn.Module, tuner: Tuner) -> None:
        self.tuner = tuner
        self.tuned: dict[calls.Signature, Served] = {}
        self.state = ModuleState(model)
        self._forward = calls.ForwardSignature(model.forward)
        self._routes: dict[calls.Signature, tuple[Served, bool]] = {}
        self._canonical: dict[calls.Signature, Served] = {}
        self._warned: set[str] = set()
        self._lock = threading.RLock()

    @property
    def programs(self) -> list[Program]:
        """All programs, in the order in which they were made."""
        return [served.program for served in self.tuned.values()]

    def add(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], program: Program) -> None:
        """Serve calls with arguments like these by a program."""
        self._put(calls.signature_of(args, kwargs), Served(program, calls.Example.of(args, kwargs)), args, kwargs)

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Served, bool] | None:
        """The program for a call, and whether the arguments must be put into the form that it was made for."""
        signature = calls.signature_of(args, kwargs)
        route = self._routes.get(signature)
        if route is not None:
            return route
        bound = self._forward.bind(args, kwargs)
        served = None if bound is None else self._canonical.get(calls.signature_of((), bound))
        if served is None:
            return None
        route = self._routes[signature] = served, True
        return route

    def arranged(
        self, served: Served, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call's arguments by position and by keyword as the program was made for them."""
        bound = self._forward.bind(args, kwargs)
        assert bound is not None
        return served.example.arranged(bound)

    def refresh(self, model: nn.Module) -> None:
        """Make every program anew from the module as it is now; raises what the tuner raises, and then changes nothing."""
        made = [(served, self._anew(model, served)) for served in self.tuned.values()]
        self.tuned, self._routes, self._canonical = {}, {}, {}
        self._forward = calls.ForwardSignature(model.forward)
        for served, program in made:
            args, kwargs = served.example.zeros()
            self.add(args, kwargs, program)
        self.renew(model)

    def renew(self, model: nn.Module) -> None:
        """Take the module as it is now for what the programs were made from."""
        self.state = ModuleState(model)
        self._warned.clear()

    def why_stale(self) -> str | None:
        """Why the programs are out of date; None where they are not."""
        change = self.state.change()
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

    def _put(
        self, signature: calls.Signature, served: Served, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self.tuned[signature] = served
        self._routes[signature] = served, False
        bound = self._forward.bind(args, kwargs)
        if bound is not None:
            self._canonical[calls.signature_of((), bound)] = served

    def _anew(self, model: nn.Module, served: Served) -> Program:
        args, kwargs = served.example.zeros()
        with calls.autocast_as(served.program.autocast):
            if not served.program.plan.baseline:
                with contextlib.suppress(PlanError):  # the module computes something else by now
                    return self.tuner(model, args, kwargs, served.program.plan)
            return self.tuner(model, args, kwargs, None)
