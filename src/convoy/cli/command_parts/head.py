"""The last layer of the net that is trained: how many outputs it has, and what they stand for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.errors import InputError, unknown_name

if TYPE_CHECKING:
    import torch
    from torch import nn

    from convoy.cli.command_parts.labelled_data import Labelled

CHOICES = ("fit", "keep")


def check_choice(head: str | None) -> None:
    """Refuse a word that `--head` does not know."""
    if head is not None and head not in CHOICES:
        raise unknown_name("--head", head, CHOICES)


def check_classes(data: str, names: Sequence[str]) -> None:
    """Refuse a folder with one class: nothing could be learnt of it; most often it is the folder above the data set."""
    if len(names) == 1:
        inner = Path(data) / names[0]
        todo = f"Did you mean {inner}?" if inner.is_dir() and any(p.is_dir() for p in inner.iterdir()) else ""
        raise InputError("data", data, "images of two classes or more", todo)


def fitted(
    module: nn.Module, model: str, data: str, reading: Labelled, head: str | None, x: torch.Tensor
) -> tuple[Labelled, str]:
    """Fit the last layer to the classes of the data, unless it is to be kept or need not change.

    Args:
        module: changed in place.
        model: its name.
        data: source of the images whose classes are learnt.
        reading: outputs of the net, and what they stand for by its weights.
        head: `fit`, `keep`, or None: fit where the data name their classes, or have more than the net has outputs.
        x: an example input.

    Returns:
        `reading`, with the outputs that the net has now, and what they stand for; and a line for the user, or nothing.

    Raises:
        InputError: the data have one class alone; the layer cannot be replaced, or is to be kept and has too few outputs.
    """
    from convoy.zoo import classes_of, fit_head
    from convoy.zoo.model_names import is_exported

    outputs = reading.outputs
    classes, names = classes_of(data, outputs)
    check_classes(data, names)
    if must_fit(head, Classes(outputs, reading.class_names), Classes(classes, names), fixed=is_exported(model)):
        layer = fit_head(module, classes, (x,), outputs)
        kept = f"it had {outputs:,}; --head keep leaves it"
        said = f"the last layer, {layer}, is new: {classes:,} outputs, one for each class ({kept})"
        return dataclasses.replace(reading, outputs=classes, class_names=names), said
    if classes > outputs:
        todo = "" if is_exported(model) else "With --head fit the last layer is replaced."
        raise InputError("data", data, f"at most the {outputs:,} classes that the model tells apart", todo)
    said = ""
    if classes < outputs and not reading.class_names:
        said = f"the net keeps its {outputs:,} outputs for {classes:,} classes (--head fit replaces its last layer)"
    return dataclasses.replace(reading, class_names=reading.class_names or names), said


@dataclass(frozen=True, slots=True)
class Classes:
    """A number of classes, and their names where they are known."""

    count: int
    names: tuple[str, ...]


def must_fit(head: str | None, model: Classes, data: Classes, *, fixed: bool) -> bool:
    """Whether the last layer is replaced.

    Args:
        head: `fit`, `keep` or None.
        model: outputs of the net, and what they stand for.
        data: classes of the data.
        fixed: the net cannot be changed: it is an exported program.
    """
    if head == "keep" or (fixed and head is None):
        return False
    both_named = bool(model.names) and bool(data.names)
    if head == "fit":
        return data.count != model.count or (both_named and data.names != model.names)
    if both_named:
        return not set(data.names) <= set(model.names)
    # Arrays with numbers for labels do not say how many classes there are beyond the largest label.
    return data.count != model.count if data.names else data.count > model.count
