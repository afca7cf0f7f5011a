"""The candidates that a solver needs: those that fit the memory formats, beat the baseline, and are not dominated."""

from __future__ import annotations

from convoy.selection.problem import Candidate, SelectionProblem


def layout_compatible(problem: SelectionProblem) -> list[Candidate]:
    """Candidates whose memory format every 4-D value of their region may have, in the problem's order."""
    fits: dict[tuple[int, str], bool] = {}  # many candidates of a region have one format
    kept: list[Candidate] = []
    for candidate in problem.candidates:
        key = (candidate.region, candidate.layout)
        if key not in fits:
            fits[key] = _fits(problem, candidate)
        if fits[key]:
            kept.append(candidate)
    return kept


def undominated(problem: SelectionProblem, *, budgeted: bool | None = None) -> list[Candidate]:
    """The candidates of `exact` and `greedy`, in the problem's order.

    Three rules apply; each keeps an optimum of the candidates that the previous one left:

    1. A candidate whose memory format one of its values may not have is removed.
    2. The baseline stays unless it is clearly beaten. If a region has a baseline candidate in the same memory format, a
    challenger is removed unless `median_us + spread_us < baseline.median_us`: a difference within the spread is noise, and
    keeping a layer as it was costs nothing. Other memory formats are not compared, because a slower kernel may save
    conversions elsewhere. Under a memory budget a slower challenger with less workspace or less packed memory stays, because
    it may be the one that fits.
    3. Of two candidates of one region in one memory format, the one that is not faster (and, under a memory budget, needs no
    less workspace and no less packed memory) is removed; of equals the first stays.

    Args:
        problem: a valid problem.
        budgeted: whether memory matters; None: whether the problem has a memory budget.
    """
    budgeted = problem.memory_budget_bytes is not None if budgeted is None else budgeted
    groups: dict[tuple[int, str], list[Candidate]] = {}
    for candidate in layout_compatible(problem):
        groups.setdefault((candidate.region, candidate.layout), []).append(candidate)
    kept: set[int] = set()
    for group in groups.values():
        kept.update(id(c) for c in _front(_challengers(group, budgeted), budgeted))
    return [c for c in problem.candidates if id(c) in kept]


def _fits(problem: SelectionProblem, candidate: Candidate) -> bool:
    region = problem.regions[candidate.region]
    return all(
        problem.layout_of(value, candidate.layout) in problem.value_layouts[value]
        for value in (*region.args, *region.results)
        if value in problem.value_layouts
    )


def _challengers(group: list[Candidate], budgeted: bool) -> list[Candidate]:
    baselines = [c for c in group if c.baseline]
    if not baselines:
        return group
    best = min(baselines, key=lambda c: c.median_us)

    def stays(c: Candidate) -> bool:
        smaller = c.workspace_bytes < best.workspace_bytes or c.resident_bytes < best.resident_bytes
        return c.baseline or c.median_us + c.spread_us < best.median_us or (budgeted and smaller)

    return [c for c in group if stays(c)]


def _front(group: list[Candidate], budgeted: bool) -> list[Candidate]:
    """The Pareto front: by time, or by time and memory."""

    def wants(c: Candidate) -> tuple[float, ...]:
        return (c.median_us, c.workspace_bytes, c.resident_bytes) if budgeted else (c.median_us,)

    front: list[Candidate] = []
    for candidate in sorted(group, key=wants):  # sorted is stable, and a dominating candidate is sorted first
        if not any(all(a <= b for a, b in zip(wants(f), wants(candidate), strict=True)) for f in front):
            front.append(candidate)
    return front
