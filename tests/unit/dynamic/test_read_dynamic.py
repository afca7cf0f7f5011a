"""`optimize(dynamic=...)`: what is understood, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.export import Dim

from convoy.dynamic.dims import DynamicDims
from convoy.dynamic.read_dynamic import read_dynamic
from convoy.errors import InputError

IMAGE, DEPTH, SCALE = torch.zeros(4, 3, 8, 6), torch.zeros(4, 1, 8, 6), torch.zeros(5)


def forward(image: Any, depth: Any, scale: Any) -> None:
    del image, depth, scale


def read(dynamic: Any) -> DynamicDims:
    return read_dynamic(dynamic, forward, (IMAGE, DEPTH), {"scale": SCALE})


def test_a_range_by_dimension_is_of_all_inputs_of_the_same_size_there() -> None:
    found = read({2: [8, 32], 0: (1, 64)})
    assert [(one.least, one.most, one.example, one.places) for one in found.ranges] == [
        (1, 64, 4, ((0, 0), (1, 0))),
        (8, 32, 8, ((0, 2), (1, 2))),
    ]
    assert found.batch is found.ranges[0]
    assert found.example == (4, 8)


@pytest.mark.parametrize(
    "dynamic",
    [
        {"image": {0: Dim("b", min=1, max=64)}, "depth": {0: Dim("b", min=1, max=64)}},
        ({0: Dim("b", min=1, max=64)}, {0: (1, 64)}, None),
        [[(1, 64), None, None, 6], {0: Dim("other", min=1, max=64)}, None],
    ],
)
def test_dynamic_shapes_of_torch_export_are_taken(dynamic: Any) -> None:
    (batch,) = read(dynamic).ranges
    assert (batch.least, batch.most, batch.places) == (1, 64, ((0, 0), (1, 0)))


def test_dimensions_of_one_dim_always_have_one_size() -> None:
    side = Dim("side", min=2, max=32)
    found = read(({2: side, 3: (6, 12)}, {2: side}, None))
    assert [one.places for one in found.ranges] == [((0, 2), (1, 2)), ((0, 3),)]
    assert found.batch is None
    call = found.resized(((IMAGE, DEPTH), {"scale": SCALE}), (16, 7))
    assert [tuple(t.shape) for t in (*call[0], call[1]["scale"])] == [(4, 3, 16, 7), (4, 1, 16, 6), (5,)]
    assert found.sizes_of([*call[0], SCALE]) == (16, 7)
    assert found.sizes_of([call[0][0], DEPTH, SCALE]) is None


@pytest.mark.parametrize(
    ("dynamic", "argument"),
    [
        ({}, "dynamic"),
        (7, "dynamic"),
        ("batch", "dynamic"),
        ({4: (1, 2)}, "dynamic"),
        ({-1: (1, 2)}, "dynamic"),
        ({0: (0, 8)}, "dynamic[0]"),
        ({0: (-4, 8)}, "dynamic[0]"),
        ({0: (8, 1)}, "dynamic[0]"),
        ({0: (5, 8)}, "dynamic[0]"),
        ({0: (1, 1 << 20)}, "dynamic[0]"),
        ({0: (1.0, 8)}, "dynamic[0]"),
        ({0: (True, 8)}, "dynamic[0]"),
        ({0: 4}, "dynamic[0]"),
        ({0: (1, 2, 4)}, "dynamic[0]"),
        ({0: Dim("b")}, "dynamic[0]"),
        ({0: Dim.AUTO}, "dynamic[0]"),
        ({0: None}, "dynamic[0]"),
        ({"picture": {0: (1, 8)}}, "dynamic"),
        ({"image": {9: (1, 8)}}, "dynamic"),
        ({"image": (1, 8)}, "dynamic"),
        (({0: (1, 8)},), "dynamic"),
        (({0: (1, 8)}, {0: (1, 9)}, None), "dynamic: dimension 0 of input 1"),
        ({"image": {0: (1, 8)}, "scale": {0: (1, 8)}}, "dynamic: dimension 0 of input 2"),
        ((None, None, None), "dynamic"),
    ],
)
def test_what_cannot_be_used_is_named(dynamic: Any, argument: str) -> None:
    with pytest.raises(InputError) as caught:
        read(dynamic)
    assert caught.value.argument == argument


def test_padding_and_resizing_keep_the_memory_format() -> None:
    found = read_dynamic({0: (1, 64)}, forward, (IMAGE,), {})
    images = torch.arange(5 * 3 * 2 * 2.0).reshape(5, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    ((padded,), _) = found.images(((images,), {}), 3, 2, 4)
    assert padded.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(padded, images[[3, 4, 4, 4]])
    ((larger,), _) = found.resized(((images[:2],), {}), (5,))
    assert larger.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(larger, images[[0, 1, 0, 1, 0]])
