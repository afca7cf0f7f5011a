"""What the rows of a related device say about a problem, so that the search need not start from nothing.

An H200 has the cores of an H100 and different memory; a new driver leaves the kernels unchanged. Rows of a related device are
never used as this device's own. At effort `quick` they select what to measure: configs near the best there are measured here,
and engines that were far behind there are skipped. If libraries or compilers differ too, no engine is skipped. At effort `none`
a subgraph's time there is its prediction, which is better than one from its bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from convoy.engines.manifest import BASELINE
from convoy.perfdb.row import Measurement
from convoy.problem import EngineConfig
from convoy.target import Target
from convoy.tune.fitted_roofline import at_least

NEAR_BEST_RATIO: Final = 1.15
"""A config is worth measuring if it came within this factor of the best time on the related device. Differences between
related devices (memory, clock) affect one problem's configs alike, and few samples order configs within some percent at
random. The value is a guess: no full searches of two related devices have been compared yet."""

MAX_HINTS: Final = 6
"""Most configs taken over for one problem, the fastest ones."""

KERNEL_LIBRARIES: Final = ("torch", "cudnn", "cudnn_frontend", "triton", "cuda", "compiler")
"""Versions that decide which kernels exist and how they are compiled."""


@dataclass(frozen=True, slots=True)
class TransferHints:
    """What a related device's rows say about one problem.

    Attributes:
        source: the related device's name.
        configs: configs that came near the best there, the fastest first.
        slowdowns: engines that were searched there and need no search here, with their best time over the overall best. Empty
            if the related device has other software.
    """

    source: str = ""
    configs: tuple[EngineConfig, ...] = ()
    slowdowns: dict[str, float] = field(default_factory=dict[str, float])


def related_targets(target: Target, others: Collection[Target]) -> list[Target]:
    """Targets whose rows give hints for this one: those with the same software first, then the same device's."""
    found = [other for other in others if other.digest != target.digest and target.has_same_cores(other)]
    return sorted(
        found, key=lambda other: (not same_software(target, other), not target.is_same_device(other), other.digest)
    )


def predicting_targets(target: Target, others: Collection[Target]) -> list[Target]:
    """Targets whose rows predict times for this one: `related_targets`, then for a CPU all others, its instruction set first."""
    related = related_targets(target, others)
    further = [other for other in others if other.predicts(target) and other not in (target, *related)]
    return [*related, *sorted(further, key=lambda other: (other.arch != target.arch, other.digest))]


def same_software(target: Target, other: Target) -> bool:
    """Whether both targets have the same kernels."""
    return all(target.version(name) == other.version(name) for name in KERNEL_LIBRARIES)


def hints_from_rows(
    rows: Sequence[Measurement],
    valid: Collection[EngineConfig],
    source: Target,
    target: Target,
    *,
    same_clock: bool = True,
) -> TransferHints:
    """The hints that a related device's rows give for one problem.

    Args:
        rows: all rows of the problem on the related device.
        valid: configs that exist on this device; rows of other configs are ignored.
        source: the related device, or this device for rows of an earlier protocol.
        target: this device.
        same_clock: whether the rows have this protocol; rows of an earlier protocol rule nothing out.
    """
    known = sorted((row for row in rows if row.ok and row.config in valid), key=lambda row: row.median_us)
    if len({row.config.engine for row in known} - {BASELINE}) == 0:
        return TransferHints()
    best_us = known[0].median_us
    near = tuple(row.config for row in known if row.median_us <= NEAR_BEST_RATIO * best_us)[:MAX_HINTS]
    slowdowns: dict[str, float] = {}
    if same_clock and same_software(target, source):
        for row in known:
            if row.config.engine != BASELINE:
                slowdowns.setdefault(row.config.engine, row.median_us / best_us)
    return TransferHints(source.name, near, slowdowns)


def with_related(
    predicted: Sequence[Measurement], related: Sequence[Measurement], valid: Collection[EngineConfig], floor_us: float
) -> list[Measurement]:
    """Predictions of one problem, with the times that a related device measured for it.

    Args:
        predicted: the predictions; without any, nothing may be predicted.
        related: rows of the problem on the related device.
        valid: configs that exist on this device.
        floor_us: least time on this device, microseconds.
    """
    found = {row.config: row for row in predicted}
    for row in (row for row in related if predicted and row.ok and row.samples and row.config in valid):
        time_us = at_least(row.median_us, floor_us)
        like = found.get(row.config, replace(predicted[0], config=row.config, deterministic=row.deterministic))
        found[row.config] = replace(like, median_us=time_us, reason="measured on a related device")
    return list(found.values())
