"""convoy run: replay a saved plan on inputs, beside stock PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convoy.cli import interrupt
from convoy.cli.command_parts.classify import classified, say_classes, say_result
from convoy.cli.command_parts.run_package import run_package
from convoy.cli.command_parts.run_result import RunResult, largest_outputs, say_json, say_outputs
from convoy.cli.options import inputs, shared, values
from convoy.cli.options import run as given
from convoy.cli.output.lines import say
from convoy.errors import InputError, unknown_name

if TYPE_CHECKING:
    import torch
    from torch import nn

    from convoy.cli.output.progress import Bar
    from convoy.pipeline.check.end_to_end import Latency
    from convoy.plan.plan import Plan
    from convoy.problem import TensorSpec
    from convoy.zoo import Dataset, WeightsInfo
    from convoy.zoo.image_size import ImageSize


def run(
    model: shared.Model,
    plan: given.Plan = None,
    images: shared.Input = None,
    data: given.Data = None,
    split: given.Split = None,
    limit: given.Images = None,
    batch: given.Batch = None,
    size: given.Size = None,
    dtype: given.Dtype = None,
    device: shared.Device = None,
    weights: shared.Weights = None,
    trust: shared.Trust = False,
    signers: shared.Signers = None,
    as_json: given.Json = False,
) -> None:
    """Run MODEL by a saved PLAN, measuring nothing: the class of each image, and PyTorch and Convoy side by side.

    A .convoy file has a plan of its own.
    """
    interrupt.keeps(lambda: "nothing was written")
    if model.endswith(".convoy"):
        own = {"--plan": plan, "--data": data, "--split": split, "--images": limit, "--batch": batch, "--size": size}
        others = {**own, "--dtype": dtype, "--weights": weights, "--device": device}
        show(run_package(model, images, others, trust=trust, signers=signers), as_json)
        return
    values.check_no_signers(signers)
    if plan is None:
        raise InputError("--plan", None, "a plan", "Write one with `convoy optimize --plan`, or run a .convoy file.")

    from convoy.plan import load as load_plan

    check_words(images, data, split, limit)
    if batch is not None and batch < 1:
        raise InputError("--batch", batch, "an integer of at least 1")
    saved = load_plan(plan)  # refuse a bad plan before the model is loaded
    spec = image_of(saved)
    kind = dtype or (None if spec is None else spec.dtype)
    if spec is not None and kind != spec.dtype:
        raise InputError("--dtype", kind, f"the plan's, {spec.dtype}", "Tune the model for another dtype.")
    wanted = values.image_size(size) or size_of(spec)
    where = values.pick_device(device)
    module = values.load(model, weights, kind, where, trust=trust)

    from convoy.cli.output.progress import Bar
    from convoy.zoo import own_dtype, read_info

    info = read_info(weights)
    kind = kind or own_dtype(module)
    if images is None and data is None:
        own = getattr(module, "example_input_array", None) is not None  # which a program has that takes other inputs
        count, wanted = (batch, values.image_size(size)) if own else (batch or batch_of(spec), wanted)
        args = inputs.example(module, model, None, count, wanted, kind, where, info)
        show(run_once(model, module, (saved, plan), args), as_json)
        return
    count = batch or batch_of(spec) or 1
    with Bar() as bar:
        found, source = opened(module, model, info, (images, data, split, limit), wanted, where, bar)
        result = run_images(module, model, (saved, plan), (found, source, count), (where, kind), weights, bar)
    show(result, as_json)


def show(result: RunResult, as_json: bool) -> None:
    """Print the classes, accuracies and times, or the largest outputs and times; or all as JSON."""
    if as_json:
        say_json(result)
    elif not result.images:
        say_outputs(result)
    else:
        say_classes(result.images, result.class_names)
        say_result(result.images, result.latencies, result.source or "", result.batch)
        if result.baseline:
            say("the plan is PyTorch's own: tuning found nothing faster")


def check_words(images: list[Path] | None, data: str | None, split: str | None, limit: int | None) -> None:
    """Refuse options that do not go together."""
    if images is not None and data is not None:
        raise InputError("--input", str(images[0]), "nothing with --data", "Give labelled images, or others.")
    for name, value in (("--split", split), ("--images", limit)):
        if value is not None and data is None:
            raise InputError(name, value, "nothing without --data")
    if split not in (None, "train", "test", "all"):
        raise unknown_name("--split", split, ("test", "train", "all"))


def image_of(plan: Plan) -> TensorSpec | None:
    """The plan's input, where it is one batch of images."""
    from convoy.problem import TensorSpec

    spec = TensorSpec.parse(plan.inputs[0]) if len(plan.inputs) == 1 else None
    return spec if spec is not None and len(spec.shape) == 4 else None


