"""The stages of a search within its time: few samples of many candidates, then many samples of few."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from convoy.deadline import Deadline
from convoy.measurement.protocol import Protocol
from convoy.measurement.runner import Request, Runner
from convoy.perfdb.row import Measurement
from convoy.problem import (
    Conv3dProblem,
    ConvProblem,
    LayoutProblem,
    LinearProblem,
    Problem,
    SubgraphProblem,
    subgraph_texts,
)
from convoy.settings import Effort, Settings
from convoy.target import Target
from convoy.tune.prior_rows import RowStore, SearchProgress, reusable_rows
from convoy.tune.tuning_task import TuningTask
from convoy.tuning_profile import phase

SearchStage = Callable[[TuningTask, Protocol, Effort], Request | None]
"""Returns what a stage wants to measure next of a problem; None if nothing."""

STAGES: Final[tuple[SearchStage, ...]] = (TuningTask.first_look, TuningTask.widen, TuningTask.finals)


SLOW_BUILDS_FIRST_S: Final = 120.0
"""Seconds from which a search of limited time compiles a net as a whole before it measures layers, on a CPU: about a third of
that time for ResNet-50 on two cores."""


class StagedSearch:
    """One running search."""

    def __init__(
        self,
        tasks: list[TuningTask],
        protocol: Protocol,
        settings: Settings,
        target: Target,
        database: RowStore,
        runner: Runner,
        report: SearchProgress,
        deadline: Deadline | None = None,
    ) -> None:
        self.tasks, self.protocol, self.effort, self.target = tasks, protocol, settings.effort, target
        self._deadline = deadline or Deadline(settings.time_s)
        self.database, self.runner = database, runner
        self._report = report
        self._done = 0

    def run(self) -> str:
        """Run all stages of all tasks until the time is up; returns how far it came, or an empty text if it completed."""
        try:
            with phase("measure"):
                return self._run()
        except KeyboardInterrupt:
            if not self._deadline.was_stopped:
                raise
            return self._cut()

    def _run(self) -> str:
        tasks = self._begin_slow_builds()
        if not self._run_likely():
            return self._cut()
        chunks = [tasks] if self.target.device == "cuda" else [[task] for task in tasks]
        for chunk in chunks:
            for stage in STAGES:
                if not self._run_stage(chunk, stage):
                    return self._cut()
        self._report(self._done, self._total, "measured")
        return ""

    def _begin_slow_builds(self) -> list[TuningTask]:
        """The tasks in the order in which to measure them; on a GPU, the net as a whole begins to compile now.

        On a CPU a compiler takes the cores that measuring needs. There the net as a whole comes first if the time is limited
        and is long enough for the rest, too; otherwise last.
        """
        slow = [task for task in self.tasks if task.builds_slowly and not task.is_done(self.protocol, self.effort)][:1]
        if self.target.device == "cuda":
            requests = [task.first_look(self.protocol, Effort.FULL) for task in slow]
            if early := [request for request in requests if request is not None]:
                self.runner.prepare(early)
        elif self._deadline.is_limited and self._deadline.left_s >= SLOW_BUILDS_FIRST_S:
            return [*slow, *(task for task in self.tasks if task not in slow)]
        return self.tasks

    def _cut(self) -> str:
        limit = self._deadline
        when = (
            f"after {limit.spent_s:.3g} s, when it was stopped" if limit.was_stopped else f"after {limit.seconds:.3g} s"
        )
        return f"{when}, with {self._done} of {self._total} stages of the search done"

    def _run_likely(self) -> bool:
        """Measure the predicted winners as soon as they are compiled; meanwhile, configs that need no compiler.

        A search that is cut short then has the likely winner of every layer, if the compilers kept up. Configs that need no
        compiler take longer: cuDNN's own search takes 45 ms of a layer, a compiled kernel with all checks 17 ms (H100).

        Returns:
            Whether the time sufficed.
        """
        if self.target.device != "cuda" or self.effort is Effort.FULL:
            return True
        open_ = [task for task in self.tasks if not task.is_done(self.protocol, self.effort)]
        requests = {task: request for task in open_ if (request := task.likely_request(self.protocol)) is not None}
        if requests:
            self.runner.prepare(list(requests.values()))
        meanwhile = deque(requests)
        while requests:
            task = next((task for task, request in requests.items() if self.runner.is_ready(request)), None)
            if task is not None:
                request = requests.pop(task)
            elif meanwhile:  # no build has finished
                task = meanwhile.popleft()
                request = task.uncompiled_request(self.protocol)
            else:
                task = next(iter(requests))
                request = requests.pop(task)
            if request is not None and not self._measure_in_time(task, request):
                return False
        return True

    @property
    def _total(self) -> int:
        return len(self.tasks) * len(STAGES)

    def _run_stage(self, chunk: list[TuningTask], stage: SearchStage) -> bool:
        """Ask every task for its next request until none has any; returns whether the time sufficed."""
        for task in chunk:
            if task.is_done(self.protocol, self.effort):
                self._step()
        waiting: list[TuningTask] = [task for task in chunk if not task.is_done(self.protocol, self.effort)]
        while waiting:
            asked = [(task, stage(task, self.protocol, self.effort)) for task in waiting]
            waiting = list[TuningTask]()
            asked.sort(key=self._order)
            self.runner.prepare([request for _, request in asked if request is not None])
            for task, request in asked:
                if request is None:
                    self._step()
                    continue
                if not self._measure_in_time(task, request):
                    return False
                waiting.append(task)
        return True

    def _measure_in_time(self, task: TuningTask, request: Request) -> bool:
        """Measure a request; returns False without measuring if the time is up."""
        if self._deadline.is_over:
            return False
        self._report(self._done, self._total, describe_problem(task.problem))
        self._measure(task, request)
        return True

    def _order(self, asked: tuple[TuningTask, Request | None]) -> tuple[bool, bool]:
        """Sort key of a request: those without compiling come first, while the builders start and compile the others.

        If the time is limited, problems that only need their baseline come last.
        """
        task, request = asked
        return task.baseline_only and self._deadline.is_limited, request is not None and task.compiles(request)

    def _step(self) -> None:
        self._done += 1

    def _measure(self, task: TuningTask, request: Request) -> None:
        """Measure, and store the rows, also after an interrupt."""
        measured: list[Measurement] = []
        try:
            for row in self.runner.measure(request, self.protocol):
                measured.append(row)
                task.take(row)
        finally:
            if kept := reusable_rows(measured, self.target):
                self.database.put(kept, subgraph_texts([task.problem]), targets=(self.target,))


def describe_problem(problem: Problem) -> str:
    """A problem in a few words, for the progress bar."""
    if isinstance(problem, SubgraphProblem):
        return f"{problem.label or 'operations'}, {problem.layout}"
    if isinstance(problem, ConvProblem):
        sizes = f"{problem.c}x{problem.h}x{problem.w} to {problem.k}, {problem.r}x{problem.s}"
        return f"conv {sizes}, {problem.layout}, {problem.epilogue}"
    if isinstance(problem, Conv3dProblem):
        size, window = ("x".join(map(str, sides)) for sides in (problem.size, problem.window))
        return f"conv3d {problem.c}x{size} to {problem.k}, {window}, {problem.layout}, {problem.epilogue}"
    if isinstance(problem, LinearProblem):
        return f"linear {problem.c} to {problem.k}, {problem.epilogue}"
    assert isinstance(problem, LayoutProblem)
    return f"copy {problem.spec} from {problem.source} to {problem.layout}"
