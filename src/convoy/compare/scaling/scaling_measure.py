"""One process's part in measuring data-parallel training: steps with and without all-reduce, input, launches, the link.

All processes time the same rounds; the slowest counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from convoy.compare.frameworks.torch_model import set_flags
from convoy.compare.scaling.scaling_clocks import (
    WARM_UPS,
    Step,
    collectives,
    launches,
    link,
    slowest_s,
    steps_a_round,
    wait,
)
from convoy.compare.scaling.scaling_jobs import MOST_REPEATS, parts_of
from convoy.compare.scaling.scaling_providers import PROVIDERS
from convoy.compare.scaling.scaling_rows import NOISY, relative_spread
from convoy.compare.scaling.scaling_setup import Stage, TrainingSetup


def measure(
    job: Mapping[str, Any], device: torch.device, stage: Stage, before_timing: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Time everything of one job; the same on all processes, of which the first one's answer counts.

    Args:
        job: `Job.to_dict()`.
        device: this process's own.
        stage: called with the name of each stage.
        before_timing: called when the step is prepared; returns when it may be timed.
    """
    request = job["request"]
    stage("building the model")
    set_flags(device.type)
    provider, gradients = parts_of(job["provider"])
    setup = TrainingSetup.of(request, int(job["batch"]), device, gradients)
    stage(f"preparing {job['provider']}")
    trained = PROVIDERS[provider](setup, request, stage)
    wait(device)
    before_timing()
    stage("warming up")
    for step in trained.steps.values():
        for _ in range(WARM_UPS):
            step()
    wait(device)
    counts = {name: steps_a_round(step, float(request["round_s"]), device) for name, step in trained.steps.items()}
    rounds = _quiet_rounds(lambda number: _turns(trained.steps, counts, number, device, stage), int(request["rounds"]))
    sent = trained.sent_bytes or float(setup.gradient_bytes)
    values = {"gradient_bytes": sent}
    stage("asking the link")
    values |= link(int(sent), device)
    stage("launches")
    values |= launches(trained.steps.get("compute", trained.steps["step"]), device)
    stage("watching the collectives")
    values |= collectives(trained.steps["step"], device, able="launch_ms" in values)
    if trained.peak_bytes is not None:
        values["peak_memory_bytes"] = trained.peak_bytes
    return {
        "rounds": rounds,
        "values": values,
        "setting": trained.setting,
        "notes": [str(note) for note in trained.notes],
        "backend": dist.get_backend(),
    }


def _turns(
    steps: Mapping[str, Step], counts: Mapping[str, int], number: int, device: torch.device, stage: Stage
) -> dict[str, float]:
    """Seconds a step of each kind, one after the other."""
    stage(f"round {number}")
    return {name: slowest_s(step, counts[name], device) for name, step in steps.items()}


def _quiet_rounds(turns: Callable[[int], Mapping[str, float]], count: int) -> dict[str, list[float]]:
    """Rounds of all kinds; noisy ones are taken again, and that repeat is kept whose noisiest kind is the quietest.

    Repeats are kept whole: kinds are compared round by round, and rounds of two repeats have nothing to do with each other. All
    processes see the same figures, those of the slowest, and so take as many.
    """
    best: dict[str, list[float]] = {}
    least = math.inf
    for _ in range(MOST_REPEATS + 1):
        taken = [turns(number) for number in range(count)]
        repeat = {name: [one[name] for one in taken] for name in taken[0]}
        noise = max(relative_spread(values) for values in repeat.values())
        if noise < least:
            best, least = repeat, noise
        if least <= NOISY:
            break
    return best
