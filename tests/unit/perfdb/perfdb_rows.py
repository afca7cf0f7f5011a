"""Rows to test with, and sessions in other processes."""

from __future__ import annotations

import dataclasses
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from convoy.perfdb import Measurement, Status
from convoy.problem import ConvProblem, EngineConfig, Knobs, SubgraphProblem
from convoy.target import Target

TARGET = Target("cpu", "A made-up CPU", "avx2", 2, 1 << 30, 1 << 20, (("torch", "2.13.0"),))
OTHER = dataclasses.replace(TARGET, name="Another made-up CPU")
PROTOCOL = "quick-1"
POOL = SubgraphProblem("graph text of a pooling", "nhwc")


def problem(index: int = 0) -> str:
    # Four digits, so that the order of keys is that of indices.
    return ConvProblem(1, 64, 56, 56, 1000 + index, 3, 3, 1, 1).key


def row(index: int = 0, **changes: Any) -> Measurement:
    """A good row; rows of different indices are of different problems and have different figures."""
    base = Measurement(
        problem=problem(index),
        config=EngineConfig("triton.implicit_gemm", 1, Knobs.of(block_m=64, split=index % 3, swizzle=True)),
        target=TARGET.digest,
        protocol=PROTOCOL,
        status=Status.OK,
        samples=10,
        median_us=10.25 + index,
        spread_us=0.125,
        error=1e-7,
        workspace_bytes=4096 * index,
        resident_bytes=36864,
        deterministic=index % 2 == 0,
        versions="torch=2.13.0",
        date="2026-01-02T03:04:05+00:00",
    )
    return dataclasses.replace(base, **changes)


def failure(index: int = 0, **changes: Any) -> Measurement:
    """A row of a candidate that did not work."""
    gone = {"samples": 0, "median_us": 0.0, "spread_us": 0.0, "error": 0.0, "workspace_bytes": 0, "resident_bytes": 0}
    wrong = {"status": Status.COMPILE_ERROR, "reason": 'no room: 5 > 4\n"tile", with a comma — and a dash'}
    return row(index, **{**gone, **wrong, **changes})


def rows(count: int) -> list[Measurement]:
    return [row(index) for index in range(count)]


def by_key(found: list[Measurement]) -> dict[tuple[object, ...], Measurement]:
    return {(r.problem, r.target, r.protocol, r.config): r for r in found}


@contextmanager
def raw(path: Path) -> Iterator[sqlite3.Connection]:
    """SQLite itself on a database file, without waiting for the disk."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        yield connection


def bad_files(path: Path) -> list[Path]:
    """Files that were moved aside, without what belongs to them."""
    return [f for f in path.parent.glob(path.name + ".bad-*") if not f.name.endswith(("-wal", "-shm", "-journal"))]


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A script in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """The output of a process; it must have ended well."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out
