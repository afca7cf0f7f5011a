"""Measuring: the device and its software, the protocol, accuracy checks, and runners (docs/concepts/measurement.md)."""

from __future__ import annotations

from convoy.measurement.count_zeros import zero_shares
from convoy.measurement.device.detect import check_dtype, detect_target
from convoy.measurement.device.doctor import Finding, findings
from convoy.measurement.device.peaks import Peaks, floor_us, peaks
from convoy.measurement.in_process import InProcessRunner
from convoy.measurement.processes.builder_servers import BuilderServers
from convoy.measurement.processes.child import ChildRunner
from convoy.measurement.processes.parallel_compile import ParallelCompile, begins_early
from convoy.measurement.protocol import Protocol, protocol_for
from convoy.measurement.replay import ReplayRunner
from convoy.measurement.runner import Request, Runner

__all__ = [
    "BuilderServers",
    "ChildRunner",
    "Finding",
    "InProcessRunner",
    "ParallelCompile",
    "Peaks",
    "Protocol",
    "ReplayRunner",
    "Request",
    "Runner",
    "begins_early",
    "check_dtype",
    "detect_target",
    "findings",
    "floor_us",
    "peaks",
    "protocol_for",
    "zero_shares",
]
