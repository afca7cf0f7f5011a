"""The problems that cuda.swapped takes and refuses, its settings and packed weights, and NVRTC's code; no device needed."""

import math
from dataclasses import replace

import pytest
import torch

from convoy.engines.hopper import hopper_support_checks
from convoy.engines.hopper import igemm_swap_ab_tile_search as tile_search
from convoy.engines.hopper.igemm_swap_ab import ENGINE, in_blocks
from convoy.engines.hopper.igemm_swap_ab_limits import CHANNELS, SHARED_BYTES
from convoy.engines.hopper.igemm_swap_ab_tile_config import SwapAbTile as Form
from convoy.engines.hopper.igemm_swap_ab_tile_search import estimate_us
from convoy.engines.hopper.igemm_swap_ab_variants import WideForm
from convoy.engines.sparse_weights import sparse24_tile
from convoy.errors import InputError
from convoy.problem import ConvProblem, Epilogue
from convoy.target import Target
from tests.unit.engines.spills import assert_no_spills

GPU = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
TYPES = {"x_dtype": "fp16", "weight_dtype": "fp16", "y_dtype": "fp16", "numerics": "half", "layout": "nhwc"}
LARGE = ConvProblem(32, 256, 14, 14, 256, 3, 3, 1, 1, **TYPES)
SINGLE = ConvProblem(1, 512, 28, 28, 512, 3, 3, 1, 1, **TYPES)
POINT = ConvProblem(1, 2048, 7, 7, 512, 1, 1, **TYPES)
FLOAT = replace(LARGE, x_dtype="fp32", weight_dtype="fp32", y_dtype="fp32", numerics="as_torch")
WIDE = WideForm(64, 32, 4, 1, 1)
FULL = Epilogue(bias=True, residual=True, activation="relu")


pytestmark = pytest.mark.usefixtures("libraries_are_there")


@pytest.mark.parametrize(
    ("problem", "target", "reason"),
    [
        (replace(LARGE, layout="nchw"), GPU, "needs layout nhwc"),
        (replace(LARGE, direction="dgrad"), GPU, "direction fprop only"),
        (replace(FLOAT, numerics="strict"), GPU, "strict forbids"),
        (replace(FLOAT, c=62), GPU, "multiples of 4"),
        (replace(LARGE, groups=2), GPU, "groups = 1"),
        (replace(LARGE, c=60), GPU, "multiples of 8"),
        (replace(LARGE, k=12), GPU, "multiples of 8"),
        (replace(LARGE, pad_h=150, pad_w=1), GPU, "padding and filter under 128"),
        (replace(LARGE, stride_h=9), GPU, "strides up to 8"),
        (replace(LARGE, n=1 << 16), GPU, "2^31"),
        (LARGE, replace(GPU, arch="sm_80"), "capability 9.0 or newer"),
        (LARGE, replace(GPU, arch="sm_100"), "capability 9.0 alone"),
    ],
)
def test_refusals_say_why(problem, target, reason):
    support = ENGINE.accepts(problem, target)
    assert not support
    assert reason in support.reason


def test_missing_bindings_are_a_reason(monkeypatch):
    monkeypatch.setattr(hopper_support_checks, "absence", lambda: "needs cuda-core")
    assert ENGINE.accepts(LARGE, GPU).reason == "needs cuda-core"


def test_a_batch_of_no_images_is_taken():
    assert ENGINE.accepts(replace(LARGE, n=0), GPU)


@pytest.mark.parametrize("problem", [LARGE, SINGLE, POINT, FLOAT, replace(LARGE, k=8), replace(SINGLE, h=7, w=7)])
def test_spaces_are_finite_distinct_and_ordered_by_their_guess(problem):
    assert ENGINE.accepts(problem, GPU)
    space = list(ENGINE.space(problem, GPU))
    assert 0 < len(space) <= 40
    assert len(set(space)) == len(space)
    guesses = [ENGINE.estimate_us(problem, knobs, GPU) for knobs in space]
    assert guesses == sorted(guesses)
    assert all(0 < guess < math.inf for guess in guesses)
    for knobs in space:
        form = ENGINE.tile_config_class(problem).of(knobs)
        assert form.knobs == knobs
        assert not (form.wide and form.staged)
        assert form.shared_bytes <= SHARED_BYTES[form.blocks]
        assert form.fits(problem)
        steps, each = form.steps(problem), form.each(problem)
        assert (form.split - 1) * each < steps <= form.split * each, "every block of a split has work"


def test_a_layer_of_few_tiles_is_split_and_a_3x3_layer_has_a_halo():
    found = [Form.of(knobs) for knobs in ENGINE.space(SINGLE, GPU)]
    assert found[0].halo
    assert {form.split for form in found} >= {1, 2}
    assert {form.halo for form in found} == {0, 29, 32}, "rows of one column more than the image, or of whole eights"


