"""DynamicModule: an optimized module whose inputs may have other sizes than those of its programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from convoy.deadline import Deadline
from convoy.dynamic.dims import Call, DynamicDims
from convoy.dynamic.independence import why_not_split_now
from convoy.dynamic.layouts import empty_joined
from convoy.dynamic.routes import find_route
from convoy.dynamic.size_programs import BatchPart, SizePrograms, Sizes
from convoy.dynamic.timing import call_ms
from convoy.plan import Plan, save_plans
from convoy.program import OptimizedModule, Program, calls
from convoy.program.call_forms import checked_arguments
from convoy.program.cuda.cuda_graph import CudaGraphProgram
from convoy.program.improvement import TimedTuner, check_time, sample
from convoy.program.optimized_module import OTHER_STRIDES
from convoy.program.program_cache import CachedProgram, Tuner
from convoy.program.shared_memory import SharedMemory, sharing
from convoy.user_warning import warn_user

_IMPROVE_SHARE: Final = 0.5
"""Share of `improve`'s time that programs for sizes that were called may take; the rest improves the first program."""


class DynamicModule(OptimizedModule):
    """An optimized module for ranges of sizes (`convoy.optimize(..., dynamic=...)`).

    A call of the sizes of a program is run by it. A batch of another size is split, padded, or both, so that the programs that
    compute it take the least time together. Any other call is computed by the stock module at once, with one warning;
    `add_size` and `improve` make programs for such sizes.

    Args:
        model: the stock module.
        program: the program for the example.
        args: the example's arguments.
        kwargs: its keyword arguments.
        tuner: makes further programs.
        check: how changes of the stock module are detected (`Settings.check`).
        dims: the dimensions that may change.
        not_split: why batches must not be split or padded; empty if they may be.
        memory: what the programs share.

    Attributes:
        size_programs: the programs by sizes.
    """

    size_programs: SizePrograms

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tuner: Tuner,
        check: str,
        dims: DynamicDims,
        not_split: str,
        memory: SharedMemory,
    ) -> None:
        super().__init__(model, program, args, kwargs, tuner, check)
        self.size_programs = SizePrograms(dims, calls.CallExample.of(args, kwargs), not_split, memory)

    # --- programs -----------------------------------------------------------------------------------------------------------

    def add(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], program: Program, time_ms: float | None = None
    ) -> None:
        """Use a program for calls with arguments like these.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            program: the program.
            time_ms: milliseconds of one call; None: it is timed now.
        """
        super().add(args, kwargs, program)
        self.take_time(args, dict(kwargs), time_ms)

    def take_time(self, args: tuple[Any, ...], kwargs: dict[str, Any], time_ms: float | None = None) -> None:
        """Time the program for such arguments, so that batches of other sizes may be computed by it too."""
        formed = self.program_cache.in_form(args, kwargs, self.size_programs.example)
        if formed is None:
            return
        given = formed[0]
        sizes = self.size_programs.dims.sizes_of(list(calls.tensors_of(given)))
        cached = self.program_cache.tuned.get(calls.signature_of(*given))
        if sizes is None or cached is None:
            return
        if time_ms is None:
            device = next(calls.tensors_of(given)).device
            with torch.no_grad():
                time_ms = call_ms(lambda: self._run_cached(cached, given, "as made"), device)
        self.size_programs.take(sizes, time_ms)

    def tune(self, args: tuple[Any, ...] | list[Any] | torch.Tensor = (), kwargs: dict[str, Any] | None = None) -> Plan:
        """Make a plan for arguments of other sizes; later calls with such arguments use it.

        Raises:
            InputError: neither a tuple nor a tensor, or no dict.
        """
        given, named = checked_arguments(self.model, args, kwargs)
        with sharing(self.size_programs.memory):
            program = self.program_cache.tuner(self.model, given, named, None)
        self.add(given, named, program)
        return program.plan

    def add_size(self, sizes: int | Mapping[int, int], time_s: float | None = None) -> list[Plan]:
        """Make programs for further sizes.

        Args:
            sizes: by dimension, such as `{2: 256, 3: 256}`; an integer is the batch size. Other dimensions have the example's
                sizes; if the batch is one of them and may be split, there is a program for each of its buckets.
            time_s: wall time of this call, seconds; None: that of the settings, for each program.

        Returns:
            The plans, one a program.

        Raises:
            InputError: a dimension that may not change, or a size out of its range.
        """
        wanted = self.size_programs.wanted(sizes)
        if time_s is not None:
            check_time(time_s)
        deadline = Deadline() if time_s is None else Deadline(time_s)
        return [self._make(one, deadline, len(wanted) - index) for index, one in enumerate(wanted)]

    def improve(
        self,
        time_s: float = 60.0,
        args: tuple[Any, ...] | list[Any] | torch.Tensor | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> Plan:
        """Tune further, for about `time_s` seconds; the module may be called by other threads meanwhile.

        Without arguments, the sizes that were called most often and have no program get one first, in up to half of the time.
        The rest improves the program of the example. With arguments of sizes without a program, that program is made.

        Args:
            time_s: wall time of this call, seconds.
            args: arguments to tune with.
            kwargs: keyword arguments.

        Returns:
            The plan of the program that was improved or made last.

        Raises:
            InputError: `time_s` is no positive number, or arguments that are not like the example within the ranges.
        """
        check_time(time_s)
        deadline = Deadline(time_s)
        if self.stale() is not None:
            self.refresh()
        if args is not None or kwargs:
            given, named = checked_arguments(self.model, () if args is None else args, kwargs)
            sizes = self._sizes_within(given, named)
            if self.program_cache.find(given, named) is None and sizes is not None:
                return self._make(sizes, deadline, 1)
        else:
            for sizes, _ in self.size_programs.seen.most_common():
                if deadline.left_s < _IMPROVE_SHARE * time_s:
                    break
                self._make(sizes, deadline.earlier(_IMPROVE_SHARE * time_s), 1)
        with sharing(self.size_programs.memory):
            plan = super().improve(max(deadline.left_s, 1e-3), args, kwargs)
        if args is None and not kwargs:
            self.take_time(*self.size_programs.example.zeros())
        return plan

    def save(self, path: str | Path) -> list[Path]:
        """Write all plans with the ranges and times as one file, which `convoy.load` reads."""
        save_plans(self.size_programs.with_plans(self.program_cache), path)
        return [Path(path)]

    def memory_of_programs(self) -> SharedMemory | None:
        """That of all its programs."""
        return self.size_programs.memory

    def refresh(self) -> None:
        """Make the programs fit the stock module's present state, as `OptimizedModule.refresh`.

        Whether batches may be split is found out again: another layer may mix the images of a batch.
        """
        known, cache = self.size_programs, self.program_cache
        example = cache.example_now(self.model, known.example)
        reason = why_not_split_now(cache.tuner, self.model, sample(example), known.dims, known.not_split)
        if reason and not known.not_split:
            warn_user(f"batches are no longer split or padded: {reason}")
        known.renew(example, reason)
        with sharing(known.memory):
            super().refresh()
        known.renew(
            example, reason, known.memory
        )  # routes that another thread found meanwhile may lead to former programs

    def _make(self, sizes: Sizes, deadline: Deadline, parts: int) -> Plan:
        """Make a program for sizes, within an equal part of the time that is left."""
        given, named = self.size_programs.dims.resized(sample(self.size_programs.example), sizes)
        tuner = self.program_cache.tuner
        if deadline.is_limited and isinstance(tuner, TimedTuner):
            tuner = tuner.within(deadline.left_s / parts)
        with sharing(self.size_programs.memory):
            program = tuner(self.model, given, named, None)
        self.add(given, named, program)
        return program.plan

    # --- calls --------------------------------------------------------------------------------------------------------------

    def _sizes_within(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sizes | None:
        """The sizes of a call; None if it is not like the example, or a size is out of its range."""
        dims = self.size_programs.dims
        formed = self.program_cache.in_form(args, kwargs, self.size_programs.example)
        sizes = None if formed is None else dims.sizes_of(list(calls.tensors_of(formed[0])))
        return None if sizes is None or dims.outside(sizes) else sizes

    def _run_without_program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        signature = calls.signature_of(args, kwargs)
        route = self.size_programs.routes.get(signature)
        if route is None:
            route = find_route(self.program_cache, self.size_programs, args, kwargs)
            self.size_programs.keep(signature, route)
        if route.sizes is not None:
            self.size_programs.note(route.sizes)
        found = [cached for part in route.parts if (cached := self.program_cache.tuned.get(part.signature)) is not None]
        if not found or len(found) < len(route.parts):  # the latter while another thread refreshes
            return self._run_stock(
                args, kwargs, route.reason, "" if route.sizes is None else "no program for these sizes"
            )
        given = (args, kwargs) if route.arrangement is None else route.arrangement(args, kwargs)
        running = next(cached for cached in found if cached.program.runnable is not None)
        reason = self._why_stock(running, list(calls.tensors_of(given)))
        if reason is not None:
            return self._run_stock(args, kwargs, reason)
        # A GPU gets its work before the module's state is checked; see `OptimizedModule.forward`.
        ahead = isinstance(running.program.runnable, CudaGraphProgram)
        stale = None if ahead else self.program_cache.why_stale()
        made = None if stale is not None else self._in_parts(given, route.parts, found)
        stale = self.program_cache.why_stale() if ahead else stale
        if stale is not None:
            return self._run_stock(args, kwargs, stale, kind="stale")
        return self._run_stock(args, kwargs, OTHER_STRIDES) if made is None else made[0]

    def _in_parts(self, given: Call, parts: Sequence[BatchPart], found: Sequence[CachedProgram]) -> tuple[Any] | None:
        """The results of all parts, joined; None where only the stock module can lay them out."""
        images = parts[-1].start + parts[-1].count
        whole: list[torch.Tensor] = []
        shape: Any = None
        with torch.no_grad():
            for part, cached in zip(parts, found, strict=True):
                some = self.size_programs.dims.images(given, part.start, part.count, part.batch)
                strides = tuple([tensor.stride() for tensor in calls.tensors_of(some)])
                wanted = cached.outputs(strides)
                if wanted == "stock":
                    return None
                made = self._run_cached(cached, some, wanted)
                if wanted == "unknown" and cached.program.runnable is not None:
                    cached.learn(strides, made)
                tensors = list(calls.tensors_of(made))
                if not whole:
                    shape, whole = made, [empty_joined(tensor, images) for tensor in tensors]
                # At once: with static outputs, the next call of the same program overwrites them.
                for target, tensor in zip(whole, tensors, strict=True):
                    target.narrow(0, part.start, part.count).copy_(tensor.narrow(0, 0, part.count))
            joined = iter(whole)
            return (calls.map_tensors(lambda _: next(joined), shape),)

    def _run_cached(self, cached: CachedProgram, given: Call, strides: Any) -> Any:
        if cached.program.runnable is None or strides == "unknown":
            with self.program_cache.evaluating(self.model):
                return self.model(*given[0], **given[1])
        return cached.program(*given, strides)
