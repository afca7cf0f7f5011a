"""convoy export: write a model and its plan as one file."""

from __future__ import annotations

from pathlib import Path

from convoy.cli.options import export as given
from convoy.cli.options import inputs, shared, values
from convoy.cli.output import kept
from convoy.cli.output.files import check_output
from convoy.cli.output.lines import say
from convoy.errors import InputError


def export(
    model: shared.Model,
    output: given.Out,
    plan: given.Plan = None,
    portable: given.Portable = False,
    triton: given.Triton = None,
    images: shared.Input = None,
    batch: shared.Batch = None,
    batches: given.Batches = None,
    size: shared.Size = None,
    dtype: shared.OwnDtype = None,
    device: given.Device = "cpu",
    weights: shared.Weights = None,
    trust: shared.Trust = False,
    effort: shared.Effort = "quick",
    time_s: shared.TimeS = None,
    db: shared.Db = None,
) -> None:
    """Write MODEL with its PLAN as one file that runs without the model's source: `convoy run`, `convoy.open`, libconvoy."""
    import convoy
    from convoy.plan import load as load_plan
    from convoy.zoo import preprocessing, read_info

    if plan is None:
        kept.measurements()

    check_output(output, "--out")
    sizes = batch_sizes(batches, plan, batch)
    if triton is not None and (triton / output.stem).exists():
        raise InputError("--triton", str(triton / output.stem), "a repository without a model of this name")
    settings = values.settings_from(effort=effort, time_s=time_s, db=db, progress=True)
    where = values.pick_device(device)
    found = None if plan is None else load_plan(plan)  # refuse a bad plan before the model is loaded
    module = values.load(model, weights, dtype, where, trust=trust)
    wanted, info = values.image_size(size), read_info(weights)
    args, *more = [
        inputs.example(module, model, images, count, wanted, dtype, where, info, data_batch=1) for count in sizes
    ]
    known = preprocessing(model)
    with inputs.fitting(module, args):
        convoy.export(
            module, output, args, more_args=more, plan=found, portable=portable, settings=settings, name=model,
            normalisation=(known.mean, known.std),
        )  # fmt: skip
    say(f"{output}: {output.stat().st_size / (1 << 20):.1f} MiB")
    if triton is not None:
        from convoy.package.triton_repository import write_triton_repository

        say(f"{write_triton_repository(output, triton)}: a model for Triton Inference Server's Python backend")


def batch_sizes(batches: str | None, plan: Path | None, batch: int | None) -> list[int | None]:
    """The batch sizes of the programs: of `--batches`, or the one of `--batch`."""
    if batches is None:
        return [batch]
    for name, value in (("--batch", batch), ("--plan", plan)):
        if value is not None:
            raise InputError("--batches", batches, f"nothing with {name}, which gives one batch size")
    expected = "different batch sizes, separated by commas: 1,8,32"
    found = values.positive_integers("--batches", batches, expected)
    if len(set(found)) != len(found):
        raise InputError("--batches", batches, expected)
    return list(found)
