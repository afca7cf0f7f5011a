"""Data-parallel training over processes: the request, its jobs, and the rows of their results.

A job is one number of processes with one provider, started by torchrun (`scaling_launch`) and measured by `scaling_worker`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from convoy.compare.runs.rows import Figure, Row
from convoy.errors import InputError, unknown_name

DTYPES: Final = ("fp32", "fp16", "bf16")
"""Types of a step: fp32, or autocast with fp32 parameters."""

PROVIDERS: Final = ("torch.ddp", "convoy")
"""PyTorch's own DistributedDataParallel at its best eager setting, and the step of `convoy.training_step`."""

BASELINE_KEPT: Final = "baseline kept"
"""In a setting of Convoy's: its plan was not better than PyTorch's own loss and gradients, which run in its place."""

NOISY: Final = 0.10
"""A relative spread of the rounds above this is noise."""

MOST_REPEATS: Final = 2
"""How often noisy rounds are taken again."""

COUNT_AXIS: Final = {"cuda": "gpus", "cpu": "processes"}
"""By device, the axis of a row that says how many GPUs or processes trained."""

WEAK: Final = "weak"
STRONG: Final = "strong"

UNITS: Final[dict[str, str]] = {
    "step_ms": "ms",
    "compute_ms": "ms",
    "exposed_ms": "ms",
    "group_ms": "ms",
    "input_ms": "ms",
    "host_ms": "ms",
    "launch_ms": "ms",
    "allreduce_ms": "ms",
    "collective_ms": "ms",
    "bare_ms": "ms",
    "bound_ms": "ms",
    "link_gb_per_s": "GB/s",
    "gradient_bytes": "B",
    "peak_memory_bytes": "B",
    "images_per_s": "1/s",
    "efficiency": "1",
}
"""Metrics of a scaling row, with their units (docs/how-to/scale.md)."""

DIFFERENCES: Final = ("exposed_ms", "group_ms", "input_ms")
"""Metrics that are differences of two kinds of rounds: below zero where there is less to see than noise."""


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """A scaling run as requested.

    Attributes:
        model: the net's name, as `convoy.zoo.load_model` takes it.
        gpus: numbers of processes on each host, one GPU each; on a CPU, processes.
        batch: images of one GPU and step (weak scaling), or of all together (strong).
        scalings: `weak`, `strong` or both.
        providers: of `PROVIDERS`.
        dtype: `fp32`, or `fp16` or `bf16` for autocast with fp32 parameters.
        device: `cpu` or `cuda`.
        size: of the images, pixels; one number for square images, or (height, width); 0: the model's own.
        nodes: hosts.
        node_rank: which of them this is.
        endpoint: `HOST:PORT` of the first host, for more than one.
        timeout_s: most seconds of one job.
        round_s: least seconds of one timed round.
        rounds: timed rounds.
        effort: how much Convoy's step may tune.
        db: the performance database; empty: the default one.
        trust: the model's file may run code.
    """

    model: str
    gpus: tuple[int, ...]
    batch: int
    scalings: tuple[str, ...] = (WEAK,)
    providers: tuple[str, ...] = PROVIDERS
    dtype: str = "fp32"
    device: str = "cuda"
    size: int | tuple[int, int] = 0
    nodes: int = 1
    node_rank: int = 0
    endpoint: str = ""
    timeout_s: float = 900.0
    round_s: float = 0.3
    rounds: int = 7
    effort: str = "quick"
    db: str = ""
    trust: bool = False

    def check(self, available: int) -> None:
        """Refuse a request that cannot run.

        Args:
            available: GPUs of this host; on a CPU, its cores.

        Raises:
            InputError: naming the option.
        """
        if not self.gpus or len(set(self.gpus)) != len(self.gpus) or min(self.gpus) < 1:
            raise InputError("--gpus", self.gpus, "numbers of at least 1, each once, separated by commas")
        if self.device == "cuda" and max(self.gpus) > available:
            raise InputError("--gpus", max(self.gpus), f"at most the {available} GPUs of this machine")
        if self.device == "cpu" and max(self.gpus) > max(4, available):
            raise InputError("--gpus", max(self.gpus), f"at most {max(4, available)} processes on this machine")
        if self.batch < 1:
            raise InputError("--batch", self.batch, "an integer of at least 1")
        for provider in self.providers:
            if provider not in PROVIDERS:
                raise unknown_name("--providers", provider, PROVIDERS)
        if self.dtype not in DTYPES:
            raise unknown_name("--dtype", self.dtype, DTYPES)
        if self.nodes < 1:
            raise InputError("--nodes", self.nodes, "an integer of at least 1")
        if not 0 <= self.node_rank < self.nodes:
            raise InputError(
                "--node-rank", self.node_rank, f"a number from 0 to {self.nodes - 1}: --nodes is {self.nodes}"
            )
        if not self.timeout_s > 0:
            raise InputError("--timeout-s", self.timeout_s, "a positive number of seconds")
        if not 0 < self.round_s <= self.timeout_s:
            raise InputError("--round-s", self.round_s, "a positive number of seconds, at most --timeout-s")
        self._check_hosts()

    def _check_hosts(self) -> None:
        host, colon, port = self.endpoint.rpartition(":")
        if self.nodes > 1 and not (host and colon and port.isdigit() and 0 < int(port) < 1 << 16):
            todo = "All hosts are given the same one: that of the first."
            raise InputError("--endpoint", self.endpoint, "HOST:PORT, where there is more than one host", todo)
        for count in self.gpus if STRONG in self.scalings else ():
            if self.batch % (count * self.nodes):
                raise InputError("--batch", self.batch, f"a multiple of {count * self.nodes} for strong scaling")


