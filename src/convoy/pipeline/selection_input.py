"""The selection problem of a net: candidates of each region, and times of layout changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

from convoy.engines.activation_sparsity import MARGIN, SparsityBucket, SparsityShares, matches_bucket, sparsity_kind
from convoy.engines.manifest import BASELINE, load_engine
from convoy.graph.ir import Graph
from convoy.perfdb.row import Measurement
from convoy.problem import ANY_LAYOUT, ConvProblem, LayoutProblem, Problem, image_layout, layout_beside
from convoy.regions import Region
from convoy.regions.concat import writable_in_place
from convoy.regions.whole import PATTERN as WHOLE
from convoy.selection.problem import Candidate, LayoutCopy, RegionNodes, SelectionProblem

MOST_CANDIDATES = 8
"""Candidates kept for one problem: selection needs the fastest, and under a memory budget those that need less memory."""

Rows = Mapping[str, Sequence[Measurement]]
"""Measurements by problem key."""


def image_values(graph: Graph) -> list[str]:
    """The values that have a memory format to choose (`Graph.has_layout`), without constants."""
    return [v.name for v in graph.values.values() if v.kind != "constant" and graph.has_layout(v.name)]


def _layouts_of(graph: Graph, value: str, layouts: Sequence[str]) -> tuple[str, ...]:
    rank = len(graph.values[value].spec.shape)
    return tuple(layout_beside(layout, rank) for layout in layouts)


def layout_problems(graph: Graph, layouts: Sequence[str]) -> dict[tuple[str, str, str], LayoutProblem]:
    """The copies between memory formats that selection may want, by (value, from, to)."""
    return {
        (name, source, layout): LayoutProblem(graph.values[name].spec, source, layout)
        for name in image_values(graph)
        for source, layout in product(_layouts_of(graph, name, layouts), repeat=2)
        if source != layout
    }


def distinct_problems(regions: Sequence[Region], copies: Mapping[tuple[str, str, str], LayoutProblem]) -> list[Problem]:
    """Every problem to be measured, once, in graph order."""
    found: dict[str, Problem] = {p.key: p for region in regions for p in region.problems}
    found.update((p.key, p) for p in copies.values())
    return list(found.values())


def selection_problem(
    graph: Graph,
    regions: Sequence[Region],
    copies: Mapping[tuple[str, str, str], LayoutProblem],
    rows: Rows,
    *,
    layouts: Sequence[str],
    border: Mapping[str, str],
    memory_budget_bytes: int | None = None,
    zeros: Mapping[str, SparsityShares] | None = None,
    clearly_faster_only: bool = True,
    extra_engines: tuple[str, ...] = (),
) -> SelectionProblem:
    """Make candidates of the measurements of each region.

    Args:
        graph: the net.
        regions: proposals that cover it.
        copies: problems of layout changes, by (value, from, to).
        rows: measurements by problem key.
        layouts: memory formats allowed, first the one that PyTorch would use.
        border: memory format of 4-D inputs and outputs.
        memory_budget_bytes: limit for the whole net, or None.
        zeros: by name, the shares of zeros of values that convolutions read. An engine that skips zeros has the time measured for
            that share; without shares, the time measured without zeros.
        clearly_faster_only: exclude times that hold for one share of zeros only and are not clearly faster (`MARGIN`).
        extra_engines: the user's own, as `Settings.engines` names them.
    """
    shares = zeros or {}
    fastest = _fastest_copies(copies, rows, extra_engines)
    in_place = _written_in_place(graph, regions, rows, extra_engines)
    candidates: list[Candidate] = []
    for index, region in enumerate(regions):
        constant_bytes = sum(graph.values[name].spec.size_bytes for name in region.constants)
        for problem in region.problems:
            fitting = rows_at(rows.get(problem.key, ()), shares.get(region.args[0]) if region.args else None)
            found = sorted((row for row in fitting if row.ok), key=lambda row: row.median_us)
            kept = _kept(clearly_faster(found) if clearly_faster_only else found)
            stock = image_layout(problem.layout) in (layouts[0], ANY_LAYOUT) and type(problem) is type(
                region.problems[0]
            )
            baseline_here = len(region.nodes) == 1 and stock
            own = [_candidate(index, problem, row, constant_bytes, baseline_here) for row in kept]
            if own and problem.key in in_place.get(region.id, ()):
                best = min(own, key=lambda candidate: candidate.median_us)
                own.append(replace(best, median_us=0.0, spread_us=0.0, baseline=False, predicted=True))
            candidates += own
    return SelectionProblem(
        nodes=tuple(node.name for node in graph.nodes),
        inputs=graph.inputs,
        outputs=graph.outputs,
        regions=tuple(RegionNodes(r.id, r.nodes, r.args, r.results) for r in regions),
        candidates=tuple(candidates),
        value_layouts={name: _layouts_of(graph, name, layouts) for name in image_values(graph)},
        value_bytes={v.name: v.spec.size_bytes for v in graph.values.values() if v.kind != "constant"},
        convert_us={name: row.median_us for name, row in fastest.items()},
        copies={name: LayoutCopy(row.problem, row.config, row.predicted) for name, row in fastest.items()},
        border=dict(border),
        memory_budget_bytes=memory_budget_bytes,
    )


def _kept(rows: Sequence[Measurement]) -> list[Measurement]:
    """Of rows sorted by time, the candidates: the fast ones, those that need less memory, and PyTorch's own."""
    return list(dict.fromkeys(fast_or_small(rows) + [row for row in rows if row.config.engine == BASELINE]))


