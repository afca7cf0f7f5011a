"""The search: every engine's time for every problem, from the database, by measuring in stages, or predicted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from convoy.collection_pause import collection_paused
from convoy.deadline import Deadline
from convoy.engines.activation_sparsity import CURVE, SparsityBucket
from convoy.engines.base import Engine
from convoy.engines.competition import load_competitor
from convoy.engines.manifest import BASELINE
from convoy.measurement.known_spaces import KnownSpaces, known_spaces
from convoy.measurement.protocol import Protocol, protocol_for
from convoy.measurement.reference_data import data_key
from convoy.measurement.runner import Runner
from convoy.perfdb.row import Measurement
from convoy.problem import Problem
from convoy.settings import Effort, Settings
from convoy.target import Target
from convoy.tune.precision import equivalent_targets
from convoy.tune.prior_rows import (
    Floor,
    PredictorSource,
    RowStore,
    SearchProgress,
    add_predictions,
    add_transfer_hints,
    known_rows,
    set_priors,
)
from convoy.tune.search_space import SearchSpace
from convoy.tune.spared_engines import spared_engines, spared_for
from convoy.tune.staged_search import StagedSearch
from convoy.tune.tuning_task import TuningTask
from convoy.tuning_profile import phase


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found.

    Attributes:
        rows: by problem key, every row that the settings allow, failures too.
        refusals: by problem key, the reason of each engine that has no row.
        measured: number of candidates that this search measured.
        from_database: number of candidates whose stored rows were used.
        predicted: number of problems with predicted times: at effort `none`, after the time was up, or for lack of memory.
        predicted_from: number of measurements of other problems that the predictions rest on.
        baseline_out_of_memory: number of problems on which PyTorch's own operators ran out of memory.
        wrong_predictions: number of a plan's predicted steps that were wrong (`convoy.pipeline.check.verify_predicted`).
        cut: how far the search came if its time was up; else empty.
        zeros_uncounted: whether there was no memory to count the zeros of the net's values (`convoy.measurement.count_zeros`).
    """

    rows: Mapping[str, Sequence[Measurement]] = field(default_factory=dict[str, Sequence[Measurement]])
    refusals: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    measured: int = 0
    from_database: int = 0
    predicted: int = 0
    predicted_from: int = 0
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
    whole: Collection[str] = (),
    deadline: Deadline | None = None,
    floor_of: Callable[[], Floor | None] = lambda: None,
) -> SearchResult:
    """Find the time of every engine for every problem.

    A candidate with a row for this target and protocol, a failure too, is not measured again. New rows are stored at once, so
    an interrupt loses none that was finished. The stages are: every engine's default knobs with few samples; other knobs of
    engines near the best; all samples for the best few and the baseline.

    On a CPU one problem passes all stages before the next, so its data is made once. On a GPU each stage passes all problems,
    so kernels of later problems compile while the first are measured; at effort `quick` the predicted winners come first
    (`TuningTask.set_prior`).

    Args:
        problems: the problems; duplicates are searched once.
        engine_ids: engines that compete; those that the settings exclude are left out, and so is the oracle.
        target: the device.
        settings: effort, time, and what is allowed.
        database: where rows are read and stored.
        runner: measures; not called if the database has every row.
        on_progress: called with (done, total, description).
        baseline_only: keys of problems for which only the baseline is measured.
        zeros: by problem key, the sparsity buckets of its layers' inputs (`convoy.engines.activation_sparsity`); engines that
            skip zeros are measured for these, and without zeros for other problems.
        whole: keys of problems of pattern `whole`. Only they have engines with `Engine.only_its_patterns`, and their times are
            measured or unknown: a prediction from memory passes would be far too low for a net.
        deadline: when measuring must end; None: after `settings.time_s`.
        floor_of: gives the floors of problems, below which nothing is predicted; called only if something is predicted.

    Raises:
        InputError: an unknown engine id, an extra engine that cannot be imported, or a damaged criteria file.
        LaunchError: nothing can be measured here (see `Runner`).
    """
    report = on_progress or _silent
    protocol = protocol_for(settings.effort, target.device)
    distinct = _by_shared_data({problem.key: problem for problem in problems}.values())
    engines = _competitors(engine_ids, settings)
    with known_spaces(target) as spaces:
        make = partial(_space, baseline_only=baseline_only, zeros=zeros or {}, whole=whole, settings=settings)
        make = partial(make, engines=engines, target=target, spaces=spaces)
        take = partial(_take_stored_rows, target=target, protocol=protocol, database=database)
        tasks = _tasks(distinct, make, take, spared_engines(engines, settings, target))
    source = PredictorSource(engines, target, protocol, database, settings.db)
    if settings.effort is Effort.QUICK:
        _order_by_hints(tasks, source, protocol, target, database)
    staged = StagedSearch(tasks, protocol, settings, target, database, runner, report, deadline)
    cut = "" if settings.effort is Effort.NONE else staged.run()
    return _with_predictions(tasks, source, protocol, settings.effort, cut, report, floor_of)