def batch_of(spec: TensorSpec | None) -> int | None:
    """Images in a call of the plan."""
    return spec.shape[0] if spec is not None else None


def size_of(spec: TensorSpec | None) -> ImageSize | None:
    """Size of the plan's images."""
    if spec is None:
        return None
    height, width = spec.shape[2:]
    return height if height == width else (height, width)


def run_once(name: str, module: nn.Module, plan: tuple[Plan, Path], args: tuple[Any, ...]) -> RunResult:
    """Run the plan on an example: the largest outputs and both times."""
    import torch

    from convoy.pipeline.check.end_to_end import float_outputs

    with inputs.fitting(module, args):
        fast = values.load_plan(module, plan[1], args)
    with torch.no_grad():
        outputs = largest_outputs(float_outputs(fast(*args))[:1])
    return RunResult(name, None, len(outputs), plan[0].baseline, timed(module, fast, args), outputs=outputs)


def timed(module: nn.Module, fast: nn.Module, args: tuple[Any, ...]) -> tuple[Latency, Latency]:
    """Time of a call of the stock model and of the plan, taken in turn."""
    import torch

    from convoy.pipeline.check.end_to_end import interleave

    with torch.no_grad():
        is_cuda = any(isinstance(arg, torch.Tensor) and arg.is_cuda for arg in args)
        found = interleave({"PyTorch": lambda: module(*args), "Convoy": lambda: fast(*args)}, cuda=is_cuda)
    return found["PyTorch"], found["Convoy"]


def opened(
    module: nn.Module,
    model: str,
    info: WeightsInfo,
    words: tuple[list[Path] | None, str | None, str | None, int | None],
    size: ImageSize | None,
    device: str,
    bar: Bar,
) -> tuple[Dataset, str]:
    """The images, and where they come from in words; every file is checked.

    Labels are left out, with a line that says so, for a folder without class folders.
    """
    from convoy.cli.command_parts.labelled_data import checked, reading
    from convoy.zoo import has_test_images, own_splits
    from convoy.zoo.unlabelled import has_classes, unlabelled

    images, data, split, limit = words
    read_for = reading(module, model, info, size, device)
    if data is not None and Path(data).is_dir() and not has_classes(Path(data)):
        bar.tell(f"{data} has no class folders: its images have no labels, and there is no accuracy")
        images, data = [Path(data)], None
    if data is None:
        paths = images or []
        found = replace(unlabelled(paths, read_for.preprocessing), class_names=info.classes)
        return checked(found, bar), ", ".join(map(str, paths))
    known = info.was_trained_on(data)
    chosen = split or ("test" if own_splits(data) or (known and has_test_images(data)) else "all")
    held_out = "every tenth image of each class; the weights were trained on the others"
    remark = {"test": f" ({held_out})" if known else " (test images)", "train": " (training images)", "all": ""}[chosen]
    if known and chosen != "test":
        remark = " (the weights were trained on them)"
    return read_for.open(data, chosen, limit, bar), f"{data}{remark}"


def run_images(
    module: nn.Module,
    model: str,
    plan: tuple[Plan, Path],
    images: tuple[Dataset, str, int],
    place: tuple[str, str],
    weights: str | None,
    bar: Bar,
) -> RunResult:
    """Run stock PyTorch and the plan on all images: classes, accuracies and times."""
    from convoy.zoo import class_names_of, parse_dtype

    found, source, batch = images
    device, dtype = place[0], parse_dtype(place[1])
    example = first_batch(found, batch).to(device, dtype)
    bar("loading the plan", 0, 0)
    with inputs.fitting(module, (example,)):
        fast = values.load_plan(module, plan[1], (example,))
    rows = classified(module, fast, found, batch, (device, dtype), bar)
    bar("timing", 0, 0)
    latencies = timed(module, fast, (example,))
    bar.pause()
    names = tuple(found.class_names or class_names_of(model, weights))
    return RunResult(model, source, batch, plan[0].baseline, latencies, tuple(rows), names)


def first_batch(images: Dataset, batch: int) -> torch.Tensor:
    """The first images as one full batch, filled up with the last of them."""
    import torch

    x, _ = next(iter(images.batches(batch)))
    return torch.cat([x, x[-1:].expand(batch - len(x), *x.shape[1:])])
