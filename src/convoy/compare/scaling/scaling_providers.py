"""Providers of data-parallel training: PyTorch's DistributedDataParallel, and Convoy's step in the same process group.

The learning rate is 0, so that parameters stay equal on all processes although some rounds leave the gradients apart: the kernels
are those of training.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from convoy.compare.scaling.scaling_clocks import Step, peak_bytes
from convoy.compare.scaling.scaling_ddp import compiled_ddp, ddp
from convoy.compare.scaling.scaling_jobs import BASELINE_KEPT, FACTORS
from convoy.compare.scaling.scaling_setup import ProviderSteps, Stage, TrainingSetup, loss_of
from convoy.errors import ConvoyError, PlanError
from convoy.settings import Settings


def _convoy(setup: TrainingSetup, request: Mapping[str, Any], stage: Stage) -> ProviderSteps:
    """Convoy's step in the process group, and the same plan without it."""
    import convoy

    settings = Settings(effort=request["effort"], db=Path(request["db"]) if request["db"] else None)
    devices = [setup.device] if setup.device.type == "cuda" else None
    batch = (setup.x, setup.target)
    common: dict[str, Any] = {
        "amp": setup.amp,
        "gradients": setup.gradients,
        "scaler": setup.scaler(),
        "settings": settings,
        "name": request["model"],
    }
    notes: list[str] = []

    def made(plan: Path | None) -> Any:
        model = DistributedDataParallel(setup.model, device_ids=devices)
        optimizer = setup.optimizer()
        return convoy.training_step(model, loss_of, optimizer, batch, plan=plan, **common)

    kept = _plan_file(setup, request)
    known = kept is not None and kept.exists()
    try:
        together = made(kept if known else None)
    except PlanError as error:
        if not known:
            raise
        known = False
        notes.append(f"the plan of {kept} cannot be replayed: {error}")
        together = made(None)
    if kept is not None and not known and dist.get_rank() == 0:
        together.save(kept)
    steps: dict[str, Step] = {"step": lambda: together(*batch)}
    most = peak_bytes(steps["step"], setup.device)  # there is no second step yet, which has an arena of its own
    together.notes.extend(notes)
    notes = together.notes  # its own list, which grows while it runs: where a step cannot be captured, it says so then
    stage("preparing convoy without all-reduce")
    try:
        with tempfile.TemporaryDirectory() as folder:
            together.save(Path(folder) / "plan.json")
            plan = Path(folder) / "plan.json"
            alone = convoy.training_step(setup.model, loss_of, setup.optimizer(), batch, plan=plan, **common)
        steps["compute"] = lambda: alone(*batch)
    except ConvoyError as error:
        notes.append(f"no time without all-reduce: {error}")

    def fed() -> None:
        setup.refill()
        together(*batch)

    effort = "a plan from a file" if known else f"effort {request['effort']}"
    setting = f"channels_last, training_step, {effort}"
    setting += f", gradients={setup.gradients}" if setup.gradients else ""
    setting += f", {BASELINE_KEPT}" if together.plan.baseline else ""
    factored = together.work.factored
    sent = None if factored is None else factored.sent_bytes
    return ProviderSteps({**steps, "input": fed}, setting, most, notes, sent)


def _plan_file(setup: TrainingSetup, request: Mapping[str, Any]) -> Path | None:
    """The file of the plan for this model, batch and dtype, where the request names a folder of plans.

    A step that gathers factors has a plan of its own, which keeps their products apart.

    All processes look for it before the first one writes it: that one has met the others in `training_step` by then.
    """
    if not request["plans"]:
        return None
    model = re.sub(r"[^A-Za-z0-9_.]+", "-", str(request["model"]))
    apart = f"-{FACTORS}" if setup.gradients == FACTORS else ""
    return Path(request["plans"]) / f"{model}-{setup.x.shape[0]}-{request['dtype']}{apart}.plan.json"


PROVIDERS: Final[dict[str, Callable[[TrainingSetup, Mapping[str, Any], Stage], ProviderSteps]]] = {
    "torch.ddp": ddp,
    "torch.ddp.compiled": compiled_ddp,
    "convoy": _convoy,
}
"""By name: the function that prepares training."""
