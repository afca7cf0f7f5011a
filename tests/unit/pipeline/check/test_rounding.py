"""Rounded tensors are off by no more than one rounding, the same every time."""

from __future__ import annotations

import pytest
import torch

from convoy.engines.torch_flags import cudnn_conv_flags
from convoy.pipeline.check.rounding import TF32_ROUNDING, InputPerturbation, fixed_seed, unit_roundoff


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_are_off_by_one_rounding_at_most_and_most_of_them_are(dtype: torch.dtype):
    x = torch.randn(64, 3, 5, 7).to(dtype).to(memory_format=torch.channels_last)
    unit = 2.0**-6
    found = InputPerturbation(unit)(x)
    assert (found.dtype, found.stride()) == (dtype, x.stride())
    off = ((found.double() - x.double()) / x.double()).abs()
    assert off.max() <= unit + torch.finfo(dtype).eps
    assert off.mean() > unit / 3
    assert torch.equal(found, InputPerturbation(unit)(x))


def test_tensors_of_one_shape_are_off_differently_and_integers_stay():
    shake = InputPerturbation(2.0**-8)
    x = torch.ones(100)
    assert not torch.equal(shake(x), shake(x))
    labels = torch.arange(3)
    assert shake(labels) is labels


def test_the_least_precise_dtype_says_what_a_rounding_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert unit_roundoff([torch.float32, torch.int64], cuda=False) == 2.0**-24
    assert unit_roundoff([torch.float32, torch.bfloat16], cuda=False) == 2.0**-8
    assert unit_roundoff([torch.float32], cuda=True) == TF32_ROUNDING
    assert unit_roundoff([torch.float32, torch.bfloat16], cuda=True) == 2.0**-8
    assert unit_roundoff([torch.float64], cuda=True) == 2.0**-53
    assert unit_roundoff([torch.int64], cuda=True) == 0.0
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert unit_roundoff([torch.float32], cuda=True) == 2.0**-24


def test_the_newer_precision_settings_alone_are_read_too(monkeypatch: pytest.MonkeyPatch):
    """`allow_tf32` raises an error where convolutions and RNNs differ."""
    monkeypatch.setattr(cudnn_conv_flags(), "fp32_precision", "ieee")
    assert unit_roundoff([torch.float32], cuda=True) == 2.0**-24
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    assert unit_roundoff([torch.float32], cuda=True) == TF32_ROUNDING


def test_a_seeded_run_leaves_the_generator_as_it_was():
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    with fixed_seed():
        first = torch.rand(2)
    with fixed_seed():
        assert torch.equal(first, torch.rand(2))
    assert torch.equal(torch.rand(2), wanted)
