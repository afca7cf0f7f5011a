"""FFT convolution: lengths, tiles, spectra of fair size, precision that does not come from the weight."""

from dataclasses import replace

import pytest
import torch

from convoy.engines.algorithms import fft, fft_tiled
from convoy.engines.algorithms.fft_convolution import SpectralConvolution, fast_length
from convoy.measurement.accuracy import judge, make_data
from convoy.problem import ConvProblem, Knobs
from convoy.target import Target

CPU = Target("cpu", "test", "avx2", 1, 1 << 33, 0)


@pytest.mark.parametrize(
    ("least", "length"), [(1, 2), (2, 2), (7, 8), (9, 10), (11, 12), (13, 16), (17, 18), (101, 108)]
)
def test_lengths_are_even_and_without_large_factors(least, length):
    assert fast_length(least) == length


def test_the_weights_spectrum_must_be_of_fair_size():
    problem = ConvProblem(1, 512, 28, 28, 512, 3, 3, 1, 1)
    size = 30 * 16 * 512 * 512 * 8
    assert not fft.ENGINE.supports(problem, replace(CPU, memory_bytes=31 * size))
    assert fft.ENGINE.supports(problem, replace(CPU, memory_bytes=33 * size))
    refused = fft.ENGINE.supports(problem, CPU)
    assert refused.reason == f"the weight's spectrum would take {size >> 20} MiB, over 256 MiB"


def test_tiles_are_smaller_than_the_image_and_at_least_half_new():
    problem = ConvProblem(1, 4, 100, 20, 4, 5, 5, 2, 2)
    assert [k.integer("tile") for k in fft_tiled.ENGINE.space(problem, CPU)] == [32, 64, 16]
    small = ConvProblem(1, 4, 8, 8, 4, 5, 5)
    assert "no tile of 8 to 64 pixels is twice the filter's span of 5x5" in fft_tiled.ENGINE.supports(small, CPU).reason
    dilated = ConvProblem(1, 4, 100, 100, 4, 3, 3, dilation_h=40, dilation_w=1)
    assert "span of 81x3" in fft_tiled.ENGINE.supports(dilated, CPU).reason


def test_a_tile_whose_spectrum_is_too_large_is_not_offered():
    problem = ConvProblem(1, 256, 100, 100, 256, 3, 3)
    roomy = replace(CPU, memory_bytes=1 << 35)
    tight = replace(CPU, memory_bytes=32 * 20 * 10 * 256 * 256 * 8)
    assert [k.integer("tile") for k in fft_tiled.ENGINE.space(problem, roomy)] == [16, 32, 8]
    assert [k.integer("tile") for k in fft_tiled.ENGINE.space(problem, tight)] == [16, 8]
    assert fft_tiled.ENGINE.supports(problem, tight)


@pytest.mark.parametrize("sides", [(9, 9), (16, 12), (64, 64)])
def test_any_tile_that_holds_the_filter_gives_the_same_results(sides):
    problem = ConvProblem(3, 3, 21, 18, 5, 4, 3, 2, 1)
    executable = SpectralConvolution(problem, *sides, images=2)
    for kind in ("integer", "normal"):
        assert judge(executable, "fft", problem, make_data(problem, 1, kind), kind).ok


def test_the_spectrum_is_rounded_once():
    problem = ConvProblem(1, 2, 8, 8, 3, 3, 3)
    executable = fft.ENGINE.build(problem, Knobs.of(images=1), CPU)
    weight = torch.randn(3, 2, 3, 3)
    (packed,) = executable.pack([weight])
    spread = torch.zeros(3, 2, 8, 8, dtype=torch.float64)
    spread[..., :3, :3] = weight
    expected = torch.fft.rfft2(spread).conj().flatten(2).permute(2, 1, 0).to(torch.complex64)
    assert torch.equal(packed, expected)
    assert executable.resident_bytes((packed,)) == 8 * 5 * 6 * 8
