"""Selection of a net's candidates, with the totals of other strategies for comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from convoy.capture.passes.narrow_indices import index_casts
from convoy.collection_pause import collection_paused
from convoy.deadline import Deadline
from convoy.engines.base import DETERMINISTIC
from convoy.engines.known_defects import stock_is_wrong
from convoy.engines.manifest import BASELINE, engine_ids, load_engine
from convoy.errors import InputError, SelectionError
from convoy.graph.ir import Graph
from convoy.graph.text import digest
from convoy.pipeline.launch_overhead import with_launch_costs, without_launch_costs
from convoy.pipeline.net import Net
from convoy.pipeline.schedule_search import LACK_OF_TIME
from convoy.pipeline.selection_input import selection_problem
from convoy.pipeline.step_facts import StepFacts
from convoy.plan import Plan
from convoy.problem import ConvolutionProblem
from convoy.regions import Region
from convoy.schedule import plan_memory, serial_steps
from convoy.selection import Selection, SelectionProblem, solve
from convoy.selection.problem import covered_nodes
from convoy.selection.quick_start import prefer_quick_start
from convoy.settings import Effort, Settings, Solver
from convoy.tune import SearchResult
from convoy.tune.compile_time import fits_in_time
from convoy.tuning_profile import phase


@dataclass(frozen=True, slots=True)
class Choice:
    """A selection, with the totals of other strategies.

    Attributes:
        problem: the selection problem.
        selection: the selection.
        strategies: total of each possible strategy, microseconds, by name.
        notes: strategies that are not possible, and why.
        predicted: names of the strategies with a predicted time in their total.
        left_out: strategies whose totals `compared` finds, for a report.
    """

    problem: SelectionProblem
    selection: Selection
    strategies: Mapping[str, float]
    notes: tuple[str, ...] = ()
    predicted: frozenset[str] = frozenset()
    left_out: tuple[str, ...] = ()


def offered_candidates(net: Net, found: SearchResult, settings: Settings) -> SelectionProblem:
    """The selection problem of a net: its regions with the measured candidates."""
    return selection_problem(
        net.captured.graph,
        net.regions,
        net.copies,
        found.rows,
        layouts=net.layouts,
        border=net.border,
        memory_budget_bytes=settings.memory_budget_bytes,
        zeros=net.zeros,
        clearly_faster_only=settings.solver is not Solver.SINGLE,
        extra_engines=settings.engines,
    )


def select(net: Net, found: SearchResult, settings: Settings, deadline: Deadline | None = None) -> Choice:
    """Select by the solver of the settings, and compute the totals of the other strategies.

    At effort `none` only that of `baseline` is computed: a first answer waits for no report (`compared`).

    Args:
        net: the net.
        found: times of the candidates.
        settings: solver, and what is allowed.
        deadline: when the choice must be built; None: at any time. What compilers cannot finish by then is not chosen.

    Raises:
        SelectionError: no selection satisfies the settings.
    """
    with phase("select"), collection_paused():
        return _select(net, found, settings, deadline or Deadline())


def _select(net: Net, found: SearchResult, settings: Settings, deadline: Deadline) -> Choice:
    problem = offered_candidates(net, found, settings)
    notes = _determinism_notes(net, found, problem) if settings.deterministic else []
    device = net.target.device
    with_launches = with_launch_costs(problem, device, settings.engines)
    first = solve(with_launches, _solver_name(settings))
    slow = _slow_compilers(with_launches, settings)
    if settings.effort is Effort.NONE:
        first = _with_fewer_slow_builds(first, with_launches, settings, slow)
    compiled = {(one.problem, one.config) for one in first.chosen if one.config.engine in slow}
    share = NET_SHARE_ON_A_CPU if device == "cpu" else NET_SHARE
    net_share = share if settings.effort is Effort.NONE else 0.0
    chosen = _quickly_started(first, with_launches, settings, slow, net_share)
    in_time = chosen is not first or fits_in_time(compiled, found.rows, device, deadline)
    if not in_time:
        chosen = _quickly_started(first, with_launches, settings, slow, math.inf)
    if chosen is not first:
        notes.append(_tie_note(first, chosen, in_time=in_time))
    selection = without_launch_costs(chosen, problem, device)
    engines = sorted(
        {c.config.engine for c in problem.candidates if not c.baseline}, key=engine_ids(settings.engines).index
    )
    choice = Choice(
        problem,
        selection,
        {chosen.solver: chosen.total_us},
        tuple(notes),
        frozenset([chosen.solver] if selection.predicted else []),
        ("baseline", "greedy", *(f"single:{engine}" for engine in engines)),
    )
    if settings.effort is Effort.NONE:
        known = compared(replace(choice, left_out=choice.left_out[:1]), net, settings)
        return replace(known, left_out=choice.left_out[1:])
    return compared(choice, net, settings)


def compared(choice: Choice, net: Net, settings: Settings) -> Choice:
    """The choice with the totals of the strategies that were left out.

    Args:
        choice: the choice, with the problem that it was made from.
        net: the net.
        settings: those of the choice.
    """
    if not choice.left_out:
        return choice
    device = net.target.device
    with_launches = with_launch_costs(choice.problem, device, settings.engines)
    strategies, notes = dict(choice.strategies), list(choice.notes)
    predicted = set(choice.predicted)
    for name in choice.left_out:
        try:
            other = solve(with_launches, name)
        except SelectionError as error:
            notes.append(f"strategy {name} is not possible: {error}")
        else:
            graph, is_stock = net.captured.graph, name == "baseline"
            strategies.setdefault(name, stock_us(other, choice.problem, graph) if is_stock else other.total_us)
            predicted.update([name] if without_launch_costs(other, choice.problem, device).predicted else [])
    return replace(choice, strategies=strategies, notes=tuple(notes), predicted=frozenset(predicted), left_out=())


NET_SHARE: Final = 0.03
"""At effort `none`, a choice without a slow compiler is preferred if it takes longer by at most this share of the net's time: a
first answer should come soon. GoogLeNet's was 2.5 % slower without Inductor's five subgraphs, and came after 38 s with them
(H100)."""

NET_SHARE_ON_A_CPU: Final = 0.25
"""The same on a CPU, whose cores compile. mixnet_s had its first answer after 45 s with 44 subgraphs of Inductor's (17.0 ms a
call), and after 5 without (18.0; least of 20 calls on two cores of an EPYC 7003)."""


SLOW_BUILD_FACTOR: Final = 1.1
"""Factor, at effort `none`, on the times of candidates that a slow compiler builds, each in a second or two: they win only
where they are that much faster than others. In ResNet-50's training step (batch 128, H200) 30 of Inductor's 41 subgraphs were
1 to 13 % faster than `triton.batch_norm`, together 0.9 % of the step."""


def _with_fewer_slow_builds(
    chosen: Selection, problem: SelectionProblem, settings: Settings, slow: Sequence[str]
) -> Selection:
    """The choice by times that count slow compilers' candidates with `SLOW_BUILD_FACTOR`; its total counts their own times."""
    if settings.solver not in (Solver.EXACT, Solver.GREEDY) or not any(c.config.engine in slow for c in chosen.chosen):
        return chosen
    factors = [SLOW_BUILD_FACTOR if c.config.engine in slow else 1.0 for c in problem.candidates]
    penalised = [replace(c, median_us=f * c.median_us) for c, f in zip(problem.candidates, factors, strict=True)]
    own = dict(zip(penalised, problem.candidates, strict=True))
    other = solve(replace(problem, candidates=tuple(penalised)), chosen.solver)
    kept = tuple(own[candidate] for candidate in other.chosen)
    added_us = math.fsum(c.median_us - own[c].median_us for c in other.chosen)
    return replace(other, chosen=kept, total_us=other.total_us - added_us, bound_us=chosen.bound_us)


