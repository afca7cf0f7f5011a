"""The selection problem and its answer as data: cover the graph with regions, one candidate each, in the least time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from convoy.problem import ANY_LAYOUT, EngineConfig, image_layout, volume_layout


@dataclass(frozen=True, slots=True)
class Candidate:
    """A config for one region with its cost.

    Attributes:
        region: index into `SelectionProblem.regions`.
        problem: the problem's key.
        config: the config that runs.
        layout: memory format of the region's 4-D arguments and results (`any` if it has none; a 4-D value beside `any` has
            the first format of its `value_layouts`).
        median_us: measured (or predicted) time, microseconds.
        spread_us: its spread; a challenger must beat the baseline by more than this.
        workspace_bytes: scratch memory while it runs, shared with everything that does not run at the same time.
        resident_bytes: bytes of its packed constants beyond the originals, for the net's lifetime.
        baseline: whether this is PyTorch's own implementation.
        predicted: whether the time comes from a model instead of a measurement.
    """

    region: int
    problem: str
    config: EngineConfig
    layout: str
    median_us: float
    spread_us: float = 0.0
    workspace_bytes: int = 0
    resident_bytes: int = 0
    baseline: bool = False
    predicted: bool = False


@dataclass(frozen=True, slots=True)
class RegionNodes:
    """The part of a region that selection uses: its nodes, arguments and results.

    Attributes:
        id: the region's id, `PATTERN(NODE+NODE)`.
        nodes: names of the nodes covered, in graph order.
        args: names of the values read, without constants.
        results: names of the values made that are read outside the region or returned by the graph.
    """

    id: str
    nodes: tuple[str, ...]
    args: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def pattern(self) -> str:
        """The rule that proposed the region: the part of `id` before the parenthesis."""
        return self.id.partition("(")[0]


@dataclass(frozen=True, slots=True)
class LayoutCopy:
    """How a value is copied into another memory format: the problem's key, the config, and whether its time is predicted."""

    problem: str
    config: EngineConfig
    predicted: bool = False


@dataclass(frozen=True, slots=True)
class SelectionProblem:
    """The input of a solver.

    Attributes:
        nodes: names of all nodes, in graph order: each must be covered exactly once.
        inputs: names of the graph's input values.
        outputs: names of the graph's output values.
        regions: the proposed regions.
        candidates: the candidates of all regions.
        value_layouts: memory formats that a 4-D value may have, first the one that PyTorch would use; values that are not 4-D
            (and no volumes: 5-D, with `ncdhw` and `ndhwc`) are not listed (they have the layout `any`).
        value_bytes: size of each value.
        convert_us: time to copy a value, by (value, from, to), microseconds; a missing entry means that it is impossible.
        border: memory format in which the caller passes inputs and gets outputs, by value name.
        memory_budget_bytes: most bytes at any moment for live values + workspace + packed constants; None: no limit.
        copies: the config of each copy in `convert_us`; schedules need it, solvers do not.
    """

    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    regions: tuple[RegionNodes, ...]
    candidates: tuple[Candidate, ...]
    value_layouts: dict[str, tuple[str, ...]]
    value_bytes: dict[str, int]
    convert_us: dict[tuple[str, str, str], float]
    border: dict[str, str] = field(default_factory=dict[str, str])
    memory_budget_bytes: int | None = None
    copies: dict[tuple[str, str, str], LayoutCopy] = field(default_factory=dict[tuple[str, str, str], LayoutCopy])

    def layout_of(self, value: str, layout: str) -> str:
        """Memory format of a value beside a candidate of `layout`: `any` for values that are not 4-D."""
        allowed = self.value_layouts.get(value)
        if allowed is None:
            return ANY_LAYOUT
        if layout == ANY_LAYOUT or layout in allowed:
            return allowed[0] if layout == ANY_LAYOUT else layout
        beside = (image_layout(layout), volume_layout(layout))  # a region may have images and volumes at its border
        return next((one for one in beside if one in allowed), layout)

    def border_layout(self, value: str) -> str:
        """Memory format of a value on the caller's side; if `border` has none, the one that PyTorch would use."""
        return self.border.get(value, self.layout_of(value, ANY_LAYOUT)) if value in self.value_layouts else ANY_LAYOUT


def covered_nodes(problem: SelectionProblem, candidates: Iterable[Candidate]) -> set[str]:
    """The nodes that some of a problem's candidates compute."""
    return {node for candidate in candidates for node in problem.regions[candidate.region].nodes}


@dataclass(frozen=True, slots=True)
class Conversion:
    """A copy of one value into another memory format, made once for all its readers.

    Attributes:
        value: name of the value.
        source: memory format in which the value was made.
        layout: memory format of the copy.
        median_us: time of the copy, microseconds.
        predicted: whether the time comes from a model instead of a measurement.
    """

    value: str
    source: str
    layout: str
    median_us: float
    predicted: bool = False


@dataclass(frozen=True, slots=True)
class Selection:
    """The choice: chosen candidates in launch order, and the conversions that they need.

    Attributes:
        solver: the solver that found it (`exact`, `greedy`, `single:ENGINE`, `baseline`).
        chosen: one candidate for each region of a cover.
        conversions: copies between memory formats, in order of first use.
        total_us: predicted time of the whole net, conversions included, microseconds.
        bound_us: proven lower bound on `total_us` of any choice; equal to it for an optimum.
        peak_bytes: predicted peak of live values + workspace + packed constants.
    """

    solver: str
    chosen: tuple[Candidate, ...]
    conversions: tuple[Conversion, ...]
    total_us: float
    bound_us: float
    peak_bytes: int = 0

    @property
    def predicted(self) -> bool:
        """Whether a time in `total_us` comes from a model instead of a measurement."""
        return any(one.predicted and one.median_us for one in (*self.chosen, *self.conversions))

    @property
    def gap(self) -> float:
        """How far `total_us` may be from the optimum, as a share of it: 0 for a proven optimum."""
        return (self.total_us - self.bound_us) / self.total_us if self.total_us > 0 else 0.0
