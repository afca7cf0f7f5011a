"""One plan, several schedules: on how many streams it runs is decided by the clock, not by the model."""

from __future__ import annotations

import dataclasses

from convoy.pipeline import verdict
from convoy.pipeline.stages import Net
from convoy.plan import Plan, critical_us, parallel
from convoy.program import PackedSteps, Program, build_program
from convoy.settings import Settings

WORTHWHILE = 0.97
"""Share of the serial time that the critical path must stay under for more streams to be tried: less is lost to events."""


def build_fastest(plan: Plan, net: Net, settings: Settings) -> tuple[Plan, Program]:
    """Build the plan on one stream and, on a GPU, on several; keep what the clock says.

    Under a memory budget there is one stream: values that live side by side, and a workspace for each stream, were not counted.

    Returns:
        The plan with its steps' streams, and its program.
    """
    packed: PackedSteps = {}

    def build(candidate: Plan) -> Program:
        return build_program(candidate, net.captured, net.regions_by_nodes, net.target, settings, packed)

    serial = build(plan)
    longest = critical_us(plan.steps)
    if (
        net.target.device != "cuda"
        or settings.streams < 2
        or longest > WORTHWHILE * sum(s.median_us for s in plan.steps)
    ):
        return plan, serial
    built = {1: (plan, serial)}
    for streams in range(2, settings.streams + 1):
        steps = parallel(plan.steps, streams)
        if len({step.stream for step in steps}) < streams:
            break  # there is not so much independent work
        spread = dataclasses.replace(plan, steps=steps)
        built[streams] = (spread, build(spread))
    timed = verdict.interleave(
        {str(streams): program.runnable.replay for streams, (_, program) in built.items()},  # type: ignore[union-attr]
        cuda=True,
    )
    best = min(timed.values(), key=lambda figures: figures.median_ms)
    if not verdict.is_faster(best, timed["1"]):
        best = timed["1"]
    chosen, program = built[int(best.name)]
    words = ", ".join(f"{name} {figures.median_ms:.3f} ms" for name, figures in timed.items())
    note = (
        f"streams: {best.name} (measured by number of streams: {words}; the critical path alone {longest / 1e3:.3f} ms)"
    )
    chosen = dataclasses.replace(chosen, notes=(*chosen.notes, note))
    return chosen, Program(chosen, program.captured, program.runnable, program.resident_bytes)
