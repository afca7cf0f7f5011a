"""convoy train: train a classifier on labelled images by tuned steps; with checkpoints, and over several GPUs by torchrun."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.cli import interrupt
from convoy.cli.command_parts.head import check_choice
from convoy.cli.command_parts.labelled_data import LARGEST_BATCH
from convoy.cli.command_parts.training_run import USUAL_LR, GivenOptions, Outputs, Source, processes, run
from convoy.cli.options import shared, values
from convoy.cli.options import train as given
from convoy.cli.output.files import check_outputs
from convoy.cli.output.kept import identity
from convoy.errors import InputError

if TYPE_CHECKING:
    from convoy.training.trainer.recipe import TrainingRecipe


def train(
    model: shared.Model,
    data: given.Data = "synthetic",
    images: given.Images = None,
    batch: given.Batch = None,
    size: shared.Size = None,
    device: shared.Device = None,
    weights: shared.Weights = None,
    trust: shared.Trust = False,
    epochs: given.Epochs = 1,
    lr: given.Lr = None,
    head: given.Head = None,
    momentum: given.Momentum = 0.9,
    weight_decay: given.WeightDecay = 1e-4,
    amp: given.Amp = None,
    clip_grad_norm: given.ClipGradNorm = None,
    accumulate: given.Accumulate = 1,
    seed: given.Seed = 0,
    stock: given.Stock = False,
    numerics: shared.Numerics = "as_torch",
    effort: shared.Effort = "quick",
    time_s: given.TimeS = None,
    db: shared.Db = None,
    checkpoint: given.Checkpoint = None,
    every: given.CheckpointEvery = 0,
    resume: given.Resume = False,
    plan: given.Plan = None,
    save_plan: given.SavePlan = None,
    output: given.Out = None,
) -> None:
    """Train MODEL on labelled images: loss, accuracy and images a second of each epoch. Under torchrun: on all its GPUs."""
    from convoy.training.trainer.recipe import TrainingRecipe, with_amp

    recipe = TrainingRecipe(
        epochs=epochs,
        batch=LARGEST_BATCH if batch is None else batch,
        lr=USUAL_LR if lr is None else lr,
        momentum=momentum,
        weight_decay=weight_decay,
        seed=seed,
        clip_grad_norm=clip_grad_norm,
        accumulate=accumulate,
        stock=stock,
        plan=plan,
        checkpoint=checkpoint,
        every=every,
        resume=resume,
    )
    recipe, wanted = with_amp(recipe, amp), values.image_size(size)
    settings = values.settings_from(effort=effort, numerics=numerics, time_s=time_s, db=db)
    check_choice(head)
    _check_files(model, plan, save_plan, output, recipe)

    with _interruptible(checkpoint, resume=resume), processes(values.pick_device(device)) as place:
        source = Source(model, weights, data, wanted, images, trust, head)
        outputs = Outputs(save_plan, output)
        chosen = GivenOptions(batch is not None, lr is not None)
        # Its tensors are freed before the process group is destroyed.
        run(source, recipe, chosen, settings, outputs, place)


def _check_files(
    model: str, plan: Path | None, save_plan: Path | None, output: Path | None, recipe: TrainingRecipe
) -> None:
    """Refuse files that could not be written, or not be read again, before the model is loaded."""
    from convoy.plan import load as load_plan
    from convoy.prune import check_weights_path

    checkpoint = recipe.checkpoint
    for name, path in (("--plan", plan), ("--save-plan", save_plan)):
        if recipe.stock and path is not None:
            raise InputError(name, str(path), "nothing with --stock", "PyTorch's own step has no plan.")
    check_outputs({"--checkpoint": checkpoint, "--save-plan": save_plan, "--out": output})
    if plan is not None:
        load_plan(plan)
    if output is not None:
        check_weights_path(output)
        check_readable_again(model, output)
    if checkpoint is not None and checkpoint.exists() and not recipe.resume:
        todo = "Give --resume to go on from it, or name another file."
        raise InputError("--checkpoint", str(checkpoint), "a file that is not there yet", todo)


def check_readable_again(model: str, output: Path) -> None:
    """Refuse to write weights that no command could read: an exported program takes no others than its own."""
    from convoy.zoo.model_names import is_exported

    if is_exported(model):
        todo = "A .pt2 or an .onnx file has its own weights. Name the model, or FILE.py:FACTORY."
        raise InputError("--out", str(output), "no file of weights with an exported program", todo)


@contextmanager
def _interruptible(checkpoint: Path | None, *, resume: bool) -> Generator[None]:
    """Ctrl-C removes the unfinished checkpoint and reports the position of the last one."""
    if checkpoint is None:
        interrupt.keeps(lambda: f"nothing of this training is kept (see --checkpoint); {interrupt.MEASURED}")
        yield
        return
    another = None if resume else identity(checkpoint)

    def kept() -> str:
        from convoy.training.trainer.checkpoint import read_position

        there = identity(checkpoint)
        if there is None or there == another:
            return f"this training has not written {checkpoint} yet"
        position = read_position(checkpoint)
        made = f"{position.epoch} epochs and {position.step} steps" if position else "the last checkpoint"
        return f"{checkpoint} holds {made}; go on with --resume"

    def remove() -> None:
        from convoy.training.trainer.checkpoint import remove_unfinished

        remove_unfinished(checkpoint)

    interrupt.keeps(kept)
    with interrupt.cleaned_up(remove):
        yield