@dataclass(frozen=True, slots=True)
class ScalingJob:
    """One start of torchrun.

    Attributes:
        request: the whole run.
        provider: of the training step.
        processes: on each host.
        scaling: `weak` or `strong`.
    """

    request: ScaleRequest
    provider: str
    processes: int
    scaling: str

    @property
    def world(self) -> int:
        """Processes of all hosts."""
        return self.processes * self.request.nodes

    @property
    def batch(self) -> int:
        """Images of one process."""
        return self.request.batch if self.scaling == WEAK else self.request.batch // self.world

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the worker."""
        return {"provider": self.provider, "batch": self.batch, "request": asdict(self.request)}

    def row(self, **values: Any) -> Row:
        """Its row, with a result."""
        request = self.request
        return Row(
            subject=request.model,
            provider=self.provider,
            mode="training",
            batch=self.batch,
            dtype=request.dtype,
            axes={COUNT_AXIS[request.device]: self.world, "nodes": request.nodes, "scaling": self.scaling},
            **values,
        )


def jobs(request: ScaleRequest) -> Iterator[ScalingJob]:
    """All jobs, the fewest processes first, the providers of one number next to each other."""
    for scaling in request.scalings:
        for count in sorted(request.gpus):
            for provider in request.providers:
                yield ScalingJob(request, provider, count, scaling)


def result_row(job: ScalingJob, result: Mapping[str, Any]) -> Row:
    """The row of the result that rank 0 wrote."""
    rounds: Mapping[str, Sequence[float]] = result["rounds"]
    step = rounds_figure("step_ms", rounds["step"])
    figures = [step]
    if "compute" in rounds:
        # One process does not communicate: the cost of its group is buckets, hooks and copies.
        name = "exposed_ms" if job.world > 1 else "group_ms"
        figures.append(rounds_figure("compute_ms", rounds["compute"]))
        figures.append(_difference(name, rounds["step"], rounds["compute"]))
    if "input" in rounds:
        figures.append(_difference("input_ms", rounds["input"], rounds["step"]))
    values: Mapping[str, float] = result["values"]
    figures += [Figure.once(name, UNITS[name], float(value)) for name, value in values.items()]
    images = job.batch * job.world * 1e3
    figures.append(Figure("images_per_s", "1/s", images / step.p50, images / step.p80, images / step.p20))
    if "link_gb_per_s" in values and values["link_gb_per_s"] > 0:
        moved = 2 * (job.world - 1) / job.world * values["gradient_bytes"]
        figures.append(Figure.once("bound_ms", "ms", moved / values["link_gb_per_s"] / 1e6))
    loud = [name for name, own in rounds.items() if relative_spread(own) > NOISY]
    detail = {"backend": str(result["backend"]), "rounds": {name: list(own) for name, own in rounds.items()}}
    return job.row(
        setting=str(result["setting"]),
        figures=tuple(figures),
        noisy=bool(loud),
        notes=tuple(map(str, result["notes"])),
        detail={**detail, "noisy": loud} if loud else detail,
    )


def _difference(metric: str, more: Sequence[float], less: Sequence[float]) -> Figure:
    """Difference of two kinds of rounds, round by round: a disturbance of a whole round cancels."""
    return rounds_figure(metric, [one - other for one, other in zip(more, less, strict=True)])


def relative_spread(values: Sequence[float]) -> float:
    """Half the distance from the 20th to the 80th percentile, over the median."""
    found = rounds_figure("step_ms", values)
    return found.spread / found.p50 if found.p50 else 0.0


def rounds_figure(metric: str, seconds: Sequence[float]) -> Figure:
    """Milliseconds from a round's seconds a step."""
    ordered = sorted(1e3 * value for value in seconds)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return Figure(metric, UNITS[metric], at(0.5), at(0.2), at(0.8))


def with_efficiency(rows: Sequence[Row]) -> list[Row]:
    """The rows with their efficiency: images a second and GPU over that of the fewest GPUs, of the same provider and scaling."""
    base: dict[tuple[object, ...], Row] = {}
    for row in sorted(rows, key=count_of):
        if row.ok:
            base.setdefault(_series(row), row)
    return [_efficient(row, base[_series(row)]) if row.ok else row for row in rows]


def _series(row: Row) -> tuple[object, ...]:
    """Fields that the rows of one line share. Batches of strong scaling differ from row to row."""
    return (
        row.subject,
        row.provider,
        row.dtype,
        row.axes["scaling"],
        row.batch * (count_of(row) if _is_strong(row) else 1),
    )


def _is_strong(row: Row) -> bool:
    return row.axes["scaling"] == STRONG


def count_of(row: Row) -> int:
    """How many GPUs a row is for, or processes if it is of a CPU; older files call both `gpus`."""
    return int(next(row.axes[name] for name in reversed(COUNT_AXIS.values()) if name in row.axes))


def _efficient(row: Row, base: Row) -> Row:
    speed, least = row.figure("images_per_s"), base.figure("images_per_s")
    assert speed is not None
    assert least is not None
    value = speed.p50 / count_of(row) / (least.p50 / count_of(base))
    kept = tuple(figure for figure in row.figures if figure.metric != "efficiency")
    return replace(row, figures=(*kept, Figure.once("efficiency", "1", value)))
