"""The example inputs that a model brings, as an exported program does: batch, size, dtype; and the error where others fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from convoy.errors import InputError
from convoy.narrowing import is_tuple
from convoy.zoo.image_size import ImageSize
from convoy.zoo.model_names import DTYPES


def only_example(model: nn.Module) -> torch.Tensor | None:
    """A model's own example where that is one tensor with elements."""
    own = getattr(model, "example_input_array", None)
    only = own[0] if is_tuple(own) and len(own) == 1 else own
    return only if isinstance(only, torch.Tensor) and only.numel() else None


def example_batch(model: nn.Module) -> int | None:
    """The batch of the images that a model has as its own example; None where it has none."""
    only = only_example(model)
    return only.shape[0] if only is not None and only.dim() >= 4 else None


def example_size(model: nn.Module) -> ImageSize | None:
    """(height, width), pixels, of the images that a model has as its own example; None where it has none."""
    only = only_example(model)
    return (only.shape[-2], only.shape[-1]) if only is not None and only.dim() >= 4 else None


def own_dtype(model: nn.Module) -> str:
    """Name of a model's dtype: that of its own example, else of its parameters; `fp32` if neither has floating-point numbers.

    Raises:
        InputError: it is a dtype that Convoy has no name for.
    """
    own = getattr(model, "example_input_array", None)
    held = [value for value in (own if is_tuple(own) else (own,)) if isinstance(value, torch.Tensor)]
    dtype = next((value.dtype for value in (*held, *model.parameters()) if value.is_floating_point()), torch.float32)
    names = {kind: name for name, kind in DTYPES.items()}
    if dtype not in names:
        raise InputError("model", str(dtype), f"parameters of one of {', '.join(DTYPES)}")
    return names[dtype]


def shape_error(model: nn.Module, args: Sequence[Any], refusal: Exception) -> InputError:
    """The error of inputs that a model refused: it names `batch` or `size`, whichever differs from the model's own example.

    Args:
        model: runs once more where both differ.
        args: its inputs.
        refusal: the model's exception.
    """
    said = f"The model says: {type(refusal).__name__}: {refusal}"
    own, x = only_example(model), args[0] if len(args) == 1 else None
    if own is None or not isinstance(x, torch.Tensor) or x.dim() != own.dim() or x.shape == own.shape or x.dim() < 4:
        shapes = ", ".join(_sides(a.shape) if isinstance(a, torch.Tensor) else repr(a) for a in args)
        return InputError("size", shapes, "a shape that the model takes", said)
    others = f"as in the model's own example inputs. A model that is exported with dynamic shapes takes others. {said}"
    if x.shape[2:] == own.shape[2:] or (x.shape[0] != own.shape[0] and not _takes_batch(model, x.shape[0], own)):
        return InputError("batch", x.shape[0], f"{own.shape[0]}, {others}")
    return InputError("size", _sides(x.shape[2:]), f"{_sides(own.shape[2:])}, {others}")


def _takes_batch(model: nn.Module, batch: int, own: torch.Tensor) -> bool:
    """Whether the model takes so many images of its own example's size."""
    first = next(model.parameters(), own)
    x = own[:1].expand(batch, *own.shape[1:]).contiguous().to(first.device)
    try:
        with torch.no_grad():
            model(x)
    except Exception:  # the user's own model may fail in any way
        return False
    return True


def _sides(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
