"""Whether a model computes each image of a batch from that image alone, so that a batch may be split or padded.

The model itself is run. If other images are changed and the shapes stay, an image's results keep their bits exactly where they do
not depend on the others: the same kernels compute them from the same numbers. Results of batches of different sizes come from
other kernels, so they are compared within rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils import _pytree as pytree

from convoy.dynamic.dims import Call, DynamicDims
from convoy.dynamic.drawn_numbers import WatchGenerators
from convoy.program.calls import map_tensors, tensors_of

Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""Runs the model; it may not change its arguments."""


@runtime_checkable
class CopyRunner(Protocol):
    """A tuner that also runs copies of a model."""

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a copy of the model returns for copies of these arguments."""
        ...


IMAGES: Final = 3
"""Images of the small batch, in which every pair of images is tried. Its middle one has a neighbour on both sides."""

ROUNDING: Final = {torch.float64: 1e-8, torch.float32: 5e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}
"""Largest relative error (L2) between batches of different sizes; fp32 may be computed in TF32."""

DIFFERENT: Final = 0.05
"""Largest share of integers, such as classes, that may differ between batches of different sizes, by ties."""


def why_not_split(run: Run, call: Call, dims: DynamicDims) -> str:
    """Why batches of a model must not be split or padded; empty if they may be.

    Args:
        run: runs the model.
        call: the example.
        dims: its dimensions that may change.
    """
    batch = dims.batch
    if batch is None:
        return "its batch size is fixed"
    if batch.least == batch.most:
        return ""

    watch = WatchGenerators()

    def results(sized: Call) -> Any:
        with torch.no_grad():
            return run(*sized)

    def outputs(sized: Call) -> list[torch.Tensor]:
        return list(tensors_of(results(sized)))

    def at(images: int) -> Call:
        return dims.resized(call, (images, *dims.example[1:]))

    small, large = min(max(batch.least, IMAGES), batch.most), batch.most
    found: dict[int, list[torch.Tensor]] = {}
    others: dict[int, list[str]] = {}
    for images in sorted({small, large, batch.least}):
        try:
            with nullcontext() if found else watch:
                made = results(at(images))
            found[images], others[images] = list(tensors_of(made)), _other_values(made)
        except Exception as error:  # whatever the model says to this size
            return f"it does not run with {images} images ({str(error).partition(chr(10))[0] or type(error).__name__})"
        without = _without_batch(found[images], images)
        if without:
            return without
    if watch.drawn:
        return "it draws random numbers, and a batch that is split or padded would draw others"
    for images in dict.fromkeys((small, large)):
        reason = _why_dependent(outputs, at(images), images, dims, found[images], every_pair=images == small)
        if reason:
            return reason
    for images in sorted(found):
        reason = _why_other_results(found[images], found[large])
        if reason:
            return reason
        if others[images] != others[large]:
            return "it returns a number or a text that depends on the number of images"
    return ""


def why_not_split_now(tuner: object, model: nn.Module, call: Call, dims: DynamicDims, known: str) -> str:
    """`why_not_split` of a model by copies that its tuner runs; what is known, if the tuner runs none."""
    return why_not_split(partial(tuner.run, model), call, dims) if isinstance(tuner, CopyRunner) else known


def _other_values(made: Any) -> list[str]:
    """The values besides tensors that a model returns."""
    plain = (bool, int, float, complex, str, type(None))
    leaves: list[object] = pytree.tree_leaves(made)
    return [repr(leaf) if isinstance(leaf, plain) else type(leaf).__qualname__ for leaf in leaves]


def _without_batch(outputs: Sequence[torch.Tensor], images: int) -> str:
    if not outputs:
        return "it returns no tensor"
    for index, tensor in enumerate(outputs):
        if not tensor.dim() or tensor.shape[0] != images:
            return f"output {index} has shape {list(tensor.shape)} for {images} images: dimension 0 is not the batch"
    return ""


def _why_other_results(few: Sequence[torch.Tensor], many: Sequence[torch.Tensor]) -> str:
    """Why the same images have other results in a batch of another size; empty if they have the same within rounding."""
    if len(few) != len(many):
        return f"it returns {len(few)} tensors for some batch sizes and {len(many)} for others"
    for index, (one, other) in enumerate(zip(few, many, strict=True)):
        if one.shape[1:] != other.shape[1:]:
            return f"output {index} has shape {list(one.shape)} and {list(other.shape)}: other dimensions change with the batch"
        if one.dtype != other.dtype or not _alike(one, other[: one.shape[0]]):
            return f"output {index} of an image depends on the number of images in its batch"
    return ""


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    allowed = ROUNDING.get(one.dtype)
    if allowed is None:
        return bool((one != other).double().mean() <= DIFFERENT) if one.numel() else True
    wide, wanted = one.double().nan_to_num(), other.double().nan_to_num()
    error, size = (wide - wanted).square().sum(), wanted.square().sum()
    return float(error) <= allowed**2 * float(size)


def _why_dependent(
    outputs: Callable[[Call], list[torch.Tensor]],
    call: Call,
    images: int,
    dims: DynamicDims,
    before: Sequence[torch.Tensor],
    *,
    every_pair: bool,
) -> str:
    """Why an image's results depend on other images; empty if they do not.

    Args:
        outputs: runs the model.
        call: a batch.
        images: its size.
        dims: which inputs have images.
        before: the results.
        every_pair: change the images so that each pair is told apart once in each direction; else change every second one.
    """
    again = outputs(call)
    exact = all(map(_equal, before, again))
    for changed in _subsets(images) if every_pair else [range(1, images, 2)]:
        rows = list(changed)
        kept = [row for row in range(images) if row not in set(rows)]
        if not rows or not kept:
            continue
        made = outputs(_with_changes(call, rows, images, dims))
        for index, (one, other) in enumerate(zip(before, made, strict=True)):
            mine, theirs = one[kept], other[kept]
            if not (_equal(mine, theirs) if exact else _alike(mine, theirs)):
                return f"output {index} of an image depends on the other images of its batch"
    return ""


def _subsets(images: int) -> Iterator[list[int]]:
    """Sets of images such that, of any two images, some set has the first without the second."""
    for bit in range((images - 1).bit_length()):
        for side in (0, 1):
            yield [image for image in range(images) if image >> bit & 1 == side]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all numbers are the same; NaNs in the same places count as the same."""
    if one.shape != other.shape:
        return False
    same = one == other
    if one.is_floating_point() or one.is_complex():
        same |= one.isnan() & other.isnan()
    return bool(same.all())


def _with_changes(call: Call, rows: Sequence[int], images: int, dims: DynamicDims) -> Call:
    """The call with other numbers in these images; integers are those of the next image."""
    assert dims.batch is not None
    batched = {index for index, _ in dims.batch.places}
    numbers = iter(range(len(dims.shapes)))

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if next(numbers) not in batched:
            return tensor
        made = tensor.clone()
        some = tensor[list(rows)]
        if tensor.is_floating_point():
            made[list(rows)] = some * -1.5 + 0.75
        elif tensor.dtype == torch.bool:
            made[list(rows)] = ~some
        else:
            made[list(rows)] = tensor[[(row + 1) % images for row in rows]]
        return made

    return map_tensors(change, call)
