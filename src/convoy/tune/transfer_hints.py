"""What another device of the same kind found out about a problem: there the search need not begin anew.

An H200 has the cores of an H100 and other memory; a new driver leaves the kernels as they were. A row of such a kin is never
taken for one's own, but it says what is worth measuring: at effort `quick` the settings that came near the best there are
measured, and the engines that were far behind there are passed over. Where libraries or compilers differ too, nothing is
passed over: then it is only known what to look at besides.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from convoy.engines.manifest import BASELINE
from convoy.perfdb.row import Measurement
from convoy.problem import EngineConfig
from convoy.target import Target

NEAR_BEST_RATIO: Final = 1.15
"""A setting is worth measuring here that came within this factor of the best there: what differs between kin (memory, clock)
moves the settings of one problem alike, and few samples order those within some percent by chance. A guess until full searches
of two kin have been laid side by side."""

MAX_HINTS: Final = 6
"""Settings taken over for one problem at most, the nearest to the best."""

KERNEL_LIBRARIES: Final = ("torch", "cudnn", "cudnn_frontend", "triton", "cuda", "compiler")
"""Versions that decide which kernels there are and how they are compiled."""


@dataclass(frozen=True, slots=True)
class TransferHints:
    """What is known of a problem from a kin.

    Attributes:
        source: the kin's name.
        favourites: settings that came near the best there, the nearest first.
        behind: engines that were searched there and need no search here, by their best time over the best of all. Empty where the
            kin has other software.
    """

    source: str = ""
    favourites: tuple[EngineConfig, ...] = ()
    behind: dict[str, float] = field(default_factory=dict[str, float])


def related_targets(target: Target, others: Collection[Target]) -> list[Target]:
    """The targets whose rows say something of this one: those with the same software first, the same device's before others'."""
    found = [other for other in others if other.digest != target.digest and target.has_same_cores(other)]
    return sorted(
        found, key=lambda other: (not same_software(target, other), not target.is_same_device(other), other.digest)
    )


def same_software(target: Target, other: Target) -> bool:
    """Whether both have the same kernels."""
    return all(target.version(name) == other.version(name) for name in KERNEL_LIBRARIES)


def hints_from_rows(
    rows: Sequence[Measurement],
    valid: Collection[EngineConfig],
    source: Target,
    target: Target,
    *,
    same_clock: bool = True,
) -> TransferHints:
    """What a kin's rows of a problem say.

    Args:
        rows: all of the kin's rows of it.
        valid: settings that there are here; a row of another is passed over.
        source: the kin, or this device itself for rows of an earlier protocol.
        target: this device.
        same_clock: whether the rows are of this protocol; those of an earlier one rule nothing out.
    """
    known = sorted((row for row in rows if row.ok and row.config in valid), key=lambda row: row.median_us)
    if len({row.config.engine for row in known} - {BASELINE}) == 0:
        return TransferHints()
    best_us = known[0].median_us
    near = tuple(row.config for row in known if row.median_us <= NEAR_BEST_RATIO * best_us)[:MAX_HINTS]
    behind: dict[str, float] = {}
    if same_clock and same_software(target, source):
        for row in known:
            if row.config.engine != BASELINE:
                behind.setdefault(row.config.engine, row.median_us / best_us)
    return TransferHints(source.name, near, behind)
