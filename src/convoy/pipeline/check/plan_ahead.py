"""A first answer's plan is made in a thread, while the calling thread runs the references on a GPU.

Predicting and selecting are Python; the first calls of the model's convolutions wait for cuDNN, which loads or compiles code.
Each takes seconds for a deep net. The model stays in the calling thread: what PyTorch knows of a thread (autocast, modes, the
device) is the user's there, and cuDNN's plans, which PyTorch keeps for each thread, serve the runs that are timed later.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import torch

from convoy.measurement import Peaks
from convoy.measurement.processes.threaded_builds import BegunBuilds
from convoy.pipeline.select import Choice
from convoy.plan import Plan
from convoy.settings import Settings
from convoy.target import Target
from convoy.tune import SearchResult
from convoy.tuning_profile import phase

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PlannedNet:
    """A plan that was selected, whose kernels threads may have begun to build.

    Attributes:
        choice: what was selected, and from what.
        plan: on one stream.
        tuned_s: seconds that measuring and selecting took.
        begun: the builds.
        building: ends them when it is closed.
    """

    choice: Choice
    plan: Plan
    tuned_s: float
    begun: BegunBuilds
    building: ExitStack


MakePlan = Callable[[SearchResult, Settings], PlannedNet]
"""Selects from a search's result, and has threads begin to build."""


def plans_ahead(target: Target, settings: Settings, ceilings: Peaks | None) -> bool:
    """Whether a first answer's plan is made beside the references.

    On a CPU both would share the cores. A user's own engine is asked in the calling thread. Under a limit of tuning's memory,
    the limit is made anew after the search, from what the process holds, which must not change at that moment. Ceilings that
    are not known would be measured by the search.
    """
    plain = not settings.engines and settings.tuning_memory_bytes is None
    return target.device == "cuda" and plain and ceilings is not None


class PlanAhead:
    """Searches and plans in a thread while the references run, and keeps the plan until it is taken.

    Args:
        make: makes the plan.
        references: runs the references; what they raise is raised after what the search raises, as without a thread.
    """

    def __init__(self, make: MakePlan, references: Callable[[], object]) -> None:
        self._make, self._references = make, references
        self._planned: tuple[SearchResult, PlannedNet] | None = None

    def searched(self, search: Callable[[], SearchResult], settings: Settings) -> SearchResult:
        """The search's result. It must measure nothing: the references run beside it."""

        def plan() -> tuple[SearchResult, PlannedNet]:
            found = search()
            return found, self._make(found, settings)

        future: Future[tuple[SearchResult, PlannedNet]] | None = None
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="convoy-plan") as pool:
                future = pool.submit(_on_this_device(plan))
                self._run_references(future)
                with phase("wait for the plan"):
                    self._planned = future.result()
        except BaseException:  # everything, an interrupt too: the threads that build must end
            if future is not None and not future.cancelled() and future.exception() is None:
                future.result()[1].building.close()
            raise
        return self._planned[0]

    def _run_references(self, future: Future[tuple[SearchResult, PlannedNet]]) -> None:
        try:
            self._references()
        except Exception:  # everything: the model is the user's; it is raised again unless the search failed too
            if (error := future.exception()) is not None:
                raise error from None
            raise

    def take(self, found: SearchResult) -> PlannedNet | None:
        """The plan that was made from this result; None if there is none. It is handed out once."""
        kept, self._planned = self._planned, None
        return kept[1] if kept is not None and kept[0] is found else None


def _on_this_device(work: Callable[[], _T]) -> Callable[[], _T]:
    """The same in another thread, which begins with the first GPU and its default stream."""
    if not torch.cuda.is_initialized():
        return work
    stream = torch.cuda.current_stream()

    def run() -> _T:
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            return work()

    return run
