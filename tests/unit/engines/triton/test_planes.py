"""Planes of halves: how many digits a value keeps, by its ratio to the largest one."""

import pytest
import torch

pytest.importorskip("triton")

from convoy.engines.triton.split_planes import split_weight


def relative_errors(ratio):
    """Of values that are so many powers of two below the largest of their filter."""
    values = torch.rand(1, 4096, 1, 1, generator=torch.Generator().manual_seed(1)) + 1  # in [1, 2)
    values *= 2.0**-ratio
    values[0, 0] = 1.5
    high, low, inverse = split_weight(values)
    found = (high.double() + low.double() / 2048) * inverse.double()[:, None, None, None]
    return ((found - values.double()).abs() / values.double())[0, 1:], (found - values.double()).abs()[0, 1:]


@pytest.mark.parametrize("ratio", [0, 1, 10, 20, 27])
def test_down_to_2_to_the_minus_28_a_value_keeps_22_bits(ratio):
    assert float(relative_errors(ratio)[0].max()) <= 2.0**-22


@pytest.mark.parametrize("ratio", [30, 36, 45, 60])
def test_below_that_the_error_is_a_part_of_the_largest_value(ratio):
    relative, absolute = relative_errors(ratio)
    assert float(absolute.max()) <= 2.0**-50
    assert float(relative.max()) > 2.0**-22
