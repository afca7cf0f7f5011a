"""The selection problem and its answer, as plain data: cover the graph with regions, one candidate each, at least time."""

from __future__ import annotations

from dataclasses import dataclass, field

from convoy.problem import EngineConfig


@dataclass(frozen=True, slots=True)
class Candidate:
    """A config for one region with its measured cost.

    Attributes:
        region: index into `SelectionProblem.regions`.
        problem: the problem's key.
        config: what runs.
        layout: memory format of the region's 4-D arguments and results (`any` where it has none).
        median_us: measured (or predicted) time, microseconds.
        spread_us: its spread; a challenger must beat the baseline by more than this.
        workspace_bytes: scratch while it runs, shared with everything that does not run at the same time.
        resident_bytes: bytes that its packed constants hold beyond the originals, as long as the net lives.
        baseline: whether this is what PyTorch does today.
        predicted: whether the time comes from a model and not from the clock.
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
class Cover:
    """What selection needs to know of a region: which nodes it covers, what it reads and makes."""

    id: str
    nodes: tuple[str, ...]
    args: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SelectionProblem:
    """Everything that a solver may look at.

    Attributes:
        nodes: names of all nodes, in graph order: each must be covered exactly once.
        inputs: names of the graph's input values.
        outputs: names of the graph's output values.
        regions: the regions on offer.
        candidates: the candidates on offer, of all regions.
        value_layouts: memory formats that a 4-D value may have, first the one that PyTorch would use; values that are not
            4-D are not listed (they have the layout `any`).
        value_bytes: size of each value.
        convert_us: time to copy a value, by (value, from, to); a missing entry means that it cannot be done.
        border: memory format in which the caller gives inputs and wants outputs, by value name.
        memory_budget_bytes: most bytes at any moment for live values + workspace + packed constants; None: no limit.
    """

    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    regions: tuple[Cover, ...]
    candidates: tuple[Candidate, ...]
    value_layouts: dict[str, tuple[str, ...]]
    value_bytes: dict[str, int]
    convert_us: dict[tuple[str, str, str], float]
    border: dict[str, str] = field(default_factory=dict[str, str])
    memory_budget_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Conversion:
    """A copy of one value into another memory format."""

    value: str
    source: str
    layout: str
    median_us: float


@dataclass(frozen=True, slots=True)
class Selection:
    """The choice: chosen candidates in graph order of their regions, and the conversions that they need.

    Attributes:
        solver: who found it (`exact`, `greedy`, `single:ENGINE`, `baseline`).
        chosen: one candidate for each region of a cover.
        conversions: copies between memory formats.
        total_us: predicted time of the whole net.
        bound_us: proven lower bound on `total_us` of any choice; equal to it for an optimum.
        peak_bytes: predicted peak of live values + workspace + packed constants.
    """

    solver: str
    chosen: tuple[Candidate, ...]
    conversions: tuple[Conversion, ...]
    total_us: float
    bound_us: float
    peak_bytes: int = 0