def _slow_compilers(problem: SelectionProblem, settings: Settings) -> list[str]:
    """The engines whose executables take seconds to load; those that the user names are not left out."""
    competing = {candidate.config.engine for candidate in problem.candidates} - set(settings.only_engines)
    return [engine for engine in competing if not load_engine(engine, settings.engines).starts_quickly]


def _quickly_started(
    chosen: Selection, problem: SelectionProblem, settings: Settings, slow: Sequence[str], net_share: float
) -> Selection:
    """The choice, or one without slow compilers that takes longer by at most this share of the net's time."""
    if settings.solver not in (Solver.EXACT, Solver.GREEDY):
        return chosen
    return prefer_quick_start(problem, chosen, slow, net_share=net_share)


def _tie_note(first: Selection, chosen: Selection, *, in_time: bool) -> str:
    kept = {candidate.config.engine for candidate in chosen.chosen}
    gone = sorted({candidate.config.engine for candidate in first.chosen} - kept)
    unit, unit_us = ("ms", 1e3) if chosen.total_us >= 1e3 else ("us", 1.0)
    saved = f"{(chosen.total_us - first.total_us) / unit_us:.2f} {unit} of {chosen.total_us / unit_us:.2f}"
    end = ": the plan does without" if in_time else f": the plan does without, {LACK_OF_TIME}"
    return f"{', '.join(gone)} would save {saved} and must be compiled at every start{end}"


