"""Spilled registers in an assembler's log, as numbers: "10 bytes" contains "0 bytes". Not a test module."""

from __future__ import annotations

import re

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_PROPERTIES = re.compile(r"(?<![\d.])(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def spilled_bytes(log: str) -> list[int]:
    """Bytes of spill stores and loads together, of each kernel and each function that a log of `ptxas -v` names.

    Raises:
        AssertionError: the log names no kernel, or has fewer numbers than kernels.
    """
    kernels, found = _ENTRY.findall(log), _PROPERTIES.findall(log)
    assert kernels, f"the log names no kernel: {log}"
    assert len(found) >= len(kernels), f"kernels without numbers: {log}"
    assert log.count("bytes spill") == 2 * len(found), f"numbers in another form: {log}"
    return [int(stores) + int(loads) for _, stores, loads in found]


def assert_no_spills(log: str) -> None:
    """That no function of a log spills registers; raises AssertionError with the log."""
    assert not any(spilled_bytes(log)), log
