"""Plan: selection and schedule of one net as plain data, to be saved, read, compared and explained."""

from __future__ import annotations

from dataclasses import dataclass, field

from convoy.problem import EngineConfig

PLAN_VERSION = 1


@dataclass(frozen=True, slots=True)
class Step:
    """One launch of the schedule.

    Attributes:
        kind: `region` (compute nodes) or `convert` (copy `args[0]` into another memory format).
        pattern: the region's pattern; empty for `convert`.
        nodes: names of the nodes covered; empty for `convert`.
        args: names of the values read, as `NAME` or, for a converted copy, `NAME@LAYOUT`.
        results: names of the values made, likewise.
        problem: the problem's key.
        config: the config that runs.
        layout: memory format of its 4-D arguments and results; for `convert`, the new format.
        median_us: predicted time.
        workspace_bytes: scratch memory.
        stream: index of its stream; 0 is the critical path's.
        waits: indices of earlier steps on other streams that must have finished.
    """

    kind: str
    pattern: str
    nodes: tuple[str, ...]
    args: tuple[str, ...]
    results: tuple[str, ...]
    problem: str
    config: EngineConfig
    layout: str
    median_us: float = 0.0
    workspace_bytes: int = 0
    stream: int = 0
    waits: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Only data: ids, integers, words; no code, pickles or library paths.

    Attributes:
        model: the user's name of the model (for people).
        graph_digest: digest of the captured graph (`convoy.graph.text.digest`): a plan holds only for this graph.
        inputs: text form of the inputs' specs (`fp32[1,3,224,224]`), in call order.
        target: `Target.to_dict()` of the tuned machine.
        numerics: the allowed rounding.
        steps: the launches, in order.
        solver: the solver that chose.
        total_us: predicted time.
        bound_us: proven lower bound.
        workspace_bytes: the shared workspace.
        activation_bytes: the arena for values.
        baseline: True if tuning found nothing faster: the stock module runs.
        notes: fallbacks and refusals, one line each, for the report.
        border: memory format of the graph's 4-D inputs and outputs, by value name, on the caller's side.
    """

    model: str
    graph_digest: str
    inputs: tuple[str, ...]
    target: dict[str, object]
    numerics: str
    steps: tuple[Step, ...]
    solver: str
    total_us: float = 0.0
    bound_us: float = 0.0
    workspace_bytes: int = 0
    activation_bytes: int = 0
    baseline: bool = False
    notes: tuple[str, ...] = field(default=())
    border: dict[str, str] = field(default_factory=dict[str, str])
    version: int = PLAN_VERSION