@pytest.mark.parametrize("problem", [LARGE, SINGLE, POINT])
def test_of_forms_that_hardly_differ_one_is_tried(problem):
    found = [Form.of(knobs) for knobs in ENGINE.space(problem, GPU)]
    plain = [replace(form, stages=0, staged=0, depth=1 if form.halo else form.depth) for form in found]
    assert len(set(plain)) == len(plain)
    roomy = [form for form in found if form.halo and form.filters * form.blocks == 64]
    assert {form.depth for form in roomy} <= {3}, "of twins the better guess"


def test_a_compressed_weight_has_its_own_numbers():
    dense, sparse = Form(64, 64, 6, 1, 1), sparse24_tile.Sparse24Tile(64, 64, 6, 1, 1)
    assert estimate_us(SINGLE, dense, 132) != pytest.approx(estimate_us(SINGLE, sparse, 132), rel=0.01)


def test_a_split_keeps_fewer_boxes_of_pixels():
    form = Form(64, 64, 4, 1, 1, staged=1, halo=16)
    assert form.halos == 3
    assert replace(form, split=2).halos == 2
    assert replace(form, halo=0).halos == 0


@pytest.mark.parametrize("form", [Form(64, 16, 3, 1, 1), Form(128, 64, 3, 2, 1, staged=1, halo=16)])
@pytest.mark.parametrize("shape", [(8, 8, 1, 1), (136, 72, 3, 3), (64, 128, 1, 2)])
def test_packed_weights_are_in_the_order_of_the_copies(shape, form):
    k, c, r, s = shape
    weight = torch.arange(1, k * c * r * s + 1).reshape(shape).to(torch.int16)
    packed = in_blocks(weight, form)
    blocks, taps = -(-c // CHANNELS), r * s
    assert packed.shape == (-(-k // form.filters), taps * blocks, form.filters, CHANNELS)
    found = torch.zeros(packed.shape[0] * form.filters, blocks * CHANNELS, taps, dtype=torch.int16)
    for block in range(taps * blocks):
        tap, part = (block % taps, block // taps) if form.halo else (block // blocks, block % blocks)
        for row in range(form.filters):
            for piece in range(8):  # the 128-byte swizzle: piece p of row r lies at p ^ r % 8
                at = (piece ^ row % 8) * 8
                values = packed[:, block, row, at : at + 8]
                found[row :: form.filters, part * CHANNELS + piece * 8 : part * CHANNELS + piece * 8 + 8, tap] = values
    assert torch.equal(found[:k, :c].reshape(shape), weight)
    assert not found[k:].any()
    assert not found[:, c:].any()


def test_a_block_of_fp32_has_half_of_the_channels_rounded_as_tf32_is():
    weight = torch.randn(64, 40, 1, 1, generator=torch.Generator().manual_seed(5))
    packed = ENGINE.build(replace(FLOAT, c=40, k=64, r=1, s=1, pad_h=0, pad_w=0), WIDE.knobs, GPU).in_order(weight)
    assert packed.shape == (1, 2, 64, CHANNELS // 2)
    assert packed.count_nonzero() == weight.numel()
    assert torch.equal(packed.view(torch.int32) & 0x1FFF, torch.zeros_like(packed, dtype=torch.int32))


def test_filters_that_are_not_there_fill_a_cluster():
    assert in_blocks(torch.ones(72, 8, 1, 1).half(), Form(64, 32, 4, 1, 4)).shape == (4, 1, 64, CHANNELS)


def test_a_halo_where_none_fits_is_refused():
    form = Form(64, 64, 4, 1, 1, staged=1, halo=16)
    with pytest.raises(InputError, match="halo"):
        ENGINE.build(replace(LARGE, stride_h=2), form.knobs, GPU)


@pytest.mark.parametrize("epilogue", [Epilogue(), FULL])
@pytest.mark.parametrize("layer", [LARGE, SINGLE, POINT, FLOAT])
def test_the_first_guess_compiles_without_spills_or_serialised_products(layer, epilogue):
    bindings = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        bindings.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(str(error))
    problem = replace(layer, epilogue=epilogue)
    executable = ENGINE.build(problem, ENGINE.space(problem, GPU)[0], GPU)
    assert_no_spills(executable.log)
    assert "0 bytes stack frame" in executable.log
    assert "serialized" not in executable.log


def test_layers_that_differ_in_their_epilogue_share_what_it_does_not_decide():
    """Candidates are made once for a geometry, and every layer orders them as if they were its own."""
    for made in (SINGLE, POINT):
        for epilogue in (
            Epilogue(),
            Epilogue(True, True, "relu"),
            Epilogue(True, False, "silu"),
            Epilogue(True, True, "gelu"),
        ):
            problem = replace(made, epilogue=epilogue)
            plain = [form for form, _, _ in tile_search._candidates(problem, 132, Form)]
            shared = tile_search._timed_candidates(tile_search._without_likes(problem), 132, Form)
            assert [form for form, _ in shared] == plain
            estimates = [estimate_us(problem, form, 132) for form in plain]
            assert [tile_search._with_memory_us(form, busy, problem.bytes_min) for form, busy in shared] == estimates
            chosen = [estimate_us(problem, form, 132) for form in tile_search.forms(problem, 132, Form)]
            assert chosen == sorted(chosen)
            assert chosen[0] == min(estimates)
