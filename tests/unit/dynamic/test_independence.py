"""Nets that mix the images of a batch are found out; nets that do not are let through."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from convoy.dynamic.independence import why_not_split
from convoy.dynamic.read_dynamic import read_dynamic

X = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(3, 3, 1, generator=torch.Generator().manual_seed(1))


def why(function: Callable[..., Any], *inputs: torch.Tensor, least: int = 1, most: int = 8) -> str:
    """Why batches are not split, of an example of two images."""
    given = inputs or (X,)
    return why_not_split(
        lambda args, kwargs: function(*args, **kwargs),
        (given, {}),
        read_dynamic({0: (least, most)}, function, given, {}),
    )


def seeded(function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """Its results with the same seed in every call, as a copy of a model runs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return function(*args)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2,
        lambda x: (x * 2, "word", x.shape[1:], None),
        lambda x: seeded(nn.functional.dropout, x, 0.0),
        lambda x: nn.functional.conv1d(x, WEIGHT).relu(),
        lambda x: (x.softmax(1), {"classes": x.flatten(1).argmax(1), "large": x > 0}),
        lambda x: nn.functional.scaled_dot_product_attention(x, x, x),
        lambda x: x / (x - x),  # NaNs
        lambda x: x.half() @ x.half().mT,
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    ],
)
def test_nets_that_compute_each_image_alone_may_be_split(function: Callable[..., Any]) -> None:
    assert why(function) == ""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x - 1e-3 * x.mean(0), "other images"),
        (lambda x: nn.functional.batch_norm(x, None, None, training=True), "other images"),
        (lambda x: x.roll(1, 0), "other images"),
        (lambda x: x.flip(0), "other images"),
        (lambda x: x[:1].expand_as(x), "other images"),
        (lambda x: x.cumsum(0), "other images"),
        (lambda x: x.flatten(1).softmax(0), "other images"),
        (lambda x: (x, x.argsort(0)), "output 1"),
        (lambda x: torch.where(x.amax(0) > 3, x, -x), "other images"),
        (lambda x: x if x.shape[0] < 5 else x - x.mean(0), "other images|number of images"),
        (lambda x: x * x.shape[0], "number of images"),
        (lambda x: x.mean(), "output 0 has shape"),
        (lambda x: (x, x.sum((1, 2)).mean(0, keepdim=True)), "output 1 has shape"),
        (lambda x: x.transpose(0, 1), "output 0 has shape"),
        (lambda x: x.flatten(1) @ x.flatten(1).T, "other images"),
        (lambda x: x.new_ones(x.shape[0], x.shape[0]), "other dimensions change"),
        (lambda x: 7, "no tensor"),
        (lambda x: x.reshape(-1, 2, 3, 5), "does not run with 1 images"),
        (lambda x: (x, x.shape[0]), "a number or a text that depends"),
        (lambda x: {"x": x, "size": [str(x.shape)]}, "a number or a text that depends"),
        (lambda x: seeded(torch.rand_like, x), "draws random numbers"),
        (lambda x: seeded(nn.functional.dropout, x, 0.5), "draws random numbers"),
    ],
)
def test_nets_that_mix_images_are_found_out(function: Callable[..., Any], words: str) -> None:
    assert re.search(words, why(function)), why(function)


def test_a_mixture_in_the_largest_batch_alone_is_found_out() -> None:
    def exchanged(x: torch.Tensor) -> torch.Tensor:
        made = x.clone()
        made[6:7] += x[7:8] * 1e-6
        return made

    assert "other images" in why(exchanged)


def test_indices_and_masks_count_as_images_too() -> None:
    table = torch.randn(10, 4)
    numbers, mask = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[True], [False]])
    assert why(lambda i, m: table[i] * m[..., None], numbers, mask) == ""
    assert "other images" in why(lambda i, m: table[i] * m[..., None].roll(1, 0), numbers, mask)
    assert "other images" in why(lambda i, m: table[i.roll(1, 0)] * m[..., None], numbers, mask)


def test_one_size_needs_no_proof_and_a_fixed_batch_has_none() -> None:
    assert why(lambda x: x.mean(), least=2, most=2) == ""
    fixed = read_dynamic({1: (1, 8)}, lambda x: x, (X,), {})
    assert why_not_split(lambda args, kwargs: args[0], ((X,), {}), fixed) == "its batch size is fixed"
