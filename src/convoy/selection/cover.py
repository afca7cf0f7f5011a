"""Finds a cover by trying candidates in order of preference, node by node: shared by `greedy`, `single` and `baseline`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from convoy.errors import SelectionError
from convoy.selection.problem import Candidate, SelectionProblem

MAX_BACKTRACKS = 10_000
"""Choices undone before the search gives up. Nets in which each node has a candidate of its own need none."""

Preference = Callable[[Candidate], tuple[float, ...]]
"""Sort key of the candidates of a node: the least is tried first."""


def cover_in_order(problem: SelectionProblem, pool: Sequence[Candidate], preference: Preference) -> list[Candidate]:
    """Visit the nodes in graph order, and cover each uncovered one with its preferred candidate.

    A candidate that overlaps the choice, or that no conversion can join to it, is skipped; if none is left, the last choice
    is undone.

    Args:
        problem: the selection problem.
        pool: the candidates to choose from.
        preference: sort key; ties are resolved by the order of `pool`.

    Raises:
        SelectionError: the pool holds no cover, or none was found.
    """
    options: dict[str, list[Candidate]] = {node: [] for node in problem.nodes}
    for candidate in sorted(pool, key=preference):
        for node in problem.regions[candidate.region].nodes:
            options[node].append(candidate)
    for node, found in options.items():
        if not found:
            raise SelectionError(f"no candidate left for node {node!r}")
    state = _PartialCover(problem)
    trail: list[tuple[Candidate, Iterator[Candidate], int]] = []
    index, untried, back = 0, None, 0
    while True:
        while index < len(problem.nodes) and problem.nodes[index] in state.covered:
            index += 1
        if index == len(problem.nodes):
            return [candidate for candidate, _, _ in trail]
        untried = iter(options[problem.nodes[index]]) if untried is None else untried
        found = next((c for c in untried if state.admits(c)), None)
        if found is not None:
            state.add(found)
            trail.append((found, untried, index))
            untried = None
            continue
        back += 1
        if not trail or back > MAX_BACKTRACKS:
            raise SelectionError(
                f"no cover found: node {problem.nodes[index]!r} cannot be joined to the chosen regions"
            )
        last, untried, index = trail.pop()
        state.remove(last)


class _PartialCover:
    """The covered nodes, and the formats in which values are made and read so far."""

    def __init__(self, problem: SelectionProblem) -> None:
        self._problem = problem
        self.covered: set[str] = set()
        self._made = {value: problem.border_layout(value) for value in problem.inputs}
        self._read: dict[str, list[str]] = {v: [problem.border_layout(v)] for v in problem.outputs}

    def admits(self, candidate: Candidate) -> bool:
        region = self._problem.regions[candidate.region]
        if not self.covered.isdisjoint(region.nodes):
            return False
        reads = ((v, self._made.get(v), self._problem.layout_of(v, candidate.layout)) for v in region.args)
        makes = (
            (v, self._problem.layout_of(v, candidate.layout), wanted)
            for v in region.results
            for wanted in self._read.get(v, ())
        )
        return all(
            source is None or source == wanted or (value, source, wanted) in self._problem.convert_us
            for value, source, wanted in (*reads, *makes)
        )

    def add(self, candidate: Candidate) -> None:
        region = self._problem.regions[candidate.region]
        self.covered.update(region.nodes)
        for value in region.args:
            self._read.setdefault(value, []).append(self._problem.layout_of(value, candidate.layout))
        self._made.update((value, self._problem.layout_of(value, candidate.layout)) for value in region.results)

    def remove(self, candidate: Candidate) -> None:
        region = self._problem.regions[candidate.region]
        self.covered.difference_update(region.nodes)
        for value in region.args:
            self._read[value].remove(self._problem.layout_of(value, candidate.layout))
        for value in region.results:
            del self._made[value]


def node_times(problem: SelectionProblem, pool: Sequence[Candidate]) -> dict[str, float]:
    """The time of a node by itself, microseconds, which a region that covers it has to beat.

    It is its fastest baseline candidate that covers nothing else, or else the least share of any candidate that covers it.
    """
    alone: dict[str, float] = {}
    for candidate in pool:
        nodes = problem.regions[candidate.region].nodes
        if candidate.baseline and len(nodes) == 1:
            alone[nodes[0]] = min(alone.get(nodes[0], candidate.median_us), candidate.median_us)
    return node_shares(problem, pool) | alone


def node_shares(problem: SelectionProblem, pool: Sequence[Candidate]) -> dict[str, float]:
    """For each node the least (time / nodes covered) of the candidates that cover it, microseconds.

    The sum over all nodes is a lower bound on the time of every cover: each chosen region costs at least the shares of its
    nodes (a feasible solution of the dual of the covering program).
    """
    shares: dict[str, float] = {}
    for candidate in pool:
        nodes = problem.regions[candidate.region].nodes
        for node in nodes:
            share = candidate.median_us / len(nodes)
            shares[node] = min(shares.get(node, share), share)
    return shares
