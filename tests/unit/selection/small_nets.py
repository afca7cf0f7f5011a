"""Seeded random small nets, and the optimum over every choice there is, by a way that shares no code with the solvers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from convoy.problem import EngineConfig
from convoy.selection import Candidate, LaunchOrder, LayoutCopy, RegionNodes, SelectionProblem

ENGINES = ("aten", "fast", "frugal")


def random_net(seed: int, *, most_nodes: int = 6) -> SelectionProblem:
    """A net with residuals, diamonds, several inputs and outputs, values that are not 4-D, and overlapping fused regions.

    Some regions are cut so that they wait for others in a circle, some forget to export a value that is read outside, some
    conversions and some memory formats are not on offer: a choice must work around all of them, or there is none.
    """
    rng = random.Random(seed)
    nodes = [f"n{i}" for i in range(rng.randint(1, most_nodes))]
    inputs = ["x", "z"][: rng.randint(1, 2)]
    makes = {node: [f"{node}.{j}" for j in range(1 + (rng.random() < 0.15))] for node in nodes}
    reads = _reads(rng, nodes, inputs, makes)
    made = [v for node in nodes for v in makes[node]]
    read = {v for values in reads.values() for v in values}
    outputs = [
        v for v in [*inputs, *made] if rng.random() < 0.15 or (v in made and v not in read and rng.random() < 0.9)
    ]
    layouts = ("nchw", "nhwc", "blocked")[: rng.randint(2, 3)]
    values = [*inputs, *made]
    value_layouts = {v: _some_layouts(rng, layouts) for v in values if rng.random() < 0.85}
    regions = _regions(rng, nodes, reads, makes, outputs)
    candidates = [c for i in range(len(regions)) for c in _candidates(rng, i, regions[i], layouts)]
    pairs = [(v, a, b) for v in value_layouts for a in layouts for b in layouts if a != b and rng.random() < 0.9]
    return SelectionProblem(
        nodes=tuple(nodes),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        regions=tuple(regions),
        candidates=tuple(candidates),
        value_layouts=value_layouts,
        value_bytes={v: rng.randint(0, 9) for v in values},
        convert_us={pair: float(rng.randint(0, 6)) for pair in pairs},
        border={
            v: rng.choice(value_layouts[v]) for v in (*inputs, *outputs) if v in value_layouts and rng.random() < 0.8
        },
        copies={pair: LayoutCopy(f"layout:{pair[1]}:{pair[2]}:fp32[1,1,1,1]", EngineConfig("aten")) for pair in pairs},
    )


def _reads(
    rng: random.Random, nodes: list[str], inputs: list[str], makes: dict[str, list[str]]
) -> dict[str, list[str]]:
    available = list(inputs)
    reads: dict[str, list[str]] = {}
    for node in nodes:
        recent = available[-3:] if rng.random() < 0.7 else available
        reads[node] = sorted({rng.choice(recent) for _ in range(rng.randint(1, 2))})
        available += makes[node]
    return reads


def _some_layouts(rng: random.Random, layouts: Sequence[str]) -> tuple[str, ...]:
    return tuple(layouts) if rng.random() < 0.85 else tuple(rng.sample(layouts, 2))


def _regions(
    rng: random.Random, nodes: list[str], reads: dict[str, list[str]], makes: dict[str, list[str]], outputs: list[str]
) -> list[RegionNodes]:
    groups = [(node,) for node in nodes]
    for _ in range(rng.randint(0, 2 * len(nodes)) if len(nodes) > 1 else 0):
        start = rng.randrange(len(nodes) - 1)
        near = nodes[start : start + 4] if rng.random() < 0.8 else nodes
        group = tuple(sorted(rng.sample(near, rng.randint(2, min(3, len(near)))), key=nodes.index))
        if group not in groups:
            groups.append(group)
    regions: list[RegionNodes] = []
    for group in groups:
        inside = [v for node in group for v in makes[node]]
        args = dict.fromkeys(v for node in group for v in reads[node] if v not in inside)
        outside = {v for node in nodes if node not in group for v in reads[node]} | set(outputs)
        results = [v for v in inside if v in outside and not (len(group) > 1 and rng.random() < 0.05)]
        regions.append(RegionNodes(f"glue({'+'.join(group)})", group, tuple(args), tuple(results)))
    return regions


def _candidates(rng: random.Random, index: int, region: RegionNodes, layouts: Sequence[str]) -> Iterator[Candidate]:
    offered = [layout for layout in layouts if rng.random() < 0.8] or [layouts[0]]
    for layout in offered:
        for engine in ENGINES[: rng.randint(1, 3)]:
            yield Candidate(
                region=index,
                problem="p",
                config=EngineConfig(engine),
                layout=layout,
                median_us=float(rng.randint(0, 12) + 4 * (len(region.nodes) - 1)),
                workspace_bytes=rng.choice((0, 0, 5, 20)),
                resident_bytes=rng.choice((0, 0, 0, 7)),
            )


@dataclass(frozen=True)
class Outcome:
    """The cost of one choice."""

    chosen: tuple[Candidate, ...]
    total_us: float
    peak_bytes: int


def outcomes(problem: SelectionProblem) -> Iterator[Outcome]:
    """Every choice that can be run, with its time and its peak of memory."""
    order = LaunchOrder(problem)
    for cover in _covers(problem, list(problem.nodes), []):
        launched = order.sort(cover)
        if not _runs_in(problem, launched):
            continue
        for chosen in _choices(problem, launched, []):
            found = _simulate(problem, chosen)
            if found is not None:
                yield found


def _covers(problem: SelectionProblem, left: list[str], taken: list[int]) -> Iterator[list[int]]:
    if not left:
        yield taken
        return
    for index, region in enumerate(problem.regions):
        if left[0] in region.nodes and set(region.nodes) <= set(left):
            yield from _covers(problem, [n for n in left if n not in region.nodes], [*taken, index])


def _runs_in(problem: SelectionProblem, launched: list[int]) -> bool:
    """Whether the order holds every region of some cover and each region finds what it reads, the net what it returns."""
    there = set(problem.inputs)
    for index in launched:
        if not there.issuperset(problem.regions[index].args):
            return False
        there.update(problem.regions[index].results)
    return sum(len(problem.regions[i].nodes) for i in launched) == len(problem.nodes) and there >= set(problem.outputs)


def _choices(problem: SelectionProblem, launched: list[int], taken: list[Candidate]) -> Iterator[tuple[Candidate, ...]]:
    if not launched:
        yield tuple(taken)
        return
    region = problem.regions[launched[0]]
    values = [v for v in (*region.args, *region.results) if v in problem.value_layouts]
    for candidate in problem.candidates:
        if candidate.region == launched[0] and all(candidate.layout in problem.value_layouts[v] for v in values):
            yield from _choices(problem, launched[1:], [*taken, candidate])


def _simulate(problem: SelectionProblem, chosen: tuple[Candidate, ...]) -> Outcome | None:
    """Run a choice on paper: make values, copy them at their first use in another format, drop them after their last."""

    def form(value: str, layout: str) -> tuple[str, str]:
        return (value, layout if value in problem.value_layouts else "any")

    def border(value: str) -> tuple[str, str]:
        return form(value, problem.border.get(value, problem.value_layouts.get(value, ("any",))[0]))

    made = {value: border(value) for value in problem.inputs}
    wants = [[form(v, c.layout) for v in problem.regions[c.region].args] for c in chosen]
    wants.append([border(v) for v in problem.outputs])
    present = set(made.values())
    resident = sum(c.resident_bytes for c in chosen)
    total, peak = sum(c.median_us for c in chosen), 0
    for step, wanted in enumerate(wants):
        copied = [w for w in dict.fromkeys(wanted) if w not in present]
        for value, layout in copied:
            price = problem.convert_us.get((value, made[value][1], layout))
            if price is None:
                return None
            total += price
        present.update(copied)
        workspace = 0
        if step < len(chosen):
            region = problem.regions[chosen[step].region]
            workspace = chosen[step].workspace_bytes
            made.update((v, form(v, chosen[step].layout)) for v in region.results)
            present.update(made[v] for v in region.results)
        peak = max(peak, sum(problem.value_bytes[v] for v, _ in present) + workspace + resident)
        # What stays: inputs, what is wanted later, and what a copy that is wanted later has yet to be made from.
        later = {w for following in wants[step + 1 :] for w in following}
        sources = {made[v] for v, layout in later if v in made and (v, layout) not in present}
        stays = later | sources | {made[v] for v in problem.inputs}
        present &= stays
    return Outcome(chosen, float(total), peak)
