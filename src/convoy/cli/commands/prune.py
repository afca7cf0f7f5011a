"""convoy prune: make a model's weights sparse, fine-tune it, and report the accuracy."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Final

from convoy.cli.command_parts.labelled_data import LARGEST_BATCH, fitting_batch, reading
from convoy.cli.options import inputs, shared, values
from convoy.cli.options import prune as given
from convoy.cli.output.files import check_outputs
from convoy.cli.output.lines import say
from convoy.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from convoy.cli.output.progress import Bar
    from convoy.prune import PruneSummary, Recipe
    from convoy.training.trainer.finetune import FinetuneSchedule
    from convoy.zoo import Dataset, WeightsInfo
    from convoy.zoo.image_size import ImageSize

LEAST_FINETUNE_STEPS: Final = 50
"""Steps of a fine-tuning for which more than one epoch is chosen where the data set is small."""


def prune(
    model: shared.Model,
    weights: shared.Weights = None,
    trust: shared.Trust = False,
    batch: given.Batch = None,
    size: shared.Size = None,
    device: shared.Device = None,
    sparsity: given.Sparsity = None,
    pattern: given.Pattern = None,
    scope: given.Scope = "layer",
    skip: given.Skip = None,
    finetune: given.Finetune = None,
    epochs: given.Epochs = None,
    evaluate: given.Evaluate = None,
    images: given.Images = None,
    lr: given.Lr = 0.01,
    seed: given.Seed = 0,
    advise: given.Advise = False,
    effort: given.Effort = "quick",
    dtype: given.Dtype = "fp32",
    numerics: given.Numerics = "as_torch",
    db: given.Db = None,
    output: given.Output = None,
    as_json: given.Json = False,
) -> None:
    """Set the smallest weights of MODEL to zero, fine-tune the others, and write all of them as a .safetensors file."""
    if advise:
        from convoy.cli.command_parts import advise as measured

        measured.refuse({"--sparsity": sparsity, "--out": output, "--finetune": finetune, "--evaluate": evaluate})
        settings = values.settings_from(effort=effort, numerics=numerics, db=db)
        advice = measured.run(model, weights, pattern, settings, batch, size, dtype, device, trust=trust)
        measured.show(advice, as_json)
        return
    from convoy.prune import Recipe
    from convoy.training.trainer.finetune import FinetuneSchedule
    from convoy.zoo import read_info

    recipe = Recipe.of(pattern or "unstructured", sparsity, scope, tuple(values.words_of(skip)))
    schedule = FinetuneSchedule(
        epochs=1 if epochs is None else epochs, batch=LARGEST_BATCH if batch is None else batch, lr=lr, seed=seed
    )
    fitted = FittedOptions(epochs=epochs is None, batch=batch is None)
    if epochs is not None and finetune is None:
        raise InputError("--epochs", epochs, "nothing without --finetune DATA")
    if images is not None and images < 1:
        raise InputError("--images", images, "an integer of at least 1")
    check_files(output, weights)
    check_weights_given(model, weights)
    where = values.pick_device(device)
    module = values.load_fp32(model, weights, where, trust=trust)
    sources = Sources(finetune, evaluate, images, values.image_size(size))
    summary, info = run(module, model, recipe, schedule, fitted, sources, read_info(weights), where)
    save(module, output, summary, info)
    show(summary, output, as_json)


def check_files(output: Path | None, weights: str | None) -> None:
    """Refuse an output that cannot be written, read again, or that is the weights themselves."""
    from convoy.prune import check_weights_path

    check_outputs({"--out": output})
    if output is None:
        return
    check_weights_path(output)
    if weights is not None and output.resolve() == Path(weights).resolve():
        raise InputError("--out", str(output), "another file than --weights names")


def check_weights_given(model: str, weights: str | None) -> None:
    """Refuse random weights, whose magnitudes say nothing, and exported programs, which have no modules to prune.

    The weights of a FILE.py:FACTORY may be its own.
    """
    from convoy.zoo.model_names import is_exported, split_factory

    if is_exported(model):
        todo = "An exported program has none. Prune the model that it was exported from, and export that again."
        raise InputError("model", model, "a model with Conv2d or Linear modules", todo)
    if weights is None and split_factory(model)[0] is None:
        expected = "a .safetensors file, or DEFAULT for the library's own"
        raise InputError("--weights", None, expected, "Random weights have no magnitude to go by.")


@dataclasses.dataclass(frozen=True, slots=True)
class FittedOptions:
    """Which parts of the fine-tuning schedule the user did not choose: they are fitted to the number of images."""

    epochs: bool
    batch: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Sources:
    """The data, as the command names them, most images of each, and the size of the images."""

    finetune: str | None
    evaluate: str | None
    images: int | None
    size: ImageSize | None


def run(
    module: nn.Module,
    name: str,
    recipe: Recipe,
    schedule: FinetuneSchedule,
    fitted: FittedOptions,
    sources: Sources,
    info: WeightsInfo,
    device: str,
) -> tuple[PruneSummary, WeightsInfo]:
    """Prune in place, fine-tune, and take the accuracy before, between and after; with what the new weights file says."""
    from convoy.cli.output.progress import Bar
    from convoy.prune import Accuracy, Finetune, PruneSummary, accuracy, prune_model
    from convoy.training.trainer.finetune import finetune

    args = inputs.example(module, name, None, None, sources.size, "fp32", device, info)
    with inputs.fitting(module, args), Bar() as bar:
        training, test, info = datasets(module, name, sources, info, device, bar)
        before = accuracy(module, test, on_progress=bar) if test is not None else 0.0
        pruned = prune_model(module, recipe, args)
        between = accuracy(module, test, on_progress=bar) if test is not None else 0.0
        done = after = None
        if training is not None:
            schedule = fitted_schedule(schedule, fitted, len(training))
            losses = finetune(module, pruned.masks, training, schedule, bar)
            done = Finetune(training.name, len(training), schedule.epochs, schedule.lr, schedule.seed, tuple(losses))
            after = accuracy(module, test, on_progress=bar) if test is not None else None
    found = Accuracy(test.name, len(test), before, between, after) if test is not None else None
    summary = PruneSummary(
        model=name,
        pattern=str(recipe.pattern),
        sparsity=recipe.sparsity,
        scope=recipe.scope,
        layers=pruned.layers,
        accuracy=found,
        finetune=done,
        notes=pruned.notes,
    )
    return summary, info


def fitted_schedule(schedule: FinetuneSchedule, fitted: FittedOptions, images: int) -> FinetuneSchedule:
    """The schedule for so many images: a batch that makes eight steps an epoch, and epochs that make fifty steps together."""
    batch = fitting_batch(images) if fitted.batch else schedule.batch
    steps = max(1, images // batch)
    epochs = max(1, -(-LEAST_FINETUNE_STEPS // steps)) if fitted.epochs else schedule.epochs
    return dataclasses.replace(schedule, batch=max(batch, 2), epochs=epochs)


def datasets(
    module: nn.Module, name: str, sources: Sources, info: WeightsInfo, device: str, bar: Bar
) -> tuple[Dataset | None, Dataset | None, WeightsInfo]:
    """The data to train on, the data to take the accuracy on, and what the new weights know of both.

    Images that the weights were trained on are not counted: of a source that is trained on here, or was before, the accuracy
    is taken on the images that are held out.
    """
    if sources.finetune is None and sources.evaluate is None:
        return None, None, info
    from convoy.zoo import data_tokens, own_splits

    read_for = reading(module, name, info, sources.size, device)
    training = read_for.open(sources.finetune, "train", sources.images, bar) if sources.finetune else None
    if training is not None:
        tokens = info.trained_on | data_tokens(training.name)
        info = dataclasses.replace(info, trained_on=tokens, size=read_for.preprocessing.size)
        info = dataclasses.replace(info, classes=info.classes or training.class_names)
    source = sources.evaluate or str(sources.finetune)
    if own_splits(source) or info.was_trained_on(source):
        test = read_for.open_test(source, sources.images, bar)
    else:
        test = read_for.open(source, "all", sources.images, bar)
    return training, without(test, training, bar), info


def without(test: Dataset | None, training: Dataset | None, bar: Bar) -> Dataset | None:
    """The test images whose files are not trained on; a folder may lie inside the other, or link to it.

    Raises:
        InputError: none is left.
    """
    if test is None or training is None or not test.files or not training.files:
        return test
    trained_on = {file.resolve() for file in training.files}
    left = [index for index, file in enumerate(test.files) if file.resolve() not in trained_on]
    if len(left) == len(test):
        return test
    if not left:
        raise InputError("--evaluate", test.name, "images that are not trained on", "All of them are in --finetune.")
    bar.tell(f"{len(test) - len(left):,} images of {test.name} are trained on: the accuracy is that of the others")
    return test.subset(left)


def save(module: nn.Module, output: Path | None, summary: PruneSummary, info: WeightsInfo) -> None:
    """Write the weights where they are wanted, with how they were pruned and what their outputs stand for."""
    from convoy.prune import save_weights

    if output is not None:
        save_weights(module, output, dataclasses.replace(info, words={}).to_words() | summary.about())


def show(summary: PruneSummary, output: Path | None, as_json: bool) -> None:
    """Print the layers, the request and the accuracy; or all of it as JSON."""
    import json

    if as_json:
        say(json.dumps(summary.to_dict(), indent=1))
        return
    from convoy.report import print_table

    rows = [
        (
            layer.name,
            "x".join(map(str, layer.shape)),
            f"{layer.zeros_before / layer.weights:.1%}",
            f"{layer.zeros_after / layer.weights:.1%}",
            f"{layer.kept_norm:.1%}",
            layer.reason,
        )
        for layer in summary.layers
    ]
    print_table(("layer", "weight", "zeros before", "zeros", "norm kept", "left as it is"), rows, numbers=(2, 3, 4))
    weights = sum(layer.weights for layer in summary.layers)
    zeros = sum(layer.zeros_after for layer in summary.layers)
    say(f"{summary.pattern}, {summary.scope}: {zeros:,} of {weights:,} weights are zero ({zeros / weights:.2%})")
    if summary.finetune is not None:
        done = summary.finetune
        losses = ", ".join(f"{loss:.3f}" for loss in done.losses)
        say(f"fine-tuned on {done.images:,} images of {done.data}: loss by epoch {losses}")
    if summary.accuracy is not None:
        found = summary.accuracy
        tuned = "" if found.finetuned is None else f", fine-tuned {found.finetuned:.2%}"
        say(
            f"accuracy on {found.images:,} images of {found.data}: "
            f"before {found.before:.2%}, pruned {found.pruned:.2%}{tuned}"
        )
    for note in summary.notes:
        say(f"note: {note}")
    say(f"weights:   {output}" if output is not None else "nothing is written: give --out FILE.safetensors")
