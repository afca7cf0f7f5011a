"""convoy export: write a model and its plan as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from convoy.cli import inputs, kept, options
from convoy.cli.command import GOAL, OUTPUT
from convoy.cli.output import say


def export(
    model: options.Model,
    output: Annotated[
        Path, typer.Option("--out", "-o", help="The package to write, such as net.convoy.", rich_help_panel=OUTPUT)
    ],
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            help="The plan to export, as `convoy optimize --plan` wrote it; else the model is tuned.",
            rich_help_panel=GOAL,
        ),
    ] = None,
    portable: Annotated[
        bool,
        typer.Option("--portable", help="Only C kernels, so that the C runtime can run it.", rich_help_panel=GOAL),
    ] = False,
    images: options.Input = None,
    batch: options.Batch = None,
    size: options.Size = None,
    dtype: options.Dtype = "fp32",
    weights: options.Weights = None,
    trust: options.Trust = False,
    effort: options.Effort = "quick",
    time_s: options.TimeS = None,
    db: options.Db = None,
) -> None:
    """Write MODEL with its PLAN as one file that runs without the model's source: `convoy run`, `convoy.open`, libconvoy."""
    import convoy
    from convoy.plan import load as load_plan
    from convoy.zoo import preprocessing, read_info

    if plan is None:
        kept.measurements()

    options.check_output(output, "--out")
    settings = options.settings_from(effort=effort, time_s=time_s, db=db)
    found = None if plan is None else load_plan(plan)  # refuse a bad plan before the model is loaded
    module = options.load(model, weights, dtype, "cpu", trust=trust)
    wanted, info = options.image_size(size), read_info(weights)
    args = inputs.example(module, model, images, batch, wanted, dtype, "cpu", info, data_batch=1)
    known = preprocessing(model)
    with inputs.fitting(module, args):
        convoy.export(
            module, output, args, plan=found, portable=portable, settings=settings, name=model,
            normalisation=(known.mean, known.std),
        )  # fmt: skip
    say(f"{output}: {output.stat().st_size / (1 << 20):.1f} MiB")
