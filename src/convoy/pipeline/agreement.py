"""One plan for all processes of a training job: the first tunes, the others take over what it found."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from convoy.errors import PlanError
from convoy.plan import Plan
from convoy.plan.file import from_dict, to_dict
from convoy.target import Target


def agree(tune: Callable[[], Plan], group: Any, target: Target) -> Plan:
    """Tune in the group's first process and hand the plan to the others, as text.

    Args:
        tune: makes the plan; called in one process only.
        group: a process group of `torch.distributed`.
        target: this process's device.

    Raises:
        PlanError: tuning failed in the first process; there, whatever it raised.
    """
    import torch.distributed as dist

    device = torch.device("cuda", torch.cuda.current_device()) if target.device == "cuda" else torch.device("cpu")
    first = dist.get_global_rank(group, 0)
    if dist.get_rank(group) == 0:
        text = b""
        try:
            plan = tune()
            text = json.dumps(to_dict(plan)).encode()
        finally:  # others wait, whatever happens here; no text tells them that there is no plan
            _send(text, first, group, device)
        return plan
    text = _receive(first, group, device)
    if not text:
        raise PlanError("plan", "none", "a plan from the first process", "It failed there: see its error.")
    return from_dict(json.loads(text))


def _send(text: bytes, first: int, group: Any, device: torch.device) -> None:
    import torch.distributed as dist

    dist.broadcast(torch.tensor([len(text)], device=device), first, group=group)
    if text:
        dist.broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device), first, group=group)


def _receive(first: int, group: Any, device: torch.device) -> bytes:
    import torch.distributed as dist

    size = torch.zeros(1, dtype=torch.int64, device=device)
    dist.broadcast(size, first, group=group)
    if not int(size):
        return b""
    data = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, first, group=group)
    return bytes(data.cpu().tolist())
