"""search: what every engine takes for every problem, from the database, by measuring in stages, or predicted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from convoy.engines.activation_sparsity import CURVE, SparsityBucket
from convoy.engines.base import Engine
from convoy.engines.competition import load_competitor
from convoy.engines.manifest import BASELINE
from convoy.measurement.protocol import protocol_for
from convoy.measurement.reference_data import data_key
from convoy.measurement.runner import Runner
from convoy.perfdb.row import Measurement
from convoy.problem import Problem
from convoy.settings import Effort, Settings
from convoy.target import Target
from convoy.tune.precision import equivalent_targets
from convoy.tune.prior_rows import (
    PredictorSource,
    RowStore,
    SearchProgress,
    add_predictions,
    add_transfer_hints,
    known_rows,
    set_priors,
)
from convoy.tune.search_space import SearchSpace
from convoy.tune.staged_search import StagedSearch
from convoy.tune.tuning_task import TuningTask


@dataclass(slots=True)
class SearchResult:
    """What was found.

    Attributes:
        rows: by problem key, every row that the settings allow, failures too.
        refusals: by problem key, each engine that said no, with its reason.
        measured: candidates that were measured now.
        from_database: candidates whose rows were there already and served.
        predicted: problems whose times are predicted, because effort `none` measures nothing, time was up, or there was no room.
        without_room: problems that there was no memory to measure PyTorch's own on.
        disproved: predictions of a plan's steps that turned out to be of wrong kernels (`convoy.pipeline.verify_predicted`).
        cut: where time was up, what had been done by then; empty where the search was whole.
        uncounted: whether there was no memory to count the zeros of the net's values (`convoy.measurement.count_zeros`).
    """

    rows: dict[str, list[Measurement]] = field(default_factory=dict[str, list[Measurement]])
    refusals: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    measured: int = 0
    from_database: int = 0
    predicted: int = 0
    baseline_out_of_memory: int = 0
    wrong_predictions: int = 0
    cut: str = ""
    zeros_uncounted: bool = False


def search(
    problems: Sequence[Problem],
    *,
    engine_ids: Sequence[str],
    target: Target,
    settings: Settings,
    database: RowStore,
    runner: Runner,
    on_progress: SearchProgress | None = None,
    baseline_only: Collection[str] = (),
    zeros: Mapping[str, Collection[SparsityBucket]] | None = None,
) -> SearchResult:
    """Find out what every engine takes for every problem.

    A candidate with a row for this target and protocol, a failure too, is not tried again. New rows are kept as they come,
    so that an interruption loses nothing that was finished. Stages: every engine's default knobs, with few samples;
    other knobs of the engines that come near the best; all samples for the best and the baseline.

    On a CPU one problem goes through all stages before the next, so that its data is made once. On a GPU each stage goes
    through all problems, so that kernels are compiled in parallel for all of them while the first are measured; at effort
    `quick` those that are predicted to win come before all else (`TuningTask.set_priors`).

    Args:
        problems: each is searched once, however often it occurs.
        engine_ids: engines that compete; those that the settings exclude and the oracle are left out.
        target: the device.
        settings: effort, time, and what is allowed.
        database: where rows come from and go to.
        runner: who measures; not called where the database knows everything.
        on_progress: told (done, total, what is looked at).
        baseline_only: keys of problems that the baseline alone need be measured on.
        zeros: by problem key, what the inputs of its layers could spare (`convoy.engines.activation_sparsity`); engines that skip
            zeros are measured for these, and for none where nothing is said.

    Raises:
        InputError: an unknown engine id, an extra engine that cannot be imported, or a damaged criteria file.
        LaunchError: nothing can be measured here (see `Runner`).
    """
    report = on_progress or _silent
    protocol = protocol_for(settings.effort, target.device)
    distinct = _by_shared_data({problem.key: problem for problem in problems}.values())
    engines = _competitors(engine_ids, settings)
    tasks = [TuningTask(_space(p, engines, target, settings, baseline_only, zeros or {})) for p in distinct]
    knowledge = PredictorSource(engines, target, protocol, database, settings.db)
    alike = equivalent_targets(target, database.targets().values())
    for task in tasks:
        task.take_known(known_rows(task.problem, target, alike, protocol, database))
    if settings.effort is Effort.QUICK:
        add_transfer_hints(tasks, target, protocol, database)
        set_priors(tasks, knowledge, protocol, target)
    cut = ""
    if settings.effort is not Effort.NONE:
        cut = StagedSearch(tasks, protocol, settings, target, database, runner, report).run()
    crowded = [task for task in tasks if task.baseline_ran_out_of_memory()]
    if wanting := tasks if cut or settings.effort is Effort.NONE else crowded:
        add_predictions(wanting, knowledge, protocol, report)
    return SearchResult(
        rows={task.problem.key: task.result_rows() for task in tasks},
        refusals={task.problem.key: task.refusals for task in tasks},
        measured=sum(len(task.measured) for task in tasks),
        from_database=sum(len(task.rows.keys() - task.measured - task.predicted) for task in tasks),
        predicted=sum(bool(task.predicted) for task in tasks),
        baseline_out_of_memory=len(crowded),
        cut=cut,
    )


def _silent(done: int, total: int, message: str) -> None:
    del done, total, message


def _space(
    problem: Problem,
    engines: Sequence[Engine],
    target: Target,
    settings: Settings,
    baseline_only: Collection[str],
    zeros: Mapping[str, Collection[SparsityBucket]],
) -> SearchSpace:
    return SearchSpace(
        problem,
        engines,
        target,
        deterministic=settings.deterministic,
        baseline_only=problem.key in baseline_only,
        zeros=zeros.get(problem.key, (SparsityBucket(),)),
        curve=CURVE if problem.key in zeros else (),
    )


def _by_shared_data(problems: Iterable[Problem]) -> list[Problem]:
    """In order of first mention, but those that can use the same data side by side."""
    groups: dict[str, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(data_key(problem), []).append(problem)
    return [problem for group in groups.values() for problem in group]


def _competitors(engine_ids: Sequence[str], settings: Settings) -> list[Engine]:
    only, deny = settings.only_engines, settings.deny_engines
    wanted = [e for e in engine_ids if e == BASELINE or ((not only or e in only) and e not in deny)]
    engines = [load_competitor(engine, settings.engines) for engine in dict.fromkeys(wanted)]
    return [engine for engine in engines if engine.family != "reference"]
