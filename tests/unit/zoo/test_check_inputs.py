"""A net that an image does not satisfy is refused with its inputs' names and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from convoy.cli.options import inputs
from convoy.errors import InputError
from convoy.zoo import check_inputs

IMAGE, DEPTH = torch.zeros(1, 3, 8, 8), torch.zeros(1, 1, 8, 8)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, image: torch.Tensor, depth: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.conv(image) + scale * depth.mean()


class Any1(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0]


def test_a_net_with_two_inputs_is_refused_for_one_image() -> None:
    with pytest.raises(InputError, match=r"its inputs are image, depth\. Export it .* \.pt2 .* Python") as caught:
        check_inputs(Two(), (IMAGE,), "two.py:two")
    assert (caught.value.argument, caught.value.value) == ("model", "two.py:two")
    for model, args in ((Two(), (IMAGE, DEPTH)), (nn.Conv2d(3, 4, 3), (IMAGE,)), (Any1(), (IMAGE,))):
        check_inputs(model, args, "a net")


def test_a_net_with_examples_of_its_own_is_used_with_them() -> None:
    model = Two()
    model.example_input_array = (IMAGE, DEPTH)  # type: ignore[assignment]
    assert len(inputs.example(model, "two.pt2", None, None, None, "fp32", "cpu")) == 2
    with pytest.raises(InputError, match="Leave --input, --batch and --size out"):
        inputs.example(model, "two.pt2", None, 1, None, "fp32", "cpu")


def test_a_failure_behind_the_inputs_is_blamed_on_them() -> None:
    with pytest.raises(InputError, match="its inputs are image, depth"), inputs.fitting(Two(), (IMAGE,)):
        raise TypeError("forward() missing 1 required positional argument")
