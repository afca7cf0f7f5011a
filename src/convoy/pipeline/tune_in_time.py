"""Tuning within a time: a first answer from predictions, then measurements until the time is up, and the better of both.

What is left to do after measuring takes about as long as it took for the first answer, so the search ends that much earlier.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from convoy.deadline import Deadline
from convoy.engines.competition import competing_engines, load_competitor
from convoy.engines.manifest import BASELINE
from convoy.measurement.failure import is_out_of_memory
from convoy.perfdb import Database
from convoy.pipeline.check.verify_predicted import BuiltPlan, rebuild_until_verified
from convoy.pipeline.measure_net import measure, prediction_notes
from convoy.pipeline.net import Net
from convoy.pipeline.observer import Observer, announce
from convoy.pipeline.rivals.whole_rivals import LEAST_LEFT_S
from convoy.pipeline.schedule_search import LACK_OF_TIME
from convoy.plan import Plan
from convoy.settings import Effort, Settings
from convoy.tune import SearchResult

RESERVE: Final = 1.25
"""Time kept for building and checking, as a multiple of the first answer's: the second check takes more rounds."""

WHOLE_BUILD_S: Final = {"cpu": 30.0, "cuda": 6.0}
"""Seconds kept for building a net as one program, by device: on a CPU this process compiles it again, with its weights (ResNet-50
on two cores); on a GPU it loads what another process compiled."""

OTHERS_S: Final = {"cpu": 4.0, "cuda": 0.0}
"""Seconds kept for building and timing other selections (`rivals.fusing_rivals`), by device: 45 rounds of three programs."""

WHOLE_SHARE: Final = 4.0
"""The time left for measuring must be this many times `WHOLE_BUILD_S`, or engines that build that long do not compete; and as
many times `OTHERS_S`, or other selections are not timed."""

TOLERANCE: Final = 1.1
"""How far a call may exceed `Settings.time_s` before it is reported."""


class BuildStage(Protocol):
    """Selects, builds and checks a net from the times that were found."""

    def __call__(self, found: SearchResult, settings: Settings, deadline: Deadline) -> BuiltPlan:
        """A plan, its program, and the outcome of its check.

        Args:
            found: times of the candidates.
            settings: those of the call; effort `none` for a first answer.
            deadline: when it should end.
        """
        ...


@dataclass(frozen=True, slots=True)
class TunedPlan:
    """The best plan of a call.

    Attributes:
        built: the plan, with its program and the outcome of its check.
        found: the times that it was chosen from.
        complete: whether the search was made to its end, so that another one would find the same.
    """

    built: BuiltPlan
    found: SearchResult
    complete: bool = False


def answers_first(settings: Settings, deadline: Deadline) -> bool:
    """Whether a call builds a plan from predictions before it measures anything."""
    return settings.effort is Effort.NONE or deadline.is_limited


def tune_in_time(
    net: Net, settings: Settings, database: Database, watch: Observer, deadline: Deadline, build: BuildStage
) -> TunedPlan:
    """Measure, select, build and check a net until the deadline; without a limit, until the search is complete.

    Args:
        net: the net.
        settings: effort, limits and what is allowed.
        database: where rows are read and stored.
        watch: called with the progress.
        deadline: when the call must end. It may be stopped early, as by Ctrl-C: then what is known is used.
        build: selects, builds and checks.
    """
    tuner = _Tuner(net, settings, database, watch, deadline, build)
    if settings.effort is not Effort.NONE and not deadline.is_limited:
        deadline.allow_stop()
    if settings.effort is Effort.NONE or not answers_first(settings, deadline):
        return tuner.tuned(settings, deadline)
    begin = deadline.spent_s
    first = tuner.tuned(dataclasses.replace(settings, effort=Effort.NONE), deadline)
    reserve_s = RESERVE * (deadline.spent_s - begin)
    if deadline.left_s - reserve_s >= WHOLE_SHARE * OTHERS_S[net.target.device]:
        reserve_s += OTHERS_S[net.target.device]
    build_s = WHOLE_BUILD_S[net.target.device]
    if deadline.left_s - reserve_s >= WHOLE_SHARE * build_s:
        reserve_s += build_s
    else:
        fewer = without_slow_builds(settings)
        tuner = dataclasses.replace(tuner, settings=fewer, shortened=fewer != settings)
    searching = deadline.earlier(reserve_s)
    if searching.is_over:
        return _cut(first, deadline)
    announce(watch, f"first answer after {deadline.spent_s:.1f} s: {_words(first.built)}")
    deadline.allow_stop()
    told = dataclasses.replace(tuner, watch=_with_best(watch, first.built, deadline))
    try:
        second = told.tuned(told.settings, searching)
    except KeyboardInterrupt:
        if not deadline.was_stopped:
            raise
        return _cut(first, deadline)
    except Exception as error:  # with the first program in memory there may be too little for another
        if not is_out_of_memory(error):
            raise
        torch.cuda.empty_cache()
        return _cut(first, deadline)
    return second if _gain(second.built) >= _gain(first.built) else _kept(first, second)


