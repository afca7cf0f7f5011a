"""Rows of run files: the figures of one provider on one subject. Plain data; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

STATUSES: Final = (
    "ok",
    "absent",
    "unsupported",
    "compile_error",
    "launch_error",
    "crashed",
    "wrong_result",
    "timeout",
    "out_of_memory",
)
"""How a row ended: the words of the performance database, and `absent` (not installed) and `crashed` (its process died)."""

PASSING: Final = ("timeout", "out_of_memory", "launch_error")
"""Statuses that another limit or another installation may mend."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity: its median and its 20th and 80th percentiles; all equal where it was taken once.

    Attributes:
        metric: measured quantity (`latency_ms`, `images_per_s`, `peak_memory_bytes`, `compile_s`, ...); named with its unit.
        unit: the same unit for people (`ms`, `1/s`, `B`, `s`, `J`).
        p50: median.
        p20: 20th percentile of the samples.
        p80: 80th percentile.
    """

    metric: str
    unit: str
    p50: float
    p20: float
    p80: float

    @staticmethod
    def once(metric: str, unit: str, value: float) -> Figure:
        """A quantity that was taken once."""
        return Figure(metric, unit, value, value, value)

    @property
    def spread(self) -> float:
        """Half the distance from the 20th to the 80th percentile."""
        return (self.p80 - self.p20) / 2


@dataclass(frozen=True, slots=True)
class Row:
    """Result of one provider on one subject in one setting.

    Attributes:
        subject: the net, or a problem's key.
        provider: the framework, engine, option set or strategy.
        status: one of `STATUSES`.
        reason: why it is not `ok`, in the tool's own words; empty for `ok`.
        mode: `inference`, `training`, or a problem's direction.
        batch: images of one call.
        dtype: `fp32`, `fp16` or `bf16`.
        numerics: rounding that was allowed (`strict`, `as_torch`, `half`).
        axes: other varied quantities, by name (`{"gpus": 2, "scaling": "weak"}`): part of the row's key.
        setting: how the provider was set, in words ("channels_last, cudnn.benchmark").
        figures: measurements; empty unless `ok`.
        noisy: the samples scattered more than they should, even when they were taken again.
        notes: lines for people.
        detail: JSON that some kinds add (time by layer kind, an ablation's steps); the page knows their names.
    """

    subject: str
    provider: str
    status: str = "ok"
    reason: str = ""
    mode: str = "inference"
    batch: int = 1
    dtype: str = "fp32"
    numerics: str = "as_torch"
    axes: Mapping[str, int | float | str] = field(default_factory=dict[str, int | float | str])
    setting: str = ""
    figures: tuple[Figure, ...] = ()
    noisy: bool = False
    notes: tuple[str, ...] = ()
    detail: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def ok(self) -> bool:
        """Whether it ran and gave the right numbers."""
        return self.status == "ok"

    @property
    def passing(self) -> bool:
        """Whether it failed in a way that may have passed: a run that goes on tries it again."""
        return self.status in PASSING

    @property
    def key(self) -> tuple[object, ...]:
        """Identifies a row in its run, and the same row in another run."""
        axes = tuple(sorted(self.axes.items()))
        return (self.subject, self.mode, self.batch, self.dtype, self.numerics, axes, self.provider)

    @property
    def question(self) -> tuple[object, ...]:
        """The key without the provider: rows that answer one question are compared with each other."""
        return self.key[:-1]

    def figure(self, metric: str) -> Figure | None:
        """The figure of a metric, or None."""
        return next((f for f in self.figures if f.metric == metric), None)

    def label(self) -> str:
        """The row's question in words: `resnet50 batch 1 fp32 inference, gpus 2`."""
        axes = "".join(f", {name} {value}" for name, value in sorted(self.axes.items()))
        return f"{self.subject} batch {self.batch} {self.dtype} {self.mode}{axes}"


def questions(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that answer one question together, in the order of the file."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(row.question, []).append(row)
    return list(found.values())


def by_time(rows: Sequence[Row], metric: str = "latency_ms") -> list[Row]:
    """The fastest first; rows without that figure last, in their order."""

    def key(row: Row) -> tuple[bool, float]:
        found = row.figure(metric)
        return found is None, found.p50 if found is not None else 0.0

    return sorted(rows, key=key)
