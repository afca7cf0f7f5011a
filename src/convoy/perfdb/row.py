"""Measurement: one row of the database. Failures are rows too."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from convoy.problem import EngineConfig


class Status(StrEnum):
    """How measuring a candidate ended."""

    OK = "ok"
    UNSUPPORTED = "unsupported"
    COMPILE_ERROR = "compile_error"
    LAUNCH_ERROR = "launch_error"
    WRONG_RESULT = "wrong_result"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"


@dataclass(frozen=True, slots=True)
class Measurement:
    """The result of one config on one problem on one target.

    Attributes:
        problem: the problem's key.
        config: engine, version, knobs.
        target: the target's digest. A row is not used for another target.
        protocol: id of the measuring protocol (`convoy.measurement.protocol`); rows of different protocols are not compared.
        status: how it ended; all numbers below are 0 unless it is `ok`.
        samples: number of timed samples.
        median_us: median time of one launch, microseconds.
        spread_us: half the distance between the 20th and the 80th percentile, microseconds.
        error: relative L2 error against the float64 oracle; 0 for an exact match.
        workspace_bytes: scratch memory that a launch needs.
        resident_bytes: bytes of the packed constants.
        deterministic: whether the same inputs give the same bits in every launch.
        reason: the cause, for every status but `ok`; may hold the first lines of a compiler's log.
        versions: the target's versions, for people (`torch=2.13.0 ...`).
        date: ISO 8601, UTC.
    """

    problem: str
    config: EngineConfig
    target: str
    protocol: str
    status: Status
    samples: int = 0
    median_us: float = 0.0
    spread_us: float = 0.0
    error: float = 0.0
    workspace_bytes: int = 0
    resident_bytes: int = 0
    deterministic: bool = True
    reason: str = ""
    versions: str = ""
    date: str = ""

    @property
    def ok(self) -> bool:
        """Whether it ran and was right."""
        return self.status is Status.OK

    @property
    def predicted(self) -> bool:
        """Whether the time was predicted: it has no samples. Such rows are never stored."""
        return self.ok and not self.samples
