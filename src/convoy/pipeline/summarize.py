"""Summary of a tuned net from the results of the stages."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from convoy._version import __version__
from convoy.engines.activation_sparsity import sparsity_kind, sparsity_percent
from convoy.engines.manifest import load_engine
from convoy.measurement import Peaks, floor_us, protocol_for
from convoy.perfdb import Measurement
from convoy.pipeline.ceilings import work_of
from convoy.pipeline.check.end_to_end import Latency, OutputErrors
from convoy.pipeline.net import Net
from convoy.pipeline.select import Choice, compared
from convoy.pipeline.step_facts import StepFacts
from convoy.plan import Plan, Step
from convoy.plan.describe import step_name
from convoy.problem import Problem, TensorSpec
from convoy.program import Program
from convoy.report.summary import (
    CandidateRow,
    CurvePoint,
    LayerSummary,
    Memory,
    ScheduleSummary,
    SelectionSummary,
    Strategy,
    Summary,
    Timing,
    Tuning,
)
from convoy.schedule.timeline import Span, bounds
from convoy.settings import Settings
from convoy.tune import SearchResult


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """The end-to-end check: times of stock model and program in turn, and their errors against float64."""

    baseline: Latency
    optimized: Latency
    errors: OutputErrors
    baseline_errors: OutputErrors


def summarize(
    net: Net,
    found: SearchResult,
    choice: Choice,
    plan: Plan,
    program: Program,
    outcome: CheckOutcome,
    settings: Settings,
    tuned_s: float,
    timeline: Sequence[Span] = (),
    *,
    ceilings: Peaks | None,
) -> Summary:
    """The summary of one net. Without ceilings its layers have no floor."""
    limits = bounds(plan.steps)
    facts = StepFacts.of(net, found, settings)
    graph = net.captured.graph
    first = graph.values[net.batch_input].spec if net.batch_input else TensorSpec((), "fp32")
    protocol = protocol_for(settings.effort, net.target.device)
    return Summary(
        model=net.name,
        target=net.target.to_dict(),
        batch=first.shape[0] if first.shape else 0,
        dtype=first.dtype,
        numerics=str(settings.numerics),
        inputs=plan.inputs,
        baseline=_timing(outcome.baseline),
        optimized=_timing(outcome.optimized),
        speedup=outcome.baseline.median_ms / outcome.optimized.median_ms,
        rel_l2_error=outcome.errors.rel_l2_error,
        max_abs_error=outcome.errors.max_abs_error,
        baseline_rel_l2_error=outcome.baseline_errors.rel_l2_error,
        tuning=Tuning(tuned_s, found.measured, found.from_database),
        memory=Memory(
            workspace_bytes=plan.workspace_bytes,
            activation_bytes=plan.activation_bytes,
            peak_bytes=plan.workspace_bytes + plan.activation_bytes + program.resident_bytes,
        ),
        selection=_selection(choice, plan),
        layers=tuple(_layer(step, facts, ceilings, settings) for step in plan.steps or plan.rejected_steps),
        peaks=_peaks(ceilings),
        notes=plan.notes,
        versions={"convoy": __version__, "protocol": protocol.id, **dict(net.target.versions)},
        date=dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        schedule=ScheduleSummary(
            1 + max((step.stream for step in plan.steps), default=0), limits.serial_us, limits.critical_us
        ),
        timeline=tuple(timeline),
    )


def _selection(choice: Choice, plan: Plan) -> SelectionSummary:
    return SelectionSummary(
        solver=choice.selection.solver,
        total_us=choice.selection.total_us,
        bound_us=choice.selection.bound_us,
        greedy_us=choice.strategies.get("greedy", 0.0),
        strategies=tuple(
            Strategy(name, total, name in choice.predicted)
            for name, total in sorted(choice.strategies.items(), key=_by_total)
        ),
        predicted=plan.predicted,
    )


@dataclass(frozen=True, slots=True)
class SummaryOnDemand:
    """A summary that is compared with the strategies left out of a first answer, when somebody asks for it.

    Attributes:
        brief: the summary without them.
        choice: what was chosen, and from what.
        plan: the plan.
        net: the net.
        settings: those of the choice.
    """

    brief: Summary
    choice: Choice
    plan: Plan
    net: Net
    settings: Settings

    def __call__(self) -> Summary:
        """The whole summary."""
        choice = compared(self.choice, self.net, self.settings)
        return replace(self.brief, selection=_selection(choice, self.plan))


def brief_summary(found: Summary | Callable[[], Summary]) -> Summary:
    """The summary that is stored with a plan: without the parts that are found only on demand."""
    if isinstance(found, SummaryOnDemand):
        return found.brief
    return found if isinstance(found, Summary) else found()


def _by_total(item: tuple[str, float]) -> float:
    return item[1]


def _timing(timed: Latency) -> Timing:
    return Timing(timed.name, timed.median_ms, timed.spread_ms)


def _peaks(ceilings: Peaks | None) -> dict[str, float]:
    if ceilings is None:
        return {}
    return {"bytes_per_s": ceilings.bytes_per_s, **{f"flops_{dtype}": rate for dtype, rate in ceilings.flops.items()}}


def _layer(step: Step, facts: StepFacts, ceilings: Peaks | None, settings: Settings) -> LayerSummary:
    problems = facts.problems(step)
    problem, share = problems[step.problem], facts.shares(step)
    every = [row for key in problems for row in facts.found.rows.get(key, ())]
    refused = [
        CandidateRow(engine, "", layout, "unsupported", 0.0, 0.0, 0, 0.0, reason)
        for engine, layout, reason in facts.refusals(step)
    ]
    work = work_of(facts.net.captured.graph, step.pattern, step.nodes, problem)
    baseline_us, baseline_predicted = facts.baseline(step)
    return LayerSummary(
        name=step_name(step),
        problem=step.problem,
        engine=step.config.engine,
        knobs=str(step.config.knobs),
        layout=step.layout,
        median_us=step.median_us,
        baseline_us=baseline_us,
        workspace_bytes=step.workspace_bytes,
        floor_us=None if ceilings is None else floor_us(problem, ceilings, work.dtype, work.flops),
        flops=work.flops,
        bytes_min=problem.bytes_min,
        candidates=(*(_candidate(layout, row) for layout, row in facts.rows(step)), *refused),
        zeros=share.zeros if share else None,
        dead_channels=share.dead_channels if share else None,
        dead_tiles=share.dead_tiles if share else None,
        dead_blocks=share.dead_blocks if share else None,
        curve=_curve(every),
        algorithm=_algorithm(step, problem, settings.engines),
        predicted=step.predicted,
        baseline_predicted=baseline_predicted,
    )


def _algorithm(step: Step, problem: Problem, extra_engines: tuple[str, ...]) -> str:
    return load_engine(step.config.engine, extra_engines).algorithm(problem, step.config.knobs)


def _curve(rows: Iterable[Measurement]) -> tuple[CurvePoint, ...]:
    """Times of engines that skip zeros at each measured share of zeros, of the fastest config of each engine.

    Rows with one sample are left out: such a config was dropped after its first run because it is slow.
    """
    best: dict[tuple[str, str, int], float] = {}
    for row in rows:
        kind, share = sparsity_kind(row.config.knobs), sparsity_percent(row.config.knobs)
        if row.ok and kind is not None and share is not None and row.samples > 1:
            key = (row.config.engine, kind, share)
            best[key] = min(best.get(key, row.median_us), row.median_us)
    return tuple(CurvePoint(engine, share, time, kind) for (engine, kind, share), time in sorted(best.items()))


def _candidate(layout: str, row: Measurement) -> CandidateRow:
    return CandidateRow(
        engine=row.config.engine,
        knobs=str(row.config.knobs),
        layout=layout,
        status=str(row.status),
        median_us=row.median_us,
        spread_us=row.spread_us,
        workspace_bytes=row.workspace_bytes,
        error=row.error,
        reason=row.reason,
        predicted=row.predicted,
    )


def summarize_parts(
    name: str,
    parts: Mapping[str, Summary],
    timed: Mapping[str, Latency],
    errors: OutputErrors,
    plan: Plan,
) -> Summary:
    """One summary of a model's parts, each of which was optimized by itself.

    Args:
        name: the model's name.
        parts: each part's summary, by qualified name; at least one.
        timed: times of the stock model (`torch.eager`) and of the model with optimized parts (`convoy`).
        errors: errors of the result against the stock model.
        plan: the joint plan.
    """
    import dataclasses

    first = next(iter(parts.values()))
    baseline, optimized = _timing(timed["torch.eager"]), _timing(timed["convoy"])
    layers = [
        dataclasses.replace(layer, name=f"{path}.{layer.name}") for path, s in parts.items() for layer in s.layers
    ]
    return dataclasses.replace(
        first,
        model=name,
        inputs=plan.inputs,
        baseline=baseline,
        optimized=optimized,
        speedup=baseline.median_ms / optimized.median_ms,
        rel_l2_error=errors.rel_l2_error,
        max_abs_error=errors.max_abs_error,
        tuning=Tuning(
            seconds=sum(s.tuning.seconds for s in parts.values()),
            measured=sum(s.tuning.measured for s in parts.values()),
            from_database=sum(s.tuning.from_database for s in parts.values()),
        ),
        memory=Memory(
            workspace_bytes=max(s.memory.workspace_bytes for s in parts.values()),
            activation_bytes=max(s.memory.activation_bytes for s in parts.values()),
            peak_bytes=max(s.memory.peak_bytes for s in parts.values()),
        ),
        selection=dataclasses.replace(
            first.selection,
            solver=plan.solver,
            total_us=plan.total_us,
            bound_us=plan.bound_us,
            predicted=plan.predicted,
            greedy_us=sum(s.selection.greedy_us for s in parts.values()),
            strategies=(),
        ),
        layers=tuple(layers),
        notes=plan.notes,
    )
