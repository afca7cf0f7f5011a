"""Shares of the measuring among the processes of a training job, as exports of their databases."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from convoy.deadline import Deadline
from convoy.measurement import protocol_for
from convoy.perfdb import Database
from convoy.pipeline.measure_net import measure
from convoy.pipeline.net import Net
from convoy.pipeline.observer import Observer
from convoy.pipeline.selection_input import distinct_problems
from convoy.problem import subgraph_texts
from convoy.settings import Settings

SHARED_RESERVE: Final = 0.4
"""Share of a call's time that several processes keep for gathering, building and checking."""


def measured_share(
    net: Net, settings: Settings, observer: Observer, deadline: Deadline, index: int, count: int
) -> bytes:
    """Measure one of several shares of a net's problems; what was measured, as an export of the database."""
    measuring = deadline.earlier(SHARED_RESERVE * deadline.left_s) if deadline.is_limited else deadline
    protocol = protocol_for(settings.effort, net.target.device).id
    with Database.open(settings.db) as database:
        found = measure(net, settings, database, observer, (index, count), measuring)
        # As the clock gave them: in `found` are rows that these settings rule out, without their times.
        rows = [row for key in found.rows for row in database.lookup(key, net.target.digest, protocol)]
    problems = distinct_problems(net.regions, net.copies)
    texts = subgraph_texts(p for p in problems if p.key in found.rows)
    with Database.memory() as box, tempfile.TemporaryDirectory() as folder:
        box.put(rows, texts, targets=(net.target,))
        path = Path(folder) / "share.jsonl.gz"
        box.export(path)
        return path.read_bytes()


def take_shares(settings: Settings, shares: Sequence[bytes]) -> None:
    """Put what other processes measured into the database; every row is checked."""
    with Database.open(settings.db) as database, tempfile.TemporaryDirectory() as folder:
        for index, data in enumerate(shares):
            path = Path(folder) / f"{index}.jsonl.gz"
            path.write_bytes(data)
            database.import_(path)
