"""Convoy's training step: tuned, replayed from a plan, and in the stages of the ablation."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.training.training_case import Case, Step, loss_of, optimizer_of

import convoy
from convoy import plan as plans
from convoy.pipeline.measure_net import CUT
from convoy.plan import Plan
from convoy.schedule import parallel_steps
from convoy.training import tune_training_step
from convoy.training.step_program import StepOptions


@dataclass(frozen=True, slots=True)
class Run:
    """How a run is made.

    Attributes:
        peers: words of the peers that are wanted.
        effort: of Convoy's tuning.
        db: Convoy's database; None: the user's.
        end: when to be done, by `time.monotonic`.
        ablation: whether to time Convoy's plan in its stages too.
        streams: most streams.
        time_s: what measuring candidates may take.
    """

    peers: tuple[str, ...]
    effort: str
    db: Path | None
    end: float
    ablation: bool
    streams: int
    time_s: float

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.end - time.monotonic()

    def settings(self, **changes: Any) -> convoy.Settings:
        """Of Convoy."""
        return convoy.Settings(effort=convoy.Effort(self.effort), streams=self.streams, db=self.db, **changes)


LEAST_S = 45.0
"""Seconds that capturing, checking and timing want; a peer that compiles is not begun with less."""


def tuned(case: Case, run: Run, **changes: Any) -> tuple[Step, Plan, str]:
    """Convoy's step, its plan, and what tuning cost; where time is up, from what was measured until then."""
    model, (x, y) = case.model(), case.data()
    start = time.perf_counter()

    optimizer, options = optimizer_of(model, case.device), StepOptions(amp=case.amp)
    settings = run.settings(time_s=max(1.0, min(run.time_s, run.left_s - LEAST_S)), **changes)
    result = tune_training_step(model, loss_of, optimizer, (x, y), options=options, settings=settings, name=case.net)
    step = result.step
    cut = " cut" if any(CUT in line for line in step.notes) else ""
    note = f"tuning_s={time.perf_counter() - start:.0f}{cut}"
    note += " baseline" if step.plan.baseline else f" streams={streams_of(step.plan)}"
    for line in step.notes:
        if line.startswith(("streams:", "the step")) or "baseline" in line or CUT in line:
            print(f"    {line}", flush=True)
    return lambda: step(x, y), step.plan, note


def replayed(case: Case, run: Run, plan: Plan) -> Step:
    """Convoy's step by a plan that is there, with one update at its end."""
    model, (x, y) = case.model(), case.data()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plans.save(plan, path)
        step = tune_training_step(
            model,
            loss_of,
            optimizer_of(model, case.device),
            (x, y),
            options=StepOptions(amp=case.amp, early_updates=False),
            plan=path,
            settings=run.settings(),
        ).step
    return lambda: step(x, y)


def streams_of(plan: Plan) -> int:
    """Streams that a plan runs on."""
    return 1 + max((step.stream for step in plan.steps), default=0)


def stages(plan: Plan) -> dict[str, Plan]:
    """The same choice on one stream, and spread as if launches did not slow one another."""
    found = {"convoy.serial": dataclasses.replace(plan, steps=parallel_steps(plan.steps, 1))}
    if streams_of(plan) > 1:
        spread = parallel_steps(found["convoy.serial"].steps, streams_of(plan))
        found["convoy.streams"] = dataclasses.replace(plan, steps=spread)
    return found
