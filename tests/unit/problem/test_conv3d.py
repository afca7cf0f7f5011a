"""Conv3dProblem: torch's arithmetic, canonical keys, refusals, and the 2-D problems that compute the same."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from convoy.errors import InputError
from convoy.problem import ACTIVATIONS, Conv3dProblem, Epilogue, Pool, parse_problem
from convoy.problem.conv3d import Triple

BASE = Conv3dProblem(2, 6, (7, 9, 8), 4, (3, 1, 5), (1, 0, 2), (2, 1, 2), (1, 2, 1), 2, "ndhwc")


def drawn(rng: random.Random, least: int, most: int) -> Triple:
    return rng.randint(least, most), rng.randint(least, most), rng.randint(least, most)


def random_problem(rng: random.Random) -> Conv3dProblem:
    while True:
        groups, direction = rng.choice([1, 1, 2]), rng.choice(["fprop", "dgrad", "wgrad"])
        try:
            return Conv3dProblem(
                *(rng.randrange(3), groups * rng.randint(1, 3), drawn(rng, 1, 9), groups * rng.randint(1, 3)),
                *(drawn(rng, 1, 3), drawn(rng, 0, 2), drawn(rng, 1, 3), drawn(rng, 1, 2), groups),
                layout=rng.choice(["ncdhw", "ndhwc"]),
                dtype=rng.choice(["fp32", "fp16", "bf16", "fp64"]),
                numerics=rng.choice(["strict", "as_torch", "half"]),
                epilogue=Epilogue(rng.random() < 0.5, rng.random() < 0.5, rng.choice(ACTIVATIONS)),
                direction=direction,
                dynamic_weight=direction == "fprop" and rng.random() < 0.5,
            )
        except InputError:  # the output would be empty
            continue


def test_output_size_is_that_of_torch_and_keys_are_read_back() -> None:
    rng = random.Random(3)
    problems = [random_problem(rng) for _ in range(60)]
    for problem in problems:
        y = torch.nn.functional.conv3d(
            *(torch.empty(problem.x_spec.shape), torch.empty(problem.weight_spec.shape), None),
            *(problem.stride, problem.pad, problem.dilation, problem.groups),
        )
        assert tuple(y.shape) == problem.y_spec.shape
        assert parse_problem(problem.key) == problem
    assert len({problem.key for problem in problems}) == len(set(problems))


def test_work_is_counted_by_products() -> None:
    assert BASE.y_size == (4, 9, 4)
    assert BASE.flops == 2 * (2 * 4 * 4 * 9 * 4) * 3 * (3 * 1 * 5)
    assert BASE.reduction_length == 3 * 15
    assert replace(BASE, direction="wgrad").reduction_length == BASE.pixels
    assert replace(BASE, direction="dgrad").reduction_length == 2 * 15


@pytest.mark.parametrize(
    "key", ["conv3d", BASE.key + ":", BASE.key.replace("t3", "t0"), BASE.key.replace("ndhwc", "nhwc")]
)
def test_other_texts_are_refused(key: str) -> None:
    with pytest.raises(InputError):
        parse_problem(key)


def test_refusals_name_the_field() -> None:
    with pytest.raises(InputError, match="stride"):
        replace(BASE, stride=(1, 0, 1))
    with pytest.raises(InputError, match="groups"):
        replace(BASE, groups=4)
    with pytest.raises(InputError, match="kernel_size"):
        replace(BASE, window=(10, 1, 1))
    with pytest.raises(InputError, match="dtype"):
        replace(BASE, dtype="i8")
    with pytest.raises(InputError, match="dynamic_weight"):
        replace(BASE, direction="dgrad", dynamic_weight=True)
    with pytest.raises(InputError, match="pooling"):
        replace(BASE, epilogue=Epilogue(pool=Pool("max", 2, 2, 2, 2)))


def test_the_2d_problem_has_the_same_work() -> None:
    flat = Conv3dProblem(2, 3, (4, 8, 9), 6, (1, 3, 3), (0, 1, 1), (1, 2, 2), (5, 1, 1), 3, "ndhwc")
    tall = Conv3dProblem(2, 3, (4, 8, 9), 6, (3, 1, 1), (1, 0, 0), (2, 1, 1))
    for problem in (flat, tall, tall.with_layout("ndhwc"), replace(tall, window=(1, 1, 1), pad=(0, 0, 0))):
        plane = problem.as_2d()
        assert plane is not None
        assert (plane.flops, plane.bytes_min) == (problem.flops, problem.bytes_min)
    assert str(flat.as_2d()).startswith("conv:fprop:n8c3h8w9k6r3s3:p1x1:s2x2:d1x1:g3:nhwc:")
    assert str(tall.as_2d()).startswith("conv:fprop:n2c3h4w72k6r3s1:p1x0:s2x1:d1x1:g1:nchw:")


def test_other_convolutions_have_no_2d_problem() -> None:
    flat = Conv3dProblem(2, 3, (4, 8, 9), 6, (1, 3, 3), layout="ndhwc")
    others = (
        *(flat.with_layout("ncdhw"), replace(flat, stride=(2, 1, 1)), replace(flat, pad=(1, 0, 0)), BASE),
        *(replace(flat, window=(3, 1, 1), stride=(1, 1, 2)), replace(flat, window=(3, 1, 1), pad=(0, 1, 0))),
    )
    assert [problem.as_2d() for problem in others] == [None] * len(others)
