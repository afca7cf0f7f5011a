"""convoy optimize: tune a model on this machine, and say what was chosen and why."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from convoy.cli import options
from convoy.errors import InputError


def optimize(
    model: options.Model,
    images: options.Input = None,
    batch: options.Batch = None,
    size: options.Size = None,
    dtype: options.Dtype = "fp32",
    numerics: Annotated[
        str, typer.Option("--numerics", help="strict, as_torch or half: which rounding is allowed.")
    ] = "as_torch",
    device: options.Device = None,
    layout: Annotated[
        str, typer.Option("--layout", help="auto, nchw or nhwc: memory formats inside the net.")
    ] = "auto",
    memory_budget: Annotated[
        str | None, typer.Option("--memory-budget", help="Most bytes for values, workspace and packed weights: 256MiB.")
    ] = None,
    effort: Annotated[str, typer.Option("--effort", help="none (database only), quick or full.")] = "quick",
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
        effort=effort,
        solver=solver,
        only_engines=tuple(engine) if engine else None,
        deterministic=deterministic,
        streams=streams,
        db=db,
    )
    if amp is not None and not train:
        raise InputError("--amp", amp, "nothing without --train")
    options.check_outputs({"--plan": plan, "--report": report, "--json": json_path, "--timeline": timeline})
    where = options.pick_device(device)
    module = options.load(model, weights, dtype, where)
    args = options.example(module, model, images, batch, size, dtype, where)

    from convoy.cli.progress import Bar
    from convoy.perfdb import default_path
    from convoy.pipeline import optimize_model
    from convoy.plan import save
    from convoy.plan.file import write_text
    from convoy.plan.timeline import chrome_trace, planned
    from convoy.prune import describe_weights
    from convoy.report import print_summary, write_html, write_json

    with Bar() as bar, options.fitting(module, args):
        if train:
            result = options.train(module, args, model, settings, bar, amp)
        else:
            result = optimize_model(module, args, name=model, settings=settings, observer=bar)
    summary = result.summary
    if said := describe_weights(weights):
        summary = replace(summary, notes=(said, *summary.notes))
    if plan is not None:
        save(result.plan, plan)
    if report is not None:
        write_html(summary, report)
    if json_path is not None:
        write_json(summary, json_path)
    if timeline is not None:
        trace = chrome_trace({"planned": planned(result.plan.steps), "measured": summary.timeline})
        write_text(timeline, json.dumps(trace) + "\n", "timeline")
    files = {
        "database": settings.db or default_path(),
        "plan": plan,
        "report": report,
        "json": json_path,
        "timeline": timeline,
    }
    print_summary(summary, {name: path for name, path in files.items() if path is not None})
