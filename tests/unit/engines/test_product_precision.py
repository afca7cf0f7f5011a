"""Products are as exact as asked, and torch's flags are left as they were."""

import contextlib

import pytest
import torch

from convoy.engines.product_precision import products

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def flags():
    """torch's flags for this test, put back afterwards."""
    matmuls = (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)
    before = [m.fp32_precision for m in matmuls]
    yield matmuls
    for matmul, value in zip(matmuls, before, strict=True):
        matmul.fp32_precision = value


@pytest.mark.parametrize("numerics", ["strict", "half"])
def test_reduced_products_are_off_inside_and_back_afterwards(flags, numerics):
    mkldnn, cuda = flags
    mkldnn.fp32_precision, cuda.fp32_precision = "bf16", "tf32"
    with products(numerics, CPU):
        assert (mkldnn.fp32_precision, cuda.fp32_precision) == ("ieee", "tf32")
    with products(numerics, GPU):
        assert (mkldnn.fp32_precision, cuda.fp32_precision) == ("bf16", "ieee")
        assert not cuda.allow_fp16_reduced_precision_reduction
    assert (mkldnn.fp32_precision, cuda.fp32_precision) == ("bf16", "tf32")
    assert cuda.allow_fp16_reduced_precision_reduction


def test_flags_come_back_after_an_exception(flags):
    mkldnn, _ = flags
    mkldnn.fp32_precision = "bf16"
    with contextlib.suppress(ZeroDivisionError), products("strict", CPU):
        raise ZeroDivisionError
    assert mkldnn.fp32_precision == "bf16"


def test_as_torch_leaves_the_flags_alone(flags):
    mkldnn, _ = flags
    mkldnn.fp32_precision = "bf16"
    with products("as_torch", CPU):
        assert mkldnn.fp32_precision == "bf16"


def test_the_general_flag_counts_where_the_particular_one_is_not_set(flags):
    mkldnn, _ = flags
    before = torch.backends.fp32_precision
    try:
        mkldnn.fp32_precision = "none"
        torch.backends.fp32_precision = "tf32"
        with products("strict", CPU):
            assert mkldnn.fp32_precision == "ieee"
    finally:
        torch.backends.fp32_precision = before
