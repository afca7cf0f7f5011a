"""convoy optimize: tune a model on this machine, and say what was chosen and why."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convoy.cli import options
from convoy.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from convoy.pipeline import OptimizeResult
    from convoy.plan.plan import Plan
    from convoy.report import Summary
    from convoy.settings import Settings
    from convoy.training import TrainingResult


def optimize(
    model: options.Model,
    images: options.Input = None,
    batch: options.Batch = None,
    size: options.Size = None,
    dtype: options.Dtype = "fp32",
    numerics: options.Numerics = "as_torch",
    device: options.Device = None,
    layout: Annotated[
        str, typer.Option("--layout", help="auto, nchw or nhwc: memory formats inside the net.")
    ] = "auto",
    memory_budget: Annotated[
        str | None, typer.Option("--memory-budget", help="Most bytes for values, workspace and packed weights: 256MiB.")
    ] = None,
    tuning_memory: Annotated[
        str | None, typer.Option("--tuning-memory", help="Most bytes of a GPU that tuning may take: 2GiB.")
    ] = None,
    effort: options.Effort = "quick",
    tune_seconds: Annotated[
        float | None, typer.Option("--tune-seconds", help="Measure at most so long, and predict the rest.")
    ] = None,
    solver: Annotated[str, typer.Option("--solver", help="exact, greedy, single or baseline.")] = "exact",
    engine: Annotated[
        list[str] | None, typer.Option("--engine", help="Only this engine beside the baseline; repeatable.")
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Only candidates that give the same bits in every run.")
    ] = False,
    streams: Annotated[
        int | None, typer.Option("--streams", help="Most CUDA streams to try; 1 keeps the net serial.")
    ] = None,
    train: Annotated[
        bool, typer.Option("--train", help="Tune a training step: forward and backward pass, random labels.")
    ] = False,
    amp: Annotated[str | None, typer.Option("--amp", help="With --train: bf16 or fp16, run under autocast.")] = None,
    weights: options.Weights = None,
    trust: options.Trust = False,
    plan: Annotated[Path | None, typer.Option("--plan", help="Write the plan to this file.")] = None,
    report: Annotated[Path | None, typer.Option("--report", help="Write the HTML report to this file.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write everything found out to this file.")] = None,
    timeline: Annotated[
        Path | None, typer.Option("--timeline", help="Write when each step runs, for Perfetto, to this file.")
    ] = None,
    db: options.Db = None,
) -> None:
    """Tune MODEL on this machine: measure every engine for every layer, choose the best set, check it, report it."""
    settings = options.settings_from(
        numerics=numerics,
        layout=layout,
        memory_budget=memory_budget,
        tuning_memory=tuning_memory,
        effort=effort,
        tune_s=tune_seconds,
        solver=solver,
        only_engines=tuple(engine) if engine else None,
        deterministic=deterministic,
        streams=streams,
        db=db,
    )
    if amp is not None and not train:
        raise InputError("--amp", amp, "nothing without --train")
    named = {"plan": plan, "report": report, "json": json_path, "timeline": timeline}
    options.check_outputs({f"--{name}": path for name, path in named.items()})
    where = options.pick_device(device)
    module = options.load(model, weights, dtype, where, trust=trust)
    args = options.example(module, model, images, batch, size, dtype, where)

    from convoy.perfdb import default_path
    from convoy.report import print_summary

    with options.fitting(module, args):
        result = _tune(module, args, model, settings, train, amp)
    summary = _with_weights(result.summary, weights)
    files = {name: path for name, path in named.items() if path is not None}
    _write(result.plan, summary, files)
    print_summary(summary, {"database": settings.db or default_path(), **files})


def _tune(
    module: nn.Module, args: tuple[Any, ...], name: str, settings: Settings, train: bool, amp: str | None
) -> OptimizeResult | TrainingResult:
    from convoy.cli.progress import Bar
    from convoy.pipeline import optimize_model

    with Bar() as bar:
        if train:
            return options.train(module, args, name, settings, bar, amp)
        return optimize_model(module, args, name=name, settings=settings, observer=bar)


def _with_weights(summary: Summary, weights: str | None) -> Summary:
    """With what is known of the weights, such as how they were pruned."""
    from convoy.prune import describe_weights

    said = describe_weights(weights)
    return replace(summary, notes=(said, *summary.notes)) if said else summary


def _write(plan: Plan, summary: Summary, files: Mapping[str, Path]) -> None:
    """Write what was asked for: plan, report, json, timeline."""
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
