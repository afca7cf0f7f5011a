"""convoy prune: make a model's weights sparse, fine-tune it, and report the accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from convoy.cli import options
from convoy.cli.command_options import prune_options as given
from convoy.cli.output import say
from convoy.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from convoy.prune import PruneSummary, Recipe
    from convoy.training.trainer.finetune import FinetuneSchedule
    from convoy.zoo import Dataset


def prune(
    model: options.Model,
    weights: options.Weights = None,
    trust: options.Trust = False,
    batch: given.Batch = None,
    size: options.Size = None,
    device: options.Device = None,
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
    """Set weights of MODEL to zero by magnitude; fine-tune it, the zeros kept; write plain weights with true zeros."""
    if advise:
        from convoy.cli import advise as measured

        measured.refuse({"--sparsity": sparsity, "--out": output, "--finetune": finetune, "--evaluate": evaluate})
        settings = options.settings_from(effort=effort, numerics=numerics, db=db)
        advice = measured.run(model, weights, pattern, settings, batch, size, dtype, device, trust=trust)
        measured.show(advice, as_json)
        return
    from convoy.prune import Recipe
    from convoy.training.trainer.finetune import FinetuneSchedule

    recipe = Recipe.of(pattern or "unstructured", sparsity, scope, tuple(options.words_of(skip)))
    schedule = FinetuneSchedule(
        epochs=1 if epochs is None else epochs, batch=128 if batch is None else batch, lr=lr, seed=seed
    )
    if epochs is not None and finetune is None:
        raise InputError("--epochs", epochs, "nothing without --finetune DATA")
    if images is not None and images < 1:
        raise InputError("--images", images, "an integer of at least 1")
    check_files(output, weights)
    check_weights_given(model, weights)
    where = options.pick_device(device)
    module = options.load(model, weights, "fp32", where, trust=trust)
    summary = run(module, model, recipe, schedule, finetune, evaluate, images, size, where)
    save(module, output, summary)
    show(summary, output, as_json)


def check_files(output: Path | None, weights: str | None) -> None:
    """Refuse an output that cannot be written, read again, or that is the weights themselves."""
    from convoy.prune import check_weights_path

    options.check_outputs({"--out": output})
    if output is None:
        return
    check_weights_path(output)
    if weights is not None and output.resolve() == Path(weights).resolve():
        raise InputError("--out", str(output), "another file than --weights names")


def check_weights_given(model: str, weights: str | None) -> None:
    """Refuse random weights: their magnitudes say nothing. A factory's or a .pt2's own are its own affair."""
    from convoy.zoo.models import is_exported, split_factory

    if weights is None and not is_exported(model) and split_factory(model)[0] is None:
        expected = "a .safetensors file, or DEFAULT for the library's own"
        raise InputError("--weights", None, expected, "Random weights have no magnitude to go by.")


def run(
    module: nn.Module,
    name: str,
    recipe: Recipe,
    schedule: FinetuneSchedule,
    finetune_on: str | None,
    evaluate_on: str | None,
    images: int | None,
    size: str | None,
    device: str,
) -> PruneSummary:
    """Prune in place, fine-tune, and take the accuracy before, between and after."""
    from convoy.cli.progress import Bar
    from convoy.prune import Accuracy, Finetune, PruneSummary, accuracy, prune_model
    from convoy.training.trainer.finetune import finetune

    args = options.example(module, name, None, None, size, "fp32", device)
    with options.fitting(module, args):
        training, test = datasets(module, name, args, finetune_on, evaluate_on, images, size)
        before = 0.0
        with Bar() as bar:
            if test is not None:
                before = accuracy(module, test, on_progress=bar)
            pruned = prune_model(module, recipe, args)
            between = accuracy(module, test, on_progress=bar) if test is not None else 0.0
            done = after = None
            if training is not None:
                losses = finetune(module, pruned.masks, training, schedule, bar)
                done = Finetune(
                    training.name, len(training), schedule.epochs, schedule.lr, schedule.seed, tuple(losses)
                )
                after = accuracy(module, test, on_progress=bar) if test is not None else None
    found = Accuracy(test.name, len(test), before, between, after) if test is not None else None
    return PruneSummary(
        model=name,
        pattern=str(recipe.pattern),
        sparsity=recipe.sparsity,
        scope=recipe.scope,
        layers=pruned.layers,
        accuracy=found,
        finetune=done,
        notes=pruned.notes,
    )


def datasets(
    module: nn.Module,
    name: str,
    args: tuple[object, ...],
    finetune_on: str | None,
    evaluate_on: str | None,
    images: int | None,
    size: str | None,
) -> tuple[Dataset | None, Dataset | None]:
    """The data to train on, and the data to measure the accuracy on; the model runs once to count its classes."""
    if finetune_on is None and evaluate_on is None:
        return None, None
    from dataclasses import replace

    import torch

    from convoy.prune.accuracy import class_scores
    from convoy.zoo import load_dataset, own_splits, preprocessing

    wanted = preprocessing(name)
    wanted = replace(wanted, size=options.image_size(size) or wanted.size)
    with torch.no_grad():
        classes = class_scores(module(*args)).shape[1]

    def read(source: str, split: str) -> Dataset:
        return load_dataset(source, split, preprocessing=wanted, classes=classes, limit=images)

    training = read(finetune_on, "train") if finetune_on else None
    if evaluate_on is None:
        return training, read(str(finetune_on), "test")
    return training, read(evaluate_on, "test" if own_splits(evaluate_on) else "all")


def save(module: nn.Module, output: Path | None, summary: PruneSummary) -> None:
    """Write the weights where they are wanted, with how they were pruned."""
    from convoy.prune import save_weights

    if output is not None:
        save_weights(module, output, summary.about())


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
