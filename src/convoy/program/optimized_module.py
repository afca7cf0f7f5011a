"""OptimizedModule: a drop-in for the user's module, with a program for each input shape that was tuned."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn

from convoy import plan as plans
from convoy.plan.plan import Plan
from convoy.program import calls
from convoy.program.call_forms import checked_arguments
from convoy.program.improvement import improve
from convoy.program.known_calls import run_checked
from convoy.program.program_cache import CachedProgram, ProgramCache, Tuner
from convoy.program.runnable_program import Program
from convoy.program.serialization import restore_module, saved_programs
from convoy.program.shared_memory import SharedMemory
from convoy.program.state.stock_interface import StockInterface

_RESTORED: Final = frozenset({"program_cache", "_modules"})
"""Attributes that a pickle holds in another form."""

OTHER_STRIDES: Final = (
    "no program fits the strides of the inputs: the stock module runs; call .contiguous() on the inputs, or .tune(args)"
)


class OptimizedModule(StockInterface):
    """Runs the program that fits a call. If none does, the stock module runs, and one warning gives the reason.

    Programs compute inference results: outputs carry no gradient. The stock module runs if an input requires a gradient, in
    training mode, if the program is stale (`refresh` packs new values), inside autocast or a transform of `torch.func`, and for
    shapes without a plan (`tune` makes one). `docs/concepts/stale-weights.md` lists the changes that are detected. While tracing
    (`torch.compile`, `torch.export`, `torch.jit`, or `torch.fx` of a module
    around this one) the stock module is traced.

    The stock module then runs in evaluation mode, as the program does, although it may have been in training mode when it was
    tuned. Training mode that is switched on later has effect: by `train()` here, or on the stock module or a part of it.

    Args:
        model: the stock module; its parameters stay its own.
        program: the first program.
        args: the arguments that the program was made for.
        kwargs: its keyword arguments.
        tuner: makes a program for further arguments.
        check: how changes of the stock module are detected (`Settings.check`).

    Attributes:
        model: the stock module.
        program_cache: the programs, and the module's state when they were made.
    """

    model: nn.Module
    program_cache: ProgramCache

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
        self.program_cache = ProgramCache(model, tuner, check)
        self.program_cache.add(args, kwargs, program)
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
        return self.program_cache.programs

    def explain(self, layer: str | None = None) -> str:
        """The plan in words: engine, layout and time of every step, or all that is known of one layer."""
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

    def tune(self, args: tuple[Any, ...] | list[Any] | torch.Tensor = (), kwargs: dict[str, Any] | None = None) -> Plan:
        """Make a plan for arguments of other shapes; later calls with such arguments use it.

        Raises:
            InputError: neither a tuple nor a tensor, or no dict.
        """
        given, named = checked_arguments(self.model, args, kwargs)
        program = self.program_cache.tuner(self.model, given, named, None)
        self.program_cache.add(given, named, program)
        return program.plan

    def improve(
        self,
        time_s: float = 60.0,
        args: tuple[Any, ...] | list[Any] | torch.Tensor | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> Plan:
        """Tune further, for at most `time_s` seconds, and run the better program from then on.

        The search goes on where it stopped. Other threads may call the module meanwhile. A program that is not faster than the
        present one, timed in turn, is dropped. If the stock module was changed, the programs are made again first (`refresh`).

        Args:
            time_s: wall time of this call, seconds.
            args: arguments of a tuned shape; by default like those of the first program, with normally distributed numbers.
            kwargs: keyword arguments.

        Returns:
            The plan that runs now.

        Raises:
            InputError: `time_s` is no positive number, or no program was tuned for such arguments.
        """
        return improve(self, time_s, args, kwargs)

    def add(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], program: Program) -> None:
        """Use a program for calls with arguments like these."""
        self.program_cache.add(args, kwargs, program)

    def refresh(self) -> None:
        """Make the programs fit the stock module's present state.

        The present values of the parameters are packed under the existing plans. A shape for which the module now computes
        something else, because a layer was replaced or a dtype changed, is tuned again.
        """
        self.program_cache.refresh(self.model)

    def renew(self) -> None:
        """Take the stock module's present state for the one that the programs were made from."""
        self.program_cache.renew(self.model)

    def stale(self) -> str | None:
        """What was changed since the programs were made, such as "0.weight was changed in place"; None if nothing was."""
        return self.program_cache.change(wait=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The stock module's forward, by the program that fits."""
        if calls.is_traced():
            return self.model(*args, **kwargs)
        cache = self.program_cache
        known = None if kwargs or self.training else cache.known.find(args)
        if known is None or not known.may_run(args):
            return self._run_unknown(args, kwargs)
        model = cast("nn.Module", self._modules["model"])  # a tenth of the time of `self.model`
        made, reason = run_checked(known.program, args, kwargs, known.strides, model, cache.why_stale, flat=known.flat)
        return made if reason is None else self._run_stock(args, kwargs, reason, kind="stale")

    # --- copies -------------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizedModule:
        """An independent module around a copy of the stock module. The programs are shared."""
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        nn.Module.__init__(made)
        model = copy.deepcopy(self.model, memo)
        memo[id(self.program_cache)] = self.program_cache.copied(model)
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A pickle holds the stock module and the plans; see `convoy.program.serialization`."""
        cache = self.program_cache
        attributes = {name: value for name, value in self.__dict__.items() if name not in _RESTORED}
        saved = saved_programs(cache.tuned.values())
        return restore_module, (type(self), self.model, saved, cache.tuner, cache.check, attributes)

    def memory_of_programs(self) -> SharedMemory | None:
        """What its programs share; None: each has memory of its own."""
        return None

    def _run_unknown(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that may be of any kind."""
        cache = self.program_cache
        known, tensors = cache.known, tuple(calls.tensors_of((args, kwargs)))
        found = cache.find(args, kwargs)
        cached = None if found is None else found[0]
        reason = self._why_stock(cached, tensors)
        if reason is not None:
            return self._run_stock(args, kwargs, reason)
        if found is None or cached is None:
            return self._run_without_program(args, kwargs)
        given = (args, kwargs) if found[1] is None else found[1](args, kwargs)
        strides = tuple([tensor.stride() for tensor in calls.tensors_of(given)])
        wanted = cached.outputs(strides)
        if wanted == "stock":
            return self._run_stock(args, kwargs, OTHER_STRIDES)
        if wanted == "unknown":
            reason = cache.why_stale()
        else:
            made, reason = run_checked(cached.program, *given, wanted, self.model, cache.why_stale)
            if reason is None:
                if found[1] is None and not kwargs:
                    known.keep(args, cached.program, wanted)
                return made
        made = self._run_stock(args, kwargs, reason or "", kind="stale")
        if reason is None:
            cached.learn(strides, made)
        return made

    def _why_stock(self, cached: CachedProgram | None, tensors: Sequence[torch.Tensor]) -> str | None:
        """Why the stock module must run; empty if the user need not be told; None if the program, where there is one, may run."""
        if cached is not None and cached.program.runnable is None:
            return ""
        reason = calls.why_not_plain(tensors)
        if reason is not None:
            return f"{reason}: the stock module runs"
        if cached is None:
            return None
        if self.training:
            return "the module is in training mode: the stock module runs; call .eval()"
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return (
                "an input requires a gradient, and programs compute none: the stock module runs; call .detach() on the input, "
                'or use torch.compile(model, backend="convoy")'
            )
        reason = calls.why_modes_forbid(cached.program.autocast, cached.program.default_dtype)
        return None if reason is None else f"{reason}: the stock module runs"

    def _run_without_program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call for which no program was made."""
        return self._run_stock(args, kwargs, self.program_cache.why_unknown(args, kwargs))

    def _run_stock(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], reason: str, kind: str = "") -> Any:
        if reason:
            self.program_cache.warn(kind or reason, reason)
        if self.training:
            return self.model(*args, **kwargs)
        with self.program_cache.evaluating(self.model):
            return self.model(*args, **kwargs)