def _determinism_notes(net: Net, found: SearchResult, problem: SelectionProblem) -> list[str]:
    """Notes of operators whose baseline is excluded because it is nondeterministic, with the reason.

    Raises:
        SelectionError: no deterministic candidate is left for one of them.
    """
    reasons: dict[str, str] = {}
    for region in net.regions:
        refused = [found.refusals.get(p.key, {}).get(BASELINE, "") for p in region.problems]
        if len(region.nodes) == 1 and all(DETERMINISTIC in reason for reason in refused):
            reasons[region.nodes[0]] = refused[0]
    covered = covered_nodes(problem, problem.candidates)
    bare = [name for name in problem.nodes if name in reasons and name not in covered]
    if bare:
        raise SelectionError(
            f"no engine computes {net.captured.graph.node(bare[0]).op} ({bare[0]}) with the same bits in every run here: "
            f"{reasons[bare[0]]}. Leave `deterministic` out, or use another operator."
        )
    return list(
        dict.fromkeys(f"PyTorch's own operator is left out (deterministic): {reason}" for reason in reasons.values())
    )


def stock_us(baseline: Selection, problem: SelectionProblem, graph: Graph) -> float:
    """Predicted time of PyTorch's own run, microseconds: the baseline's without the nodes that capture adds."""
    added = index_casts(graph)
    added_us = (c.median_us for c in baseline.chosen if added.issuperset(problem.regions[c.region].nodes))
    return baseline.total_us - math.fsum(added_us)


def _solver_name(settings: Settings) -> str:
    if settings.solver is not Solver.SINGLE:
        return str(settings.solver)
    if len(settings.only_engines) != 1:
        expected = "exactly one engine id with solver single"
        raise InputError("only_engines", settings.only_engines, expected, "Name it with --only-engines ID.")
    return f"single:{settings.only_engines[0]}"


def convolutions_of(regions: Sequence[Region]) -> list[ConvolutionProblem]:
    """The problem of each convolution and gradient of a net, in its first memory format."""
    alone = [region.problems[0] for region in regions if len(region.nodes) == 1 and region.problems]
    return [problem for problem in alone if isinstance(problem, ConvolutionProblem)]


def stock_defects(net: Net) -> list[str]:
    """Notes: where stock PyTorch may be wrong in a net, or crash, by a known defect."""
    graph = net.captured.as_pytorch if "nhwc" in net.border.values() else None
    return stock_is_wrong(convolutions_of(net.regions), net.target, graph)


def make_plan(
    net: Net, choice: Choice, settings: Settings, notes: Sequence[str] = (), found: SearchResult | None = None
) -> Plan:
    """The plan of a selection, on one stream; with the search's result its steps tell their candidates (`explain`)."""
    steps = serial_steps(choice.problem, choice.selection)
    if found is not None:
        steps = tuple(map(StepFacts.of(net, found, settings).explained, steps))
    arena = plan_memory(steps, choice.problem.value_bytes, keep=net.captured.graph.outputs)
    graph = net.captured.graph
    return Plan(
        model=net.name,
        graph_digest=digest(graph),
        inputs=tuple(str(graph.values[name].spec) for name in graph.inputs),
        target=net.target.to_dict(),
        numerics=str(settings.numerics),
        steps=steps,
        solver=choice.selection.solver,
        total_us=choice.selection.total_us,
        bound_us=choice.selection.bound_us,
        workspace_bytes=max((step.workspace_bytes for step in steps), default=0),
        activation_bytes=arena.size_bytes,
        notes=(*net.captured.notes, *stock_defects(net), *choice.notes, *notes),
        border=dict(net.border),
        predicted=choice.selection.predicted,
    )