def _candidate(region: int, problem: Problem, row: Measurement, constant_bytes: int, baseline_here: bool) -> Candidate:
    """A row as a candidate for a region; packed constants count beyond the originals' bytes."""
    return Candidate(
        region=region,
        problem=problem.key,
        config=row.config,
        layout=problem.layout,
        median_us=row.median_us,
        spread_us=row.spread_us,
        workspace_bytes=row.workspace_bytes,
        resident_bytes=max(0, row.resident_bytes - constant_bytes),
        baseline=baseline_here and row.config.engine == BASELINE,
        predicted=row.predicted,
    )


def whole_problems(regions: Sequence[Region]) -> set[str]:
    """Keys of the problems that only regions of the whole net, or of parts of it, have."""
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for region in regions:
        found[region.pattern == WHOLE].update(problem.key for problem in region.problems)
    return found[True] - found[False]


def zeros_by_problem(regions: Sequence[Region], zeros: Mapping[str, SparsityShares]) -> dict[str, set[SparsityBucket]]:
    """By problem key, the levels of zeros that engines which skip them are to be measured for."""
    found: dict[str, set[SparsityBucket]] = {}
    for region in regions:
        for problem in region.problems:
            if isinstance(problem, ConvProblem) and region.args[0] in zeros:
                found.setdefault(problem.key, set()).add(SparsityBucket.of(zeros[region.args[0]]))
    return found


def rows_at(rows: Sequence[Measurement], shares: SparsityShares | None) -> list[Measurement]:
    """Rows that hold for an input with these shares of zeros: all except those that were measured at other shares."""
    levels = SparsityBucket.of(shares or SparsityShares())
    return [row for row in rows if matches_bucket(row.config.knobs, levels)]


def clearly_faster(rows: Sequence[Measurement]) -> list[Measurement]:
    """Rows that hold for any input, and those of the others that are faster than all of them by `MARGIN`, in the same order."""
    always = min((row.median_us for row in rows if sparsity_kind(row.config.knobs) is None), default=math.inf)
    return [row for row in rows if sparsity_kind(row.config.knobs) is None or row.median_us < (1 - MARGIN) * always]


def _written_in_place(
    graph: Graph, regions: Sequence[Region], rows: Rows, extra_engines: tuple[str, ...]
) -> dict[str, set[str]]:
    """Problems of concatenations, by region, that may take no time, because the fastest makers of the inputs write in place.

    Selection does not see such pairs of regions. If it selects other makers, the concatenation copies, and the end-to-end time
    shows it.
    """
    makers: dict[str, list[Region]] = {}
    for region in regions:
        for value in region.results:
            makers.setdefault(value, []).append(region)
    found: dict[str, set[str]] = {}
    for region in regions:
        named = writable_in_place(graph, graph.node(region.nodes[0])) if len(region.nodes) == 1 else ()
        if named and all(_fastest_writes_slices(makers.get(value, ()), rows, extra_engines) for value in named):
            found[region.id] = {problem.key for problem in region.problems if problem.layout == "nhwc"}
    return found


def _fastest_writes_slices(regions: Sequence[Region], rows: Rows, extra_engines: tuple[str, ...]) -> bool:
    """Whether the fastest way to make a value, in NHWC, is by an engine that writes slices."""
    times = [
        (row.median_us, row.config.engine)
        for region in regions
        for problem in region.problems
        if problem.layout == "nhwc"
        for row in rows_at(rows.get(problem.key, ()), None)
        if row.ok
    ]
    return bool(times) and load_engine(min(times)[1], extra_engines).writes_slices


def fast_or_small(rows: Sequence[Measurement]) -> list[Measurement]:
    """The fastest rows, and after them each that needs less memory than all before it. `rows` are sorted by time."""
    kept = list(rows[:MOST_CANDIDATES])
    least = min((row.workspace_bytes + row.resident_bytes for row in kept), default=0)
    for row in rows[MOST_CANDIDATES:]:
        wanted = row.workspace_bytes + row.resident_bytes
        if wanted < least:
            kept.append(row)
            least = wanted
    return kept


def _fastest_copies(
    copies: Mapping[tuple[str, str, str], LayoutProblem], rows: Rows, extra_engines: tuple[str, ...]
) -> dict[tuple[str, str, str], Measurement]:
    """The fastest measurement of each copy; of equal ones, as predictions are, one that is launched without Python."""

    def order(row: Measurement) -> tuple[float, bool]:
        return row.median_us, not load_engine(row.config.engine, extra_engines).native

    found: dict[tuple[str, str, str], Measurement] = {}
    for name, problem in copies.items():
        measured = [row for row in rows.get(problem.key, ()) if row.ok]
        if measured:
            found[name] = min(measured, key=order)
    return found
