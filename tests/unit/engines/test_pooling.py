"""Pooling behind a convolution: what PyTorch does with NaN, infinities, ceil mode and counts, against a loop over windows."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from convoy.engines.activations import pool2d
from convoy.engines.base import Buffers, Knobs
from convoy.engines.manifest import load_engine
from convoy.measurement.data import Data
from convoy.measurement.device.detect import detect_target
from convoy.measurement.oracle import oracle
from convoy.problem import ConvProblem, Epilogue, LinearProblem
from tests.unit.engines.conv_cases import POOLS

CPU = detect_target("cpu")


def by_windows(image, pool):
    """The definition: each window alone."""
    n, k, h, w = image.shape
    p, q = pool.size(h, w)
    y = torch.zeros(n, k, p, q, dtype=image.dtype)
    for row, column in itertools.product(range(p), range(q)):
        top, left = row * pool.stride_h - pool.pad_h, column * pool.stride_w - pool.pad_w
        bottom, right = min(top + pool.window_h, h + pool.pad_h), min(left + pool.window_w, w + pool.pad_w)
        counted = (bottom - top) * (right - left)
        seen = image[:, :, max(top, 0) : min(bottom, h), max(left, 0) : min(right, w)].flatten(2)
        if pool.kind == "max":
            y[:, :, row, column] = torch.where(seen.isnan().any(2), math.nan, seen.amax(2))
        else:
            y[:, :, row, column] = seen.sum(2) / (counted if pool.count_include_pad else max(seen.shape[2], 1))
    return y


@pytest.mark.parametrize("name", POOLS)
def test_pooling_is_that_of_the_windows(name):
    pool = POOLS[name]
    image = torch.randn(2, 3, 11, 13, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    torch.testing.assert_close(pool2d(image, pool), by_windows(image, pool), rtol=1e-12, atol=1e-12)
    image[0, 0, 4, 5], image[0, 1, 2, 3], image[1, 2, 7, 7] = math.nan, -math.inf, math.inf
    image[1, 0] = -math.inf
    found, wanted = pool2d(image, pool), by_windows(image, pool)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert not torch.equal(found.isnan(), torch.zeros_like(found, dtype=torch.bool)) or name == "gaps"


@pytest.mark.parametrize("engine", ["aten", "reference"])
@pytest.mark.parametrize("name", POOLS)
def test_not_finite_inputs_come_out_as_pytorch_has_them(engine, name):
    problem = ConvProblem(1, 3, 10, 11, 4, 1, 1, epilogue=Epilogue(True, False, "relu", POOLS[name]), numerics="strict")
    x, weight, bias = torch.randn(1, 3, 10, 11), torch.randn(4, 3, 1, 1), torch.randn(4)
    x[0, 0, 3, 4], x[0, 1, 6, 2] = math.nan, -math.inf
    executable = load_engine(engine).build(problem, Knobs(), CPU)
    buffers = Buffers((x,), [torch.empty(problem.y_spec.shape)], executable.pack((weight, bias)))
    executable.launch(buffers, None)
    wanted = by_windows(torch.relu(torch.conv2d(x, weight, bias)), POOLS[name])
    torch.testing.assert_close(buffers.results[0], wanted, equal_nan=True)


def test_the_oracle_pools_last():
    pool = POOLS["3x3 stride 2, padded"]
    problem = ConvProblem(2, 3, 8, 9, 4, 3, 3, 1, 1, epilogue=Epilogue(True, True, "relu", pool))
    x, residual, weight, bias = (
        torch.randn(2, 3, 8, 9),
        torch.randn(2, 4, 8, 9),
        torch.randn(4, 3, 3, 3),
        torch.randn(4),
    )
    (y,) = oracle(problem, Data((x, residual), (weight, bias)))
    exact = torch.conv2d(x.double(), weight.double(), bias.double(), padding=1) + residual.double()
    torch.testing.assert_close(y, torch.max_pool2d(torch.relu(exact), 3, 2, 1), rtol=1e-12, atol=1e-12)


def test_every_other_engine_says_that_it_does_not_pool():
    problem = ConvProblem(1, 16, 12, 12, 16, 3, 3, 1, 1, epilogue=Epilogue(True, pool=POOLS["2x2"]))
    for layout, engine in itertools.product(("nchw", "nhwc"), ("gemm", "winograd2", "fft", "onednn")):
        support = load_engine(engine).supports(problem.with_layout(layout), CPU)
        assert "pooling" in support.reason
        assert load_engine(engine).supports(replace(problem, epilogue=Epilogue(True), layout=layout), CPU)
    assert not load_engine("gemm").supports(LinearProblem(1, 2, 3), CPU)
