"""The clock: device and stack, protocol, accuracy, runners and the staged search (docs/measurement.md)."""

from __future__ import annotations

from convoy.measurement.ahead import Ahead
from convoy.measurement.child import ChildRunner
from convoy.measurement.detect import check_dtype, detect_target
from convoy.measurement.doctor import Finding, findings
from convoy.measurement.in_process import InProcessRunner
from convoy.measurement.peaks import Peaks, floor_us, peaks
from convoy.measurement.protocol import Protocol, protocol_for
from convoy.measurement.replay import ReplayRunner
from convoy.measurement.runner import Request, Runner
from convoy.measurement.search import SearchResult, search
from convoy.measurement.zeros import zero_shares

__all__ = [
    "Ahead",
    "ChildRunner",
    "Finding",
    "InProcessRunner",
    "Peaks",
    "Protocol",
    "ReplayRunner",
    "Request",
    "Runner",
    "SearchResult",
    "check_dtype",
    "detect_target",
    "findings",
    "floor_us",
    "peaks",
    "protocol_for",
    "search",
    "zero_shares",
]
