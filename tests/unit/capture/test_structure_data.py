"""How results nest, as data: the containers come back as they were, and nothing else is read."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from convoy.capture import capture_inference
from convoy.capture.structure_data import structure_data, structure_from_data
from convoy.errors import InputError


class Nested(nn.Module):
    """Returns an ordered dict, as segmentation nets do, with the named tuple of `topk` in it."""

    def forward(self, x: torch.Tensor) -> Any:
        return OrderedDict(out=x + 1, best=torch.topk(x, 2)), [{"sum": x.sum()}, None]


def test_containers_come_back_as_they_were() -> None:
    x = torch.arange(6.0).view(2, 3)
    data = structure_data(capture_inference(Nested(), (x,)).results, "results")
    wanted = Nested()(x)
    leaves = [wanted[0]["out"], *wanted[0]["best"], wanted[1][0]["sum"]]
    found = structure_from_data(data, "results").unflatten(leaves)
    assert type(found[0]) is OrderedDict
    assert list(found[0]) == ["out", "best"]
    assert type(found[0]["best"]) is torch.return_types.topk
    assert found[0]["best"].indices is leaves[2]
    assert found[1] == [{"sum": leaves[3]}, None]


@pytest.mark.parametrize(
    "data",
    [
        ["return_type", "topk", "tensor"],
        ["return_type", "topk", "tensor", "tensor", "tensor"],
        ["return_type", "system", "tensor", "tensor"],
        ["return_type", ["topk"], "tensor", "tensor"],
        ["return_type"],
        ["ordered_dict", ["a", "tensor"], ["a", "tensor"]],
        ["ordered_dict", "a", "tensor"],
        ["set", "tensor"],
    ],
)
def test_other_data_is_refused(data: list[object]) -> None:
    with pytest.raises(InputError, match=r"results: got .* expected a structure of tensors"):
        structure_from_data(data, "results")
