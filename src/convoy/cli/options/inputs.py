"""The inputs of a command's net: images, or random numbers; and errors of inputs that the net does not take."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convoy.cli.output.lines import tell
from convoy.errors import CaptureError, ConvoyError, InputError

if TYPE_CHECKING:
    from torch import nn

    from convoy.zoo import WeightsInfo
    from convoy.zoo.image_size import ImageSize


def example(
    model: nn.Module,
    name: str,
    images: list[Path] | None,
    batch: int | None,
    size: ImageSize | None,
    dtype: str | None,
    device: str,
    info: WeightsInfo | None = None,
    *,
    data_batch: int | None = None,
) -> tuple[Any, ...]:
    """The inputs: images where they are given, else random ones; of the size asked for, the weights' or the model's.

    Files in folders that cannot be read are listed and left out. Where no batch is given, `data_batch` images are taken of a
    folder of class folders, which is a data set. No dtype: the model's own.
    """
    from convoy.zoo import check_inputs, example_args, example_size, load_images, own_dtype, preprocessing
    from convoy.zoo.unlabelled import has_classes

    wanted = preprocessing(name)
    default = (info.size if info is not None else None) or example_size(model) or wanted.size
    if images:
        data = [path for path in images if path.is_dir() and has_classes(path)]
        if data and batch is None and data_batch is not None:
            batch = data_batch
            tell(f"batch {batch}, for {data[0]} is a data set: it has class folders (--batch N takes more images)")
        tensor = load_images(
            images, size=size or default, batch=batch, dtype=dtype or own_dtype(model), mean=wanted.mean, std=wanted.std,
            on_unreadable=tell_left_out,
        )  # fmt: skip
        check_inputs(model, (tensor,), name)
        return (tensor.to(device),)
    args = example_args(model, batch=batch, size=size, dtype=dtype, default_size=default)
    check_inputs(model, args, name)
    return tuple(a.to(device) if hasattr(a, "to") else a for a in args)


def check_shape(model: nn.Module, args: tuple[Any, ...]) -> None:
    """Run a model that brings an example on inputs of another shape: an exported program may have been exported for one alone.

    Some programs check their shapes in a hook, which a graph that is captured does not have.

    Raises:
        InputError: naming `batch` or `size`.
    """
    import torch

    from convoy.zoo import shape_error
    from convoy.zoo.own_example import only_example

    own = only_example(model)
    if own is None or [own.shape] == [getattr(a, "shape", None) for a in args]:
        return
    try:
        with torch.no_grad():
            model(*args)
    except Exception as refusal:  # the user's own model may fail in any way
        raise shape_error(model, args, refusal) from refusal


@contextmanager
def fitting(model: nn.Module, args: tuple[Any, ...]) -> Generator[None]:
    """Blame the inputs where something failed that the stock model cannot run on them either: a shape that does not fit.

    A model without an example of its own is asked after a failure only: a run of it may take seconds.
    """
    import torch

    from convoy.zoo import check_inputs, shape_error

    check_shape(model, args)
    try:
        yield
    except Exception as error:  # whatever it is, it is raised again unless the inputs are to blame
        if isinstance(error, ConvoyError) and not isinstance(error, CaptureError):
            raise
        try:
            with torch.no_grad():
                model(*args)
        except Exception as refusal:  # the user's own model may fail in any way
            check_inputs(model, args, type(model).__name__)
            raise shape_error(model, args, refusal) from error
        raise


def tell_left_out(error: InputError) -> None:
    """Say that an image file of a folder is left out."""
    from convoy.zoo.check_images import reading_reason

    tell(f"left out, for it cannot be read: {error.value} ({reading_reason(error)})")
