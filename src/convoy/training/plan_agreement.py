"""One plan for all processes of a training job: tuned in shares, gathered, chosen by the first, taken over by the others."""

from __future__ import annotations

import datetime as dt
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from convoy.deadline import Deadline
from convoy.errors import PlanError
from convoy.measurement import protocol_for
from convoy.perfdb import Database
from convoy.pipeline.measure_net import measure
from convoy.pipeline.net import Net
from convoy.pipeline.observer import Observer
from convoy.pipeline.selection_input import distinct_problems
from convoy.plan import Plan
from convoy.plan.file import from_dict, to_dict
from convoy.problem import subgraph_texts
from convoy.settings import Settings
from convoy.target import Target
from convoy.typed_torch import all_gather, new_group

PATIENCE: Final = dt.timedelta(hours=12)
"""How long a process waits for one that measures more: NCCL's own limit of ten minutes would end the job."""

SHARED_RESERVE: Final = 0.4
"""Share of a call's time that several processes keep for gathering, building and checking."""

Share = Callable[[int, int], bytes]
"""Measure one of so many shares; what was found, as a file's bytes."""


def agree_on_plan(
    tune: Callable[[list[bytes]], Plan], group: Any, target: Target, measure: Share | None = None
) -> Plan:
    """Measure in all processes, choose in the group's first, and hand the plan to the others, as text.

    Args:
        tune: makes the plan of what the others measured; called in one process only.
        group: a process group of `torch.distributed`.
        target: this process's device.
        measure: measures a share; None: the first process measures alone.

    Raises:
        PlanError: processes on different devices or software, or tuning failed in another process; in that one, whatever it
            raised.
    """
    import torch.distributed as dist

    talk = host_group(group)
    digests = [text.decode() for text in _gather(target.digest.encode(), talk)]
    if len(set(digests)) > 1:
        raise PlanError("target", digests, "the same device and software in every process")
    shares = _measured(measure, talk) if measure is not None else []
    if dist.get_rank(talk) == 0:
        text = b""
        try:
            plan = tune(shares)
            text = json.dumps(to_dict(plan)).encode()
        finally:  # others wait, whatever happens here; no text tells them that there is no plan
            _gather(text, talk)
        return plan
    text = _gather(b"", talk)[0]
    if not text:
        raise PlanError("plan", "none", "a plan from the first process", "It failed there: see its error.")
    return from_dict(json.loads(text))


def _measured(measure: Share, talk: Any) -> list[bytes]:
    """Every process's share, measured."""
    import torch.distributed as dist

    own = b""
    try:
        own = measure(dist.get_rank(talk), dist.get_world_size(talk))
    finally:
        found = _gather(own, talk)
    if not all(found):
        missing = found.index(b"")
        raise PlanError("plan", "none", "measurements from every process", f"Process {missing} failed: see its error.")
    return found


def host_group(group: Any, patience: dt.timedelta = PATIENCE) -> Any:
    """The same processes, by a group that talks through their hosts and waits for so long: by default while others tune.

    It lives as long as they do: once it is ended, the next group of the same processes takes its name, may find its addresses in
    the store, and then waits for ever or loses the connection (seen with torch 2.13).
    """
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group)
    return new_group(ranks, timeout=patience, backend="gloo", use_local_synchronization=True)


def _gather(text: bytes, talk: Any) -> list[bytes]:
    """Every process's bytes, in the order of ranks."""
    import torch.distributed as dist

    count = dist.get_world_size(talk)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
    all_gather(sizes, torch.tensor([len(text)]), group=talk)
    longest = max(int(size) for size in sizes)
    if not longest:
        return [b""] * count
    own = torch.zeros(longest, dtype=torch.uint8)
    if text:
        own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    padded = [torch.zeros(longest, dtype=torch.uint8) for _ in range(count)]
    all_gather(padded, own, group=talk)
    return [bytes(data[: int(size)].numpy()) for data, size in zip(padded, sizes, strict=True)]


def measured_share(
    net: Net, settings: Settings, observer: Observer, deadline: Deadline, index: int, count: int
) -> bytes:
    """Measure one of several shares of a net's problems; returns the rows as an export of the database."""
    measuring = deadline.earlier(SHARED_RESERVE * deadline.left_s) if deadline.is_limited else deadline
    protocol = protocol_for(settings.effort, net.target.device).id
    with Database.open(settings.db) as database:
        found = measure(net, settings, database, observer, (index, count), measuring)
        # As the clock gave them: in `found` are rows that these settings rule out, without their times.
        rows = [row for key in found.rows for row in database.measured(key, net.target.digest, protocol)]
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
