"""Pool: torch's sizes and refusals, texts that read back, and problems whose keys stay what they were."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import pytest
import torch
from torch.nn import functional

from convoy.errors import InputError
from convoy.problem import ConvProblem, Epilogue, LinearProblem, Pool, TensorSpec, parse_problem

MAX = Pool("max", 3, 2, 2, 1, 1, 0)


def test_sizes_are_those_of_torch_and_what_torch_refuses_is_refused() -> None:
    seen = refused = 0
    sides = itertools.product(range(1, 8), range(1, 5), range(1, 5), range(3), (False, True), ("max", "avg"))
    for side, window, stride, pad, ceil_mode, kind in sides:
        image = torch.zeros(1, 1, side, side)
        options = {"kernel_size": window, "stride": stride, "padding": pad, "ceil_mode": ceil_mode}
        try:
            found = (functional.max_pool2d if kind == "max" else functional.avg_pool2d)(image, **options)
            wanted = tuple(found.shape[2:])
        except RuntimeError:
            wanted = None
        try:
            pool = Pool(kind, window, window, stride, stride, pad, pad, ceil_mode)
            assert pool.size(side, side) == wanted
            seen += 1
        except InputError:
            assert wanted is None
            refused += 1
    assert seen > 500
    assert refused > 100


def test_texts_round_trip_and_tell_poolings_apart() -> None:
    texts: dict[str, Pool] = {}
    for kind, window, stride, pad, ceil_mode, counted in itertools.product(
        ("max", "avg"), (2, 3), (1, 2), (0, 1), (False, True), (False, True)
    ):
        if kind == "avg" or not counted:
            pool = Pool(kind, window, 4, stride, 5, pad, 2, ceil_mode, counted)
            assert Pool.parse(str(pool)) == pool
            assert texts.setdefault(str(pool), pool) == pool
    assert str(MAX) == "max3x2s2x1p1x0"
    assert str(Pool("avg", 3, 3, 2, 2, 1, 1, ceil_mode=True, count_include_pad=True)) == "avg3x3s2x2p1x1ci"


@pytest.mark.parametrize(
    "text", ["max", "max2x2", "min2x2s2x2p0x0", "max2x2s2x2p0x0i", "avg2x2s2x2p0x0ic", "max2x2s0x2p0x0"]
)
def test_texts_that_are_no_pooling_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        Pool.parse(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [("kind", "mean"), ("window_h", 0), ("stride_w", 0), ("pad_h", 2), ("pad_w", -1), ("count_include_pad", True)],
)
def test_what_torch_would_refuse_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InputError, match="pool" if field == "kind" else field):
        replace(MAX, **{field: value})


@pytest.mark.parametrize("name", [f.name for f in fields(Pool)])
def test_every_field_enters_the_problems_key(name: str) -> None:
    pool = Pool("avg", 4, 4, 2, 2, 1, 1)
    other = {"kind": "max", "ceil_mode": True, "count_include_pad": True}.get(name, 0 if name.startswith("pad") else 3)
    first, second = (
        ConvProblem(1, 3, 9, 9, 4, 3, 3, epilogue=Epilogue(True, activation="relu", pool=p))
        for p in (pool, replace(pool, **{name: other}))
    )
    assert first.key != second.key
    assert (parse_problem(first.key), parse_problem(second.key)) == (first, second)


def test_a_problem_pools_what_its_convolution_gives() -> None:
    plain = ConvProblem(2, 3, 10, 9, 4, 3, 3, 1, 1, epilogue=Epilogue(True, True, "relu"))
    pooled = replace(plain, epilogue=replace(plain.epilogue, pool=MAX))
    assert str(pooled.epilogue) == "bias+residual+relu+max3x2s2x1p1x0"
    assert (pooled.p, pooled.q) == (plain.p, plain.q) == (10, 9)
    assert pooled.conv_spec == plain.conv_spec == plain.y_spec
    assert pooled.y_spec == TensorSpec((2, 4, 5, 8), "fp32")
    assert pooled.flops == plain.flops
    assert plain.bytes_min - pooled.bytes_min == plain.y_spec.size_bytes - pooled.y_spec.size_bytes
    assert pooled.key == plain.key + "+max3x2s2x1p1x0"


def test_no_pooling_where_there_is_none_to_do() -> None:
    with pytest.raises(InputError, match="pool"):
        ConvProblem(1, 3, 5, 5, 4, 3, 3, epilogue=Epilogue(pool=Pool("max", 9, 9, 1, 1)))
    with pytest.raises(InputError, match="dgrad"):
        ConvProblem(1, 3, 9, 9, 4, 3, 3, epilogue=Epilogue(pool=MAX), direction="dgrad")
    with pytest.raises(InputError, match="linear"):
        LinearProblem(1, 2, 3, epilogue=Epilogue(pool=MAX))


def test_keys_without_pooling_are_what_they_were() -> None:
    key = "conv:fprop:n1c64h56w56k64r3s3:p1x1:s1x1:d1x1:g1:nhwc:fp32.fp32.fp32.fp32:as_torch:bias+relu"
    problem = parse_problem(key)
    assert isinstance(problem, ConvProblem)
    assert problem.key == key
    assert problem.epilogue.pool is None
    assert Epilogue.parse("none") == Epilogue()
    for text in ("none+max2x2s2x2p0x0", "max2x2s2x2p0x0+relu", "bias+max2x2s2x2p0x0+max2x2s2x2p0x0"):
        with pytest.raises(InputError):
            Epilogue.parse(text)
