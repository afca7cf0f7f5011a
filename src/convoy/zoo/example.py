"""Inputs of a model: the size and statistics of its images, and example inputs without images."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from convoy.errors import InputError
from convoy.narrowing import is_sequence, is_tuple
from convoy.zoo.image_size import ImageSize, sides
from convoy.zoo.initial import clip_shape
from convoy.zoo.model_names import TIMM, is_exported, parse_dtype, split_factory, unknown_model
from convoy.zoo.own_example import only_example, own_dtype
from convoy.zoo.torchvision_import import import_torchvision, torchvision_weights

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Statistics of ImageNet's training images, RGB in [0, 1]: torchvision's models were trained with them."""


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """How images become a model's input: crops of `size`, (x - mean) / std by channel, RGB in [0, 1].

    Attributes:
        size: pixels; the side of a square crop, or (height, width).
        mean: of each channel.
        std: of each channel.
    """

    size: ImageSize = 224
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD


_CIFAR: Final = {
    # akamaster/pytorch_resnet_cifar10 trained them with CIFAR's images and ImageNet's statistics.
    "resnet20_cifar10": Preprocessing(32),
    "resnet56_cifar10": Preprocessing(32),
    "ai85nascifarnet_cifar10": Preprocessing(32, (0.5,) * 3, (0.5,) * 3),  # RGB to [-1, 1]
    "cifar10_quick": Preprocessing(
        32, (125.8 / 255, 123.2 / 255, 114.0 / 255), (1 / 255,) * 3
    ),  # 0 to 255, less the mean
}
"""Preprocessing that the published weights of `convoy.zoo.cifar`'s nets were trained with."""


def preprocessing(name: str, weights: str | Path | None = None) -> Preprocessing:
    """The preprocessing that a model was trained with, as its library states it; otherwise ImageNet's, 224 pixels.

    Args:
        name: as `load_model` takes it.
        weights: `DEFAULT` asks for the size of exactly those weights; otherwise the smallest that the model is used with.
    """
    if is_exported(name) or split_factory(name)[0] is not None:
        return Preprocessing()
    if name in _CIFAR:
        return _CIFAR[name]
    import_torchvision()
    if name.startswith(TIMM):
        import timm

        if not timm.is_model(name.removeprefix(TIMM)):
            raise unknown_model(name)
        config = timm.get_pretrained_cfg(name.removeprefix(TIMM))
        if config is None:
            return Preprocessing()
        return Preprocessing(int(config.input_size[-1]), tuple(config.mean), tuple(config.std))
    try:
        offers = torchvision_weights(name)
    except ValueError as error:
        raise unknown_model(name) from error
    chosen: list[Any] = [offers.DEFAULT] if weights == "DEFAULT" else list(offers)
    found = [_of_transforms(getattr(entry.transforms, "keywords", {})) for entry in chosen]
    return min(found, key=lambda p: sides(p.size), default=Preprocessing())


def _of_transforms(options: dict[str, Any]) -> Preprocessing:
    given = options.get("crop_size", options.get("resize_size", 224))
    size: Any = given[0] if is_sequence(given) else given
    return Preprocessing(int(size), tuple(options.get("mean", IMAGENET_MEAN)), tuple(options.get("std", IMAGENET_STD)))


def example_args(
    model: nn.Module,
    *,
    batch: int | None = None,
    size: ImageSize | None = None,
    dtype: str | None = "fp32",
    default_size: ImageSize = 224,
) -> tuple[Any, ...]:
    """Inputs without images: standard normal, seeded.

    A model with an attribute `example_input_array` (a tensor or a tuple, the name that PyTorch Lightning gave it; an
    exported program has one too) is fed with that when neither batch nor size is given. Where it is one tensor, the input has
    its channels, and its batch or its size where the other one is given. Else one tensor [batch, c, height, width] is made,
    with c as the model's first convolution wants it.

    Args:
        model: that will be called.
        batch: images; None: the example's, else 1.
        size: pixels; one number for square images, or (height, width); None: the example's, else `default_size`.
        dtype: of the tensor; None: the model's own (`own_dtype`).
        default_size: `input_size(name)` of the model.

    Raises:
        InputError: naming `batch` or `size`.
    """
    if batch is not None and batch < 1:
        raise InputError("batch", batch, "an integer of at least 1")
    wanted = default_size if size is None else size
    sides(wanted)
    kind = parse_dtype(dtype or own_dtype(model))
    own = getattr(model, "example_input_array", None)
    if own is not None and batch is None and size is None:
        args: tuple[Any, ...] = own if is_tuple(own) else (own,)
        if dtype is None:
            return args
        return tuple(a.to(kind) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)
    generator = torch.Generator().manual_seed(0)
    only = only_example(model)
    if only is not None and only.dim() >= (1 if size is None else 4):
        shape = (batch or only.shape[0], *only.shape[1:])
        if size is not None:
            shape = (*shape[:-2], *sides(size))
        return (torch.randn(shape, generator=generator).to(kind) if only.is_floating_point() else _tiled(only, shape),)
    shape = clip_shape(model, batch or 1, input_channels(model), wanted)
    return (torch.randn(shape, generator=generator).to(kind),)


def _tiled(example: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """An example's integers, repeated or cut to another shape: other numbers might be no valid indices."""
    for dim, side in enumerate(shape):
        example = example.index_select(dim, torch.arange(side, device=example.device) % example.shape[dim])
    return example


def check_inputs(model: nn.Module, args: tuple[Any, ...], name: str) -> None:
    """Refuse inputs that a model's forward does not take by position, such as one image for a net with two inputs.

    Args:
        model: not called.
        args: its inputs.
        name: the name that the user gave the model.

    Raises:
        InputError: naming `model`, with the ways to give several inputs.
    """
    try:
        signature = inspect.signature(model.forward)
    except ValueError:  # a scripted module has no signature
        return
    parameters = [parameter for parameter in signature.parameters.values() if parameter.default is Parameter.empty]
    needed = [p.name for p in parameters if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
    own = getattr(model, "example_input_array", None)
    if is_tuple(own) and len(own) > len(args):
        todo = "Leave --input, --batch and --size out: the model has examples of all its inputs."
    else:
        todo = "Export it with example inputs by position (torch.export.save) to a .pt2 file, or use convoy.optimize in Python."
    try:
        signature.bind(*args)
    except TypeError as error:
        expected = f"a net with one input, a batch of images; its inputs are {', '.join(needed) or 'none'}"
        raise InputError("model", name, expected, todo) from error


def input_channels(model: nn.Module) -> int:
    """Channels that the first convolution reads; 3 where there is none."""
    first = next((m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Conv3d))), None)
    return first.in_channels if first is not None else 3


def input_size(name: str, weights: str | Path | None = None) -> int:
    """Height and width, pixels, of the images that a model is meant for: 224 where nothing else is known."""
    return sides(preprocessing(name, weights).size)[0]
