"""convoy optimize: tune a model on this machine, and report the choice and its reasons."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convoy.cli import interrupt
from convoy.cli.options import inputs, shared, values
from convoy.cli.options import optimize as given
from convoy.cli.output import kept
from convoy.cli.output.files import check_outputs
from convoy.deadline import Deadline
from convoy.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from convoy.pipeline import OptimizeResult
    from convoy.plan.plan import Plan
    from convoy.report import Summary
    from convoy.settings import Settings
    from convoy.training import TrainingResult


def optimize(
    model: shared.Model,
    images: shared.Input = None,
    batch: shared.Batch = None,
    size: shared.Size = None,
    dtype: shared.OwnDtype = None,
    device: shared.Device = None,
    weights: shared.Weights = None,
    trust: shared.Trust = False,
    numerics: shared.Numerics = "as_torch",
    layout: given.Layout = "auto",
    memory_budget_bytes: given.MemoryBudgetBytes = None,
    deterministic: given.Deterministic = False,
    train: given.Train = False,
    amp: given.Amp = None,
    effort: shared.Effort = "quick",
    time_s: shared.TimeS = None,
    tuning_memory_bytes: given.TuningMemoryBytes = None,
    timeout_s: given.TimeoutS = None,
    db: shared.Db = None,
    only_engines: shared.OnlyEngines = None,
    deny_engines: given.DenyEngines = None,
    solver: given.Solver = "exact",
    streams: given.Streams = None,
    stream_memory: given.StreamMemory = None,
    plan: given.PlanFile = None,
    report: shared.Report = None,
    json_path: given.JsonFile = None,
    timeline: given.TimelineFile = None,
    profile: given.ProfileFile = None,
) -> None:
    """Tune MODEL on this machine: measure every engine for every layer, choose the best set, check it, report it."""
    settings = values.settings_from(
        numerics=numerics, layout=layout, memory_budget_bytes=memory_budget_bytes, deterministic=deterministic,
        effort=effort, time_s=time_s, tuning_memory_bytes=tuning_memory_bytes, timeout_s=timeout_s, db=db,
        only_engines=only_engines, deny_engines=deny_engines, solver=solver, streams=streams,
        stream_memory=stream_memory, profile=profile,
    )  # fmt: skip
    deadline = Deadline(settings.time_s)  # of the whole command: loading the model counts
    if amp is not None and not train:
        raise InputError("--amp", amp, "nothing without --train")
    named = {"plan": plan, "report": report, "json": json_path, "timeline": timeline}
    check_outputs({f"--{name}": path for name, path in {**named, "profile": profile}.items()})
    where = values.pick_device(device)
    module = values.load(model, weights, dtype, where, trust=trust)

    from convoy.perfdb import default_path
    from convoy.report import print_summary
    from convoy.zoo import read_info

    wanted, info = values.image_size(size), read_info(weights)
    args = inputs.example(module, model, images, batch, wanted, dtype, where, info, data_batch=1)

    with inputs.fitting(module, args):
        result = _tune(module, args, model, settings, train, amp, deadline)
    assert result.summary is not None  # only a replayed plan has none
    summary = _with_weights(result.summary, weights)
    files = {name: path for name, path in named.items() if path is not None}
    _write(replace(result.plan, weights=weights or ""), summary, files)
    print_summary(summary, {"database": settings.db or default_path(), **files})


def _tune(
    module: nn.Module,
    args: tuple[Any, ...],
    name: str,
    settings: Settings,
    train: bool,
    amp: str | None,
    deadline: Deadline,
) -> OptimizeResult | TrainingResult:
    from convoy.cli.output.progress import Bar
    from convoy.pipeline import optimize_model

    kept.measurements()
    with Bar() as bar, interrupt.stopped_by(deadline.request_stop):
        if train:
            return values.train(module, args, name, settings, bar, amp, deadline)
        return optimize_model(module, args, name=name, settings=settings, observer=bar, deadline=deadline)


def _with_weights(summary: Summary, weights: str | None) -> Summary:
    """Add a note about the weights, such as how they were pruned."""
    from convoy.prune import describe_weights

    said = describe_weights(weights)
    return replace(summary, notes=(said, *summary.notes)) if said else summary


def _write(plan: Plan, summary: Summary, files: Mapping[str, Path]) -> None:
    """Write the requested files: plan, report, json, timeline."""
    from convoy.plan import save
    from convoy.plan.file import write_text
    from convoy.report import write_html, write_json
    from convoy.schedule.timeline import chrome_trace, planned

    if "plan" in files:
        save(plan, files["plan"])
    if "report" in files:
        write_html(summary, files["report"])
    if "json" in files:
        write_json(summary, files["json"])
    if "timeline" in files:
        trace = chrome_trace({"planned": planned(plan.steps), "measured": summary.timeline})
        write_text(files["timeline"], json.dumps(trace) + "\n", "timeline")
