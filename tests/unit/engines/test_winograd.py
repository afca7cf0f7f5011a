"""Winograd: the transforms are the identity that they claim, exact products stay exact, chunks change nothing."""

from dataclasses import replace

import pytest
import torch

from convoy.engines.algorithms import winograd2, winograd4
from convoy.engines.algorithms.winograd_convolution import WinogradConvolution, chunks
from convoy.engines.algorithms.winograd_transforms import F2, F4
from convoy.measurement.accuracy import judge, make_data, oracle, relative_error, run_guarded
from convoy.problem import ConvProblem, Knobs
from convoy.target import Target

CPU = Target("cpu", "test", "avx2", 1, 1 << 33, 0)
GPU = Target("cuda", "test", "sm_90", 132, 80 << 30, 50 << 20)


def one_dimension(tile, pixels, taps):
    """A^T ((G g) * (B^T d)) of one tile, in float64."""
    room = [torch.full((1,), torch.nan, dtype=torch.float64) for _ in range(4)]
    read = [torch.empty(1, dtype=torch.float64) for _ in range(tile.side)]
    tile.read([pixels[i : i + 1] for i in range(tile.side)], read, room[: tile.read_rooms])
    weight = torch.tensor(tile.weight, dtype=torch.float64) @ taps
    written = [torch.empty(1, dtype=torch.float64) for _ in range(tile.m)]
    tile.write([r * w for r, w in zip(read, weight, strict=True)], written, room[: tile.write_rooms])
    return torch.cat(written)


@pytest.mark.parametrize("tile", [F2, F4], ids=["F2", "F4"])
def test_the_transforms_are_a_correlation(tile):
    for pixel in range(tile.side):
        for tap in range(3):
            pixels, taps = torch.zeros(tile.side, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
            pixels[pixel], taps[tap] = 1, 1
            expected = torch.tensor([float(pixel - tap == i) for i in range(tile.m)], dtype=torch.float64)
            assert torch.allclose(one_dimension(tile, pixels, taps), expected, atol=1e-15)


@pytest.mark.parametrize("tile", [F2, F4], ids=["F2", "F4"])
def test_the_second_position_reaches_every_output_once(tile):
    """Adding the bias to the products relies on this."""
    products = [torch.tensor([float(i == 1)]) for i in range(tile.side)]
    written = [torch.empty(1) for _ in range(tile.m)]
    tile.write(products, written, [torch.empty(1) for _ in range(tile.write_rooms)])
    assert torch.equal(torch.cat(written), torch.ones(tile.m))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("tile", [F2, F4], ids=["F2", "F4"])
@pytest.mark.parametrize(("images", "rows"), [(1, 1), (1, 2), (1, 3), (2, 4), (3, 4), (5, 4)])
def test_the_size_of_a_chunk_changes_nothing(tile, images, rows, layout):
    problem = ConvProblem(5, 3, 13, 7, 4, 3, 3, 1, 2, layout=layout)
    executable = WinogradConvolution(problem, tile, images, rows, torch.float32)
    verdict = judge(executable, "winograd", problem, make_data(problem, 1), "normal")
    assert verdict.ok, verdict.reason


def test_chunks_fit_a_cache_on_a_cpu_and_are_whole_on_a_gpu():
    problem = ConvProblem(8, 64, 224, 224, 64, 3, 3, 1, 1)
    images, rows = chunks(problem, F4, "cpu")[0]
    assert images == 1
    assert 4 << 20 < rows * 56 * 36 * 128 * 4 <= 8 << 20
    assert chunks(problem, F4, "cuda")[0] == (8, 56)
    small = ConvProblem(8, 64, 14, 14, 64, 3, 3, 1, 1)
    assert chunks(small, F4, "cpu")[0] == (8, 4)


def test_products_of_f4_do_not_follow_torchs_flags():
    """Where this CPU has bf16 products, torch's `medium` precision would use them."""
    problem, engine = ConvProblem(1, 256, 12, 12, 64, 3, 3, 1, 1), winograd4.ENGINE
    data = make_data(problem, 1)
    executable = engine.build(problem, engine.space(problem, CPU)[0], CPU)
    before = torch.backends.mkldnn.matmul.fp32_precision
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        found = run_guarded(executable, problem, data).results[0]
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert torch.equal(found, run_guarded(executable, problem, data).results[0])


def test_f4_is_less_exact_than_f2_and_both_are_worth_their_bounds():
    problem = ConvProblem(1, 128, 16, 16, 32, 3, 3, 1, 1)
    data = make_data(problem, 1)
    (exact,) = oracle(problem, data)
    errors = []
    for engine in (winograd2.ENGINE, winograd4.ENGINE):
        executable = engine.build(problem, engine.space(problem, CPU)[0], CPU)
        errors.append(relative_error(run_guarded(executable, problem, data).results[0], exact))
    assert 1e-8 < errors[0] < errors[1] < 1e-5


def test_f4_keeps_its_products_in_fp32():
    problem = ConvProblem(1, 8, 8, 8, 8, 3, 3, x_dtype="fp16", weight_dtype="fp16", y_dtype="fp16", numerics="half")
    assert winograd4.ENGINE.supports(problem, CPU)
    assert "F(4x4) with fp16 products is too inexact" in winograd4.ENGINE.supports(problem, GPU).reason
    assert winograd2.ENGINE.supports(problem, GPU)
    executable = winograd4.ENGINE.build(problem, winograd4.ENGINE.space(problem, CPU)[0], CPU)
    (packed,) = executable.pack([torch.randn(8, 8, 3, 3).half()])
    assert packed.dtype == torch.float32


def test_f2_offers_half_products_for_half_tensors_alone():
    whole = ConvProblem(1, 8, 8, 8, 8, 3, 3)
    half = replace(whole, x_dtype="fp16", weight_dtype="fp16", y_dtype="fp16")
    assert {k["products"] for k in winograd2.ENGINE.space(whole, GPU)} == {"fp32"}
    assert winograd2.ENGINE.space(half, GPU)[0]["products"] == "half"
    assert winograd2.ENGINE.space(half, CPU)[0]["products"] == "fp32"
    executable = winograd2.ENGINE.build(half, Knobs.of(images=1, rows=3, products="half"), GPU)
    assert executable.pack([torch.randn(8, 8, 3, 3).half()])[0].dtype == torch.float16


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (ConvProblem(1, 4, 5, 5, 4, 3, 1), "needs a 3x3 filter, got 3x1"),
        (ConvProblem(1, 4, 5, 5, 4, 3, 3, stride_h=2), "needs stride 1, got 2x1"),
        (ConvProblem(1, 4, 9, 9, 4, 3, 3, dilation_w=2), "needs dilation 1, got 1x2"),
        (ConvProblem(1, 4, 5, 5, 4, 3, 3, groups=2), "needs groups = 1, got 2: a tile's products are too small to pay"),
        (ConvProblem(1, 4, 5, 5, 4, 3, 3, direction="dgrad"), "computes fprop, got dgrad"),
        (
            ConvProblem(1, 4, 5, 5, 4, 3, 3, numerics="strict"),
            "rounds relative to the largest value of a tile, which numerics strict forbids",
        ),
    ],
)
@pytest.mark.parametrize("engine", [winograd2.ENGINE, winograd4.ENGINE], ids=lambda e: e.id)
def test_refusals(engine, problem, reason):
    assert engine.supports(problem, CPU).reason == reason
