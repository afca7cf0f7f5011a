"""ConvProblem: torch's arithmetic, canonical keys, refusals."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import pytest
import torch

from convoy.errors import InputError
from convoy.problem import ACTIVATIONS, ConvProblem, Epilogue, WeightMask, parse_problem

BASE = ConvProblem(2, 6, 9, 21, 4, 3, 5, 1, 2, 2, 1, 1, 2, 2, epilogue=Epilogue(True, True, "relu"))


def random_problem(rng: random.Random) -> ConvProblem | None:
    groups = rng.choice([1, 1, 2, 3])
    direction = rng.choice(["fprop", "dgrad", "wgrad"])
    try:
        return ConvProblem(
            n=rng.randrange(4),
            c=groups * rng.randint(1, 4),
            h=rng.randint(1, 12),
            w=rng.randint(1, 12),
            k=groups * rng.randint(1, 4),
            r=rng.randint(1, 5),
            s=rng.randint(1, 5),
            pad_h=rng.randrange(4),
            pad_w=rng.randrange(4),
            stride_h=rng.randint(1, 3),
            stride_w=rng.randint(1, 3),
            dilation_h=rng.randint(1, 3),
            dilation_w=rng.randint(1, 3),
            groups=groups,
            layout=rng.choice(["nchw", "nhwc", "blocked"]),
            x_dtype=rng.choice(["fp32", "fp16"]),
            numerics=rng.choice(["strict", "as_torch", "half"]),
            epilogue=Epilogue(rng.random() < 0.5, rng.random() < 0.5, rng.choice(ACTIVATIONS)),
            weight_mask=rng.choice(["", "0123456789abcdef"]),
            direction=direction,
            dynamic_weight=direction == "fprop" and rng.random() < 0.5,
        )
    except InputError:  # the output would be empty
        return None


def test_output_size_is_that_of_torch() -> None:
    rng = random.Random(7)
    seen = 0
    while seen < 100:
        problem = random_problem(rng)
        if problem is None:
            continue
        seen += 1
        y = torch.nn.functional.conv2d(
            torch.empty(problem.x_spec.shape),
            torch.empty(problem.weight_spec.shape),
            stride=(problem.stride_h, problem.stride_w),
            padding=(problem.pad_h, problem.pad_w),
            dilation=(problem.dilation_h, problem.dilation_w),
            groups=problem.groups,
        )
        assert tuple(y.shape) == problem.y_spec.shape


def test_an_empty_output_is_refused_exactly_where_torch_refuses_it() -> None:
    for h in range(1, 6):
        for dilation in (1, 2, 3):
            legal = h + 2 >= dilation * 2 + 1
            if legal:
                assert ConvProblem(1, 1, h, 9, 1, 3, 3, 1, 1, 1, 1, dilation, 1).p >= 1
            else:
                with pytest.raises(InputError, match="kernel_size"):
                    ConvProblem(1, 1, h, 9, 1, 3, 3, 1, 1, 1, 1, dilation, 1)


def test_keys_round_trip_and_tell_problems_apart() -> None:
    rng = random.Random(11)
    by_key: dict[str, ConvProblem] = {}
    for _ in range(400):
        problem = random_problem(rng)
        if problem is None:
            continue
        assert parse_problem(problem.key) == problem
        assert by_key.setdefault(problem.key, problem) == problem


@pytest.mark.parametrize("name", [f.name for f in fields(ConvProblem)])
def test_every_field_enters_the_key(name: str) -> None:
    other = {
        "layout": "nhwc",
        "direction": "dgrad",
        "numerics": "strict",
        "epilogue": Epilogue(),
        "weight_mask": "f" * 16,
        "groups": 1,
        "dynamic_weight": True,
        "mask": WeightMask((4, 3, 3, 5), bytes(23)),
    }
    value = other.get(name, "fp16" if name.endswith("dtype") else None)
    if value is None:
        value = getattr(BASE, name) + 2  # +2 keeps c and k divisible by the two groups
    assert replace(BASE, **{name: value}).key != BASE.key


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("c", 0),
        ("n", -1),
        ("pad_h", -1),
        ("stride_w", 0),
        ("dilation_h", 0),
        ("groups", 5),
        ("layout", "chwn"),
        ("x_dtype", "fp8"),
        ("direction", "backward"),
        ("numerics", "sloppy"),
    ],
)
def test_a_bad_field_is_named(field: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        replace(BASE, **{field: value})
    assert caught.value.argument == field


def test_malformed_keys_are_refused_and_never_crash() -> None:
    rng = random.Random(3)
    key = BASE.key
    refused = 0
    for _ in range(500):
        at = rng.randrange(len(key))
        text = key[:at] + rng.choice(["", "x", ":", "-1", "\n", "9" * 12]) + key[at + 1 :]
        try:
            assert parse_problem(text).key == text
        except InputError:
            refused += 1
    assert refused > 250


def test_counts_of_a_known_layer() -> None:
    layer = ConvProblem(1, 512, 14, 14, 512, 3, 3, 1, 1, x_dtype="fp16", weight_dtype="fp16", y_dtype="fp16")
    assert layer.flops == 2 * 512 * 512 * 9 * 196
    assert layer.bytes_min == 2 * (2 * 512 * 196 + 512 * 512 * 9)
    assert (layer.reduction_length, replace(layer, direction="wgrad").reduction_length) == (4608, 196)


def test_a_stride_longer_than_the_filter_leaves_bytes_out() -> None:
    x, others = 4 * 8 * 14 * 14, 4 * (8 * 16 + 16 * 7 * 7)
    layer = ConvProblem(1, 8, 14, 14, 16, 1, 1, 0, 0, 2, 2, layout="nhwc")
    assert layer.bytes_min == x // 4 + others
    assert replace(layer, layout="nchw").bytes_min == x // 2 + others  # whole rows
    assert replace(layer, direction="wgrad").bytes_min == layer.bytes_min
    assert replace(layer, direction="dgrad").bytes_min == x + others  # zeros are written too
    assert replace(layer, r=3, s=3, pad_h=1, pad_w=1).bytes_min == x + 4 * (8 * 16 * 9 + 16 * 7 * 7)


def test_epilogue_text() -> None:
    for bias in (False, True):
        for residual in (False, True):
            for activation in ACTIVATIONS:
                epilogue = Epilogue(bias, residual, activation)
                assert Epilogue.parse(str(epilogue)) == epilogue
    for text in ("relu+relu", "relu+silu", "bias+none", "swish", "+"):
        with pytest.raises(InputError):
            Epilogue.parse(text)
