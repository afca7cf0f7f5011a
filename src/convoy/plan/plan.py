"""Plan: selection and schedule of one net as plain data, to be saved, read, compared and explained."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from convoy.problem import EngineConfig

PLAN_VERSION = 1


@dataclass(frozen=True, slots=True)
class StepCandidate:
    """One way to compute a step, for people: an engine's fastest config in a memory format, or why it has none.

    Attributes:
        engine: the engine's id.
        knobs: its knobs as text; empty for an engine that refuses the problem.
        layout: memory format.
        status: how measuring it ended (`convoy.perfdb.Status`).
        median_us: time of one launch, microseconds; 0 unless the status is `ok`.
        predicted: whether the time comes from a model instead of a measurement.
        reason: the cause, for every status but `ok`.
    """

    engine: str
    knobs: str
    layout: str
    status: str
    median_us: float = 0.0
    predicted: bool = False
    reason: str = ""


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
        median_us: time of one launch, microseconds.
        workspace_bytes: scratch memory.
        stream: index of its stream; 0 is the critical path's.
        waits: indices of earlier steps on other streams that must have finished.
        predicted: whether `median_us` comes from a model instead of a measurement.
        baseline_us: PyTorch's time for the same nodes one by one, microseconds; 0 if it is not known, and for `convert`.
        baseline_predicted: whether a part of `baseline_us` is predicted.
        candidates: what could compute the same nodes, the fastest first; for people.
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
    predicted: bool = False
    baseline_us: float = 0.0
    baseline_predicted: bool = False
    candidates: tuple[StepCandidate, ...] = ()


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
        total_us: sum of the steps' times, microseconds; on a CPU with the overhead of the launches.
        bound_us: proven lower bound on the sum of any choice of the same candidates.
        workspace_bytes: the shared workspace.
        activation_bytes: the arena for values.
        baseline: True if tuning found nothing faster: the stock module runs.
        notes: fallbacks and refusals, one line each, for the report.
        border: memory format of the graph's 4-D inputs and outputs, by value name, on the caller's side.
        weights: file of the weights that it was tuned with, as the user wrote it (for people); empty where nobody said.
        predicted: whether a time in `total_us` comes from a model instead of a measurement.
        rejected_steps: the steps that were selected and do not run, because the plan is the baseline; for people.
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
    weights: str = ""
    version: int = PLAN_VERSION
    predicted: bool = False
    rejected_steps: tuple[Step, ...] = ()

    def as_baseline(self) -> Plan:
        """The plan that runs the stock module; `explain` still tells what was selected."""
        return replace(self, baseline=True, steps=(), rejected_steps=self.steps or self.rejected_steps)