def _with_predictions(
    tasks: Sequence[TuningTask],
    source: PredictorSource,
    protocol: Protocol,
    effort: Effort,
    cut: str,
    report: SearchProgress,
    floor_of: Callable[[], Floor | None],
) -> SearchResult:
    """The result of a search that has measured: what it could not measure is predicted."""
    # Before predictions take the place of the rows that say so.
    without_memory = [task for task in tasks if task.baseline_ran_out_of_memory()]
    predicted_from = 0
    if unanswered := tasks if cut or effort is Effort.NONE else without_memory:
        with collection_paused():
            predicted_from = add_predictions(unanswered, source, protocol, report, floor_of)
    return replace(_result(tasks, effort, cut, len(without_memory)), predicted_from=predicted_from)


def _tasks(
    problems: Sequence[Problem],
    make: Callable[..., SearchSpace],
    take_stored_rows: Callable[[Sequence[TuningTask]], None],
    spared: Sequence[Engine],
) -> list[TuningTask]:
    """The problems with their spaces and stored rows. Spared engines are asked about those that the rows do not decide."""
    with phase("spaces"), collection_paused():
        tasks = [TuningTask(make(p, spared=spared_for(p, spared))) for p in problems]
    take_stored_rows(tasks)
    with phase("spaces"), collection_paused():
        asked = {task: TuningTask(make(task.problem)) for task in tasks if not task.is_decided()}
    take_stored_rows(list(asked.values()))
    return [asked.get(task, task) for task in tasks]


def _take_stored_rows(tasks: Sequence[TuningTask], target: Target, protocol: Protocol, database: RowStore) -> None:
    with phase("stored rows"), collection_paused():
        equivalent = equivalent_targets(target, database.targets().values())
        for task in tasks:
            task.take_known(known_rows(task.problem, target, equivalent, protocol, database))


def _order_by_hints(
    tasks: Sequence[TuningTask], source: PredictorSource, protocol: Protocol, target: Target, database: RowStore
) -> None:
    """Put what devices of the same kind and predictions favour first."""
    with phase("stored rows"):
        open_ = [task for task in tasks if not task.is_done(protocol, Effort.QUICK)]  # hints only shorten a search
        add_transfer_hints(open_, target, protocol, database)
    set_priors(tasks, source, protocol, target)


def _result(tasks: Sequence[TuningTask], effort: Effort, cut: str, baseline_out_of_memory: int) -> SearchResult:
    return SearchResult(
        rows={task.problem.key: task.result_rows() for task in tasks},
        refusals={task.problem.key: task.refusals(effort) for task in tasks},
        measured=sum(len(task.measured) for task in tasks),
        from_database=sum(len(task.rows.keys() - task.measured - task.predicted) for task in tasks),
        predicted=sum(bool(task.predicted) for task in tasks),
        baseline_out_of_memory=baseline_out_of_memory,
        cut=cut,
    )


def _silent(done: int, total: int, message: str) -> None:
    del done, total, message


def _space(
    problem: Problem,
    *,
    baseline_only: Collection[str],
    zeros: Mapping[str, Collection[SparsityBucket]],
    whole: Collection[str],
    engines: Sequence[Engine],
    target: Target,
    settings: Settings,
    spaces: KnownSpaces,
    spared: Collection[Engine] = (),
) -> SearchSpace:
    key = problem.key  # made anew at each call
    spared = () if key in baseline_only else spared
    return SearchSpace(
        problem,
        [engine for engine in engines if engine not in spared and (key in whole or not engine.only_its_patterns)],
        target,
        deterministic=settings.deterministic,
        baseline_only=key in baseline_only,
        zeros=zeros.get(key, (SparsityBucket(),)),
        curve=CURVE if key in zeros else (),
        measured_only=key in whole,
        memory_counts=settings.memory_budget_bytes is not None,
        spaces=spaces,
        spared=spared,
    )


def _by_shared_data(problems: Iterable[Problem]) -> list[Problem]:
    """Problems in order of first mention, except that those which share test data stand side by side."""
    groups: dict[str, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(data_key(problem), []).append(problem)
    return [problem for group in groups.values() for problem in group]


def _competitors(engine_ids: Sequence[str], settings: Settings) -> list[Engine]:
    only, deny = settings.only_engines, settings.deny_engines
    wanted = [e for e in engine_ids if e == BASELINE or ((not only or e in only) and e not in deny)]
    engines = [load_competitor(engine, settings.engines) for engine in dict.fromkeys(wanted)]
    return [engine for engine in engines if engine.family != "reference"]
