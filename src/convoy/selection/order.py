"""The launch order of regions: topological, and otherwise that of the graph."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from convoy.selection.problem import RegionNodes, SelectionProblem


class LaunchOrder:
    """Gives every region a fixed place in time, and sorts the regions of a cover by it.

    The places are a topological order of all regions (an edge leads from each that makes a value to each that reads it and
    shares no node with it), in which the region whose last node is earliest in the graph goes first. So the places hold for
    every cover, which makes memory over time linear in the choice. If proposals depend on each other in a cycle, no such
    order exists: the cycle is broken at its first region, and covers that contradict the places are sorted by themselves.

    Args:
        problem: the problem with the regions.

    Attributes:
        places: place of each region, by index, from 0. Regions at one place share a node, so at most one of them is chosen.
        contradictions: pairs (maker, reader) of regions, by index, that could be chosen together but have places in the wrong
            order; none, unless proposals depend on each other in a cycle.
    """

    def __init__(self, problem: SelectionProblem) -> None:
        self._regions = problem.regions
        index = {node: i for i, node in enumerate(problem.nodes)}
        priorities = [max(index[node] for node in region.nodes) for region in problem.regions]
        self.places = [0] * len(problem.regions)
        common: set[str] = set()
        place = -1
        needs = _needs(self._regions, disjoint_only=True)
        for position in _sort(needs, priorities, break_cycles=True):
            nodes = set(self._regions[position].nodes)
            common &= nodes
            if not common:
                place, common = place + 1, nodes
            self.places[position] = place
        self.contradictions = [
            (maker, reader)
            for reader, makers in enumerate(needs)
            for maker in sorted(makers)
            if self.places[maker] >= self.places[reader]
        ]

    def sort(self, chosen: Sequence[int]) -> list[int]:
        """Sort regions of a cover so that each follows those that make its arguments.

        Args:
            chosen: indices of regions, no two of which share a node.

        Returns:
            The same indices in launch order; fewer if regions depend on each other in a cycle (see `cycle`).
        """
        needs = _needs([self._regions[index] for index in chosen])
        return [chosen[position] for position in _sort(needs, [self.places[index] for index in chosen])]

    def cycle(self, chosen: Sequence[int]) -> list[int]:
        """Some chosen regions that depend on each other in a cycle; empty if there are none."""
        ordered = set(self.sort(chosen))
        stuck = [index for index in chosen if index not in ordered]
        if not stuck:
            return []
        needs = _needs([self._regions[index] for index in stuck])
        # Every unsorted region needs another unsorted one, so following the needs must return to one of them.
        path = [0]
        while (following := min(needs[path[-1]])) not in path:
            path.append(following)
        return [stuck[position] for position in path[path.index(following) :]]


def _needs(regions: Sequence[RegionNodes], *, disjoint_only: bool = False) -> list[set[int]]:
    """For each region, those of the list that make a value that it reads."""
    makers: dict[str, list[int]] = {}
    for position, region in enumerate(regions):
        for value in region.results:
            makers.setdefault(value, []).append(position)
    nodes = [set(region.nodes) for region in regions]
    return [
        {
            maker
            for value in region.args
            for maker in makers.get(value, ())
            if not disjoint_only or nodes[maker].isdisjoint(nodes[position])
        }
        for position, region in enumerate(regions)
    ]


def _sort(needs: list[set[int]], priorities: list[int], *, break_cycles: bool = False) -> list[int]:
    """Kahn's algorithm with a heap; in a cycle it stops, or continues with the first remaining region."""
    waiting = [len(need) for need in needs]
    readers: list[list[int]] = [[] for _ in needs]
    for position, need in enumerate(needs):
        for maker in need:
            readers[maker].append(position)
    ready = [(priorities[p], p) for p, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    left = sorted((priorities[p], p) for p in range(len(needs)))
    done: set[int] = set()
    order: list[int] = []
    while ready or (break_cycles and len(order) < len(needs)):
        _, position = heapq.heappop(ready) if ready else next(entry for entry in left if entry[1] not in done)
        if position in done:
            continue
        done.add(position)
        order.append(position)
        for reader in readers[position]:
            waiting[reader] -= 1
            if waiting[reader] == 0:
                heapq.heappush(ready, (priorities[reader], reader))
    return order
