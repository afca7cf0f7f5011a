"""convoy run: replay a saved plan on inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from convoy.cli import interrupt, options
from convoy.cli.output import say


def run(
    model: options.Model,
    plan: Annotated[Path, typer.Option("--plan", help="The plan to run, as `convoy optimize --plan` wrote it.")],
    images: options.Input = None,
    batch: options.Batch = None,
    size: options.Size = None,
    dtype: options.Dtype = "fp32",
    device: options.Device = None,
    weights: options.Weights = None,
    trust: options.Trust = False,
) -> None:
    """Run MODEL by a saved PLAN, measuring nothing: print the best class of each image and the time of a call."""
    from convoy.plan import load as load_plan

    interrupt.keeps(lambda: "nothing was written")

    load_plan(plan)  # refuse a bad plan before the model is loaded
    where = options.pick_device(device)
    module = options.load(model, weights, dtype, where, trust=trust)
    args = options.example(module, model, images, batch, size, dtype, where)

    import torch

    import convoy
    from convoy.pipeline.check.end_to_end import float_outputs, interleave

    with options.fitting(module, args):
        fast = convoy.load(module, plan, args)
    with torch.no_grad():
        outputs = float_outputs(fast(*args))
        timed = interleave({"convoy": lambda: fast(*args)}, cuda=where == "cuda")["convoy"]
    for index, row in enumerate(outputs[0].flatten(1) if outputs[0].dim() > 1 else outputs[0][None]):
        say(f"input {index}: largest output {int(row.argmax())} ({float(row.max()):.4g})")
    say(f"{timed.median_ms:.3f} ms +- {timed.spread_ms:.3f}")
