"""Greedy: the fastest candidate for each layer as if it stood alone; and the baseline. Conversions are paid, not foreseen."""

from __future__ import annotations

from convoy.errors import SelectionError
from convoy.selection.eligible import worthwhile
from convoy.selection.order import LaunchOrder
from convoy.selection.problem import Candidate, Selection, SelectionProblem
from convoy.selection.settle import settle


def greedy(problem: SelectionProblem) -> Selection:
    """Walk the nodes in order; at each the region that saves most against covering its nodes one by one.

    Of a region the fastest candidate is taken, whatever its memory format: the classic per-layer best. The conversions that
    this needs are in the total.

    Raises:
        SelectionError: what is left cannot be covered, or the memory budget is exceeded.
    """
    best = fastest(worthwhile(problem))
    alone: dict[str, float] = {}
    starting: dict[str, list[int]] = {}
    for index, candidate in best.items():
        nodes = problem.regions[index].nodes
        starting.setdefault(nodes[0], []).append(index)
        if len(nodes) == 1:
            alone[nodes[0]] = min(candidate.median_us, alone.get(nodes[0], float("inf")))
    covered: set[str] = set()
    chosen: list[Candidate] = []
    for node in problem.nodes:
        if node in covered:
            continue
        offers = [i for i in starting.get(node, []) if not covered.intersection(problem.regions[i].nodes)]
        if not offers:
            raise SelectionError(f"no region is left that covers node {node!r}")
        pick = max(offers, key=lambda i: sum(alone.get(n, 0.0) for n in problem.regions[i].nodes) - best[i].median_us)
        chosen.append(best[pick])
        covered.update(problem.regions[pick].nodes)
    return within_budget(problem, settle(problem, LaunchOrder(problem), "greedy", chosen))


def baseline(problem: SelectionProblem) -> Selection:
    """What PyTorch does: every node by itself, by the baseline engine, in the caller's memory format.

    Raises:
        SelectionError: a node has no baseline candidate.
    """
    best = fastest([c for c in problem.candidates if c.baseline])
    chosen: dict[str, Candidate] = {}
    for index, candidate in best.items():
        chosen.setdefault(problem.regions[index].nodes[0], candidate)
    missing = [node for node in problem.nodes if node not in chosen]
    if missing:
        raise SelectionError(f"node {missing[0]!r} has no baseline candidate that was right")
    return settle(problem, LaunchOrder(problem), "baseline", list(chosen.values()))


def fastest(candidates: list[Candidate]) -> dict[int, Candidate]:
    """The fastest candidate of each region, the first of equals."""
    best: dict[int, Candidate] = {}
    for candidate in candidates:
        known = best.get(candidate.region)
        if known is None or candidate.median_us < known.median_us:
            best[candidate.region] = candidate
    return best


def within_budget(problem: SelectionProblem, selection: Selection) -> Selection:
    """The selection itself; raises SelectionError where its peak exceeds the budget."""
    budget = problem.memory_budget_bytes
    if budget is not None and selection.peak_bytes > budget:
        raise SelectionError(f"{selection.solver} needs {selection.peak_bytes} bytes, the memory budget is {budget}")
    return selection