@dataclass(frozen=True, slots=True)
class _Tuner:
    net: Net
    settings: Settings
    database: Database
    watch: Observer
    deadline: Deadline
    build: BuildStage
    shortened: bool = False

    def tuned(self, settings: Settings, searching: Deadline) -> TunedPlan:
        found = measure(self.net, settings, self.database, self.watch, deadline=searching)

        def build(times: SearchResult) -> BuiltPlan:
            return self.build(times, settings, self.deadline)

        built, found = rebuild_until_verified(
            build, self.net, found, settings, self.database, self.watch, self.deadline
        )
        return TunedPlan(built, found, self._is_complete(built, found))

    def _is_complete(self, built: BuiltPlan, found: SearchResult) -> bool:
        """Whether nothing was left out for lack of time, and the plan is right."""
        return not self.shortened and not built.wrong and was_finished(built.plan, found, self.deadline)


def was_finished(plan: Plan, found: SearchResult, deadline: Deadline) -> bool:
    """Whether nothing was left out of a search for lack of time.

    Args:
        plan: what was found, with the notes of its schedules.
        found: the times that it was chosen from.
        deadline: that of the call.
    """
    left_out = any(note.endswith(LACK_OF_TIME) for note in plan.notes)
    return not (found.cut or left_out or deadline.was_stopped) and deadline.left_s > LEAST_LEFT_S


def without_slow_builds(settings: Settings) -> Settings:
    """The settings without engines that take long to build (`Engine.build_patience`)."""
    slow = [name for name in competing_engines(settings) if load_competitor(name, settings.engines).build_patience > 1]
    if not slow:
        return settings
    if settings.only_engines:
        kept = tuple(name for name in settings.only_engines if name not in slow)
        return dataclasses.replace(settings, only_engines=kept or (BASELINE,))
    return dataclasses.replace(settings, deny_engines=(*settings.deny_engines, *slow))


def overrun_note(deadline: Deadline, measured: int) -> str:
    """What to tell the user of a call that took longer than its time; empty if it did not.

    Args:
        deadline: that of the call, which ends now.
        measured: number of candidates that it measured.
    """
    if not deadline.is_limited or deadline.spent_s <= TOLERANCE * deadline.seconds:
        return ""
    why = "building and checking took longer than expected" if measured else "a first answer takes as long here"
    return f"the call took {deadline.spent_s:.1f} s, longer than its limit of {deadline.seconds:g} s (time_s): {why}"


def _cut(first: TunedPlan, deadline: Deadline) -> TunedPlan:
    """The first answer, for a call whose time is up; its notes say why nothing was measured."""
    limit = f" of {deadline.seconds:.3g}" if deadline.is_limited else ""
    found = dataclasses.replace(first.found, cut=f"after {deadline.spent_s:.3g}{limit} s, before anything was measured")
    return _noted(first, found, prediction_notes(found))


def _kept(first: TunedPlan, second: TunedPlan) -> TunedPlan:
    """The first answer, for a call whose measurements gave no better plan; its notes say so."""
    found = dataclasses.replace(first.found, measured=second.found.measured)
    worse = "gives wrong results" if second.built.wrong else "is slower"
    why = f"the plan of the {found.measured} candidates that were measured afterwards {worse}"
    kept = _noted(first, found, prediction_notes(found, why))
    built = dataclasses.replace(kept.built, tuned_s=second.built.tuned_s)  # with the time of these measurements
    return TunedPlan(built, found, first.complete)


def _noted(first: TunedPlan, found: SearchResult, after: Sequence[str]) -> TunedPlan:
    """The first answer with other notes on its predictions."""
    before = set(prediction_notes(first.found))
    kept = [note for note in first.built.plan.notes if note not in before]
    plan = dataclasses.replace(first.built.plan, notes=(*after, *kept))
    built = dataclasses.replace(first.built, plan=plan, program=first.built.program.with_plan(plan))
    return TunedPlan(built, found)


def _gain(built: BuiltPlan) -> float:
    """How many times faster than PyTorch; 0 for a plan with wrong results."""
    return 0.0 if built.wrong else built.outcome.baseline.median_ms / built.outcome.optimized.median_ms


def _words(built: BuiltPlan) -> str:
    if built.wrong or _gain(built) <= 1:
        return "PyTorch's own run is the fastest so far"
    times = f"{built.outcome.optimized.median_ms:.3g} ms, PyTorch {built.outcome.baseline.median_ms:.3g} ms"
    return f"{_gain(built):.2f} times as fast as PyTorch ({times})"


def _with_best(watch: Observer, built: BuiltPlan, deadline: Deadline) -> Observer:
    """An observer that is also told the best so far and the time that is left."""
    best = f"{max(1.0, _gain(built)):.2f}x so far"

    def tell(message: str, done: int, total: int) -> None:
        watch(f"{best}, {deadline.left_s:.0f} s left: {message}", done, total)

    return tell
