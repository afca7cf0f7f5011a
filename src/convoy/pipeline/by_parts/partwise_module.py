"""PartwiseModule: a model that cannot be captured whole, with programs in place of those of its modules that can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from convoy.capture.state.call_leftovers import CallLeftovers
from convoy.errors import CaptureError
from convoy.pipeline.by_parts.module_calls import module_calls
from convoy.pipeline.by_parts.watched_module import WatchedModule
from convoy.pipeline.isolation import isolate
from convoy.plan.plan import Plan
from convoy.program import OptimizedModule, Program
from convoy.program.call_forms import checked_arguments
from convoy.program.calls import is_traced, tensors_of


@dataclass(frozen=True, slots=True)
class OptimizedPart:
    """A module of a model with the program that replaces it.

    Attributes:
        path: the module's qualified name.
        share: its share of the stock module's time, 0..1.
        program: computes what the module computes.
    """

    path: str
    share: float
    program: OptimizedModule


class PartwiseModule(OptimizedModule):
    """Runs a copy of the stock module, on its parameters and buffers, in which programs replace some modules.

    What is between the parts runs as PyTorch runs it: control flow that depends on data, objects, operators of others. A part
    runs its own stock module for arguments of other shapes, as an `OptimizedModule` does; `tune` makes programs for them.

    Args:
        stock: the stock module.
        partwise: its copy with parts replaced.
        parts: the parts.
        plan: what is known of all parts together.
        recopy: makes a copy of the stock module, for `refresh`.
        leftovers: what calls of the stock module leave in its attributes. Those that are overwritten are carried from the stock
            module to the copy and back in every call (`WatchedModule`).

    Attributes:
        parts: what programs compute.
    """

    parts: tuple[OptimizedPart, ...]

    def __init__(
        self,
        stock: nn.Module,
        partwise: nn.Module,
        parts: Sequence[OptimizedPart],
        plan: Plan,
        recopy: Callable[[nn.Module], nn.Module],
        leftovers: CallLeftovers,
    ) -> None:
        super().__init__(partwise, Program(plan, None, None), (), {}, _no_tuner)
        self.parts = tuple(parts)
        self._watched = WatchedModule(stock, leftovers)
        self._recopy = recopy

    @property
    def stock(self) -> nn.Module:
        """The module that was optimized, as the user gave it."""
        return self._watched.model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model with its parts by programs."""
        if is_traced():
            return self.stock(*args, **kwargs)
        if self.training:
            self.program_cache.warn("training", "the module is in training mode: the stock module runs; call .eval()")
            return self.stock(*args, **kwargs)
        change = self._watched.change()
        if change:
            self.program_cache.warn("stale", f"{change} after tuning: the stock module runs; call .refresh()")
            with nullcontext() if self._watched.trains() else self.program_cache.evaluating(self.stock):
                return self.stock(*args, **kwargs)
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors_of((args, kwargs)))
        with self._watched.lent_to(self.model), nullcontext() if needs_grad else torch.no_grad():
            return self.model(*args, **kwargs)

    def train(self, mode: bool = True) -> PartwiseModule:
        """Switch training mode on or off, of the stock module too; in training mode the stock module runs."""
        super().train(mode)
        self.stock.train(mode)
        return self

    def tune(self, args: Any = (), kwargs: dict[str, Any] | None = None) -> Plan:
        """Make programs of all parts for arguments of other shapes.

        Args:
            args: arguments of the whole model.
            kwargs: keyword arguments of the whole model.

        Raises:
            InputError: neither a tuple nor a tensor, or no dict.
        """
        given, named = checked_arguments(self.stock, args, kwargs)
        trial = isolate(self.stock, given, named)
        calls = module_calls(trial.model, trial.args, trial.kwargs, [part.path for part in self.parts])
        for part in self.parts:
            for example in calls[part.path].examples.values() if part.path in calls else ():
                if part.program.program_cache.find(*example) is None:
                    part.program.tune(*example)
        return self.plan

    def improve(self, time_s: float = 60.0, args: Any = None, kwargs: dict[str, Any] | None = None) -> Plan:
        """Tune the parts further, each for its share of `time_s` seconds (`OptimizedModule.improve`).

        Args:
            time_s: wall time of this call, seconds.
            args: ignored: each part is tuned with arguments of its own first shape.
            kwargs: likewise.
        """
        del args, kwargs
        whole = sum(part.share for part in self.parts)
        for part in self.parts:
            part.program.improve(time_s * (part.share / whole if whole else 1 / len(self.parts)))
        return self.plan

    def refresh(self) -> None:
        """Make the parts' programs fit the stock module's present state."""
        stock = self.stock
        copy = self._recopy(stock)
        for part in self.parts:
            part.program.model = copy.get_submodule(part.path)
            part.program.refresh()
        replace_modules(copy, {part.path: part.program for part in self.parts})
        self.model = copy
        self._watched = self._watched.renewed()
        self.renew()

    def renew(self) -> None:
        """Take the present state for the one that the programs were made from."""
        for part in self.parts:
            part.program.renew()
        self._watched = self._watched.renewed()
        super().renew()

    def stale(self) -> str | None:
        """What was changed since the programs were made; None if nothing was."""
        changes = (f"{part.path}.{change}" for part in self.parts if (change := part.program.stale()) is not None)
        return self._watched.change() or next(changes, None)


def replace_modules(model: nn.Module, programs: Mapping[str, nn.Module]) -> None:
    """Replace modules by programs, under each name that they have.

    Args:
        model: the model, which is changed.
        programs: qualified name → what replaces the module.
    """
    by_module = {id(model.get_submodule(path)): program for path, program in programs.items()}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in by_module:
                parent._modules[name] = by_module[id(child)]


def _no_tuner(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan | None) -> Program:
    del model, args, kwargs, plan
    raise CaptureError("this model cannot be exported: its parts were optimized, each by itself")
