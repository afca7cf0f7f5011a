"""The problems that cuda.first_layer takes and refuses, its settings and packed weights, and NVRTC's code; no device needed."""

import math
from dataclasses import replace

import pytest
import torch

from convoy.engines.hopper import first_layer_tf32, hopper_support_checks
from convoy.engines.hopper.first_layer import ENGINE
from convoy.engines.hopper.first_layer_tile_config import SHARED_BYTES, Layer, in_slices
from convoy.engines.hopper.first_layer_tile_config import FirstLayerTile as Form
from convoy.errors import InputError
from convoy.problem import ConvProblem, Epilogue, Knobs, Pool
from convoy.target import Target
from tests.unit.engines.spills import assert_no_spills

GPU = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
POOL = Pool("max", 3, 3, 2, 2, 1, 1)
TYPES = {"x_dtype": "fp16", "weight_dtype": "fp16", "y_dtype": "fp16", "numerics": "half", "layout": "nhwc"}
BARE = ConvProblem(32, 3, 224, 224, 64, 7, 7, 3, 3, 2, 2, epilogue=Epilogue(bias=True, activation="relu"), **TYPES)
POOLED = replace(BARE, epilogue=replace(BARE.epilogue, pool=POOL))
SMALL = ConvProblem(1, 3, 299, 299, 32, 3, 3, 0, 0, 2, 2, **TYPES)
FULL = replace(BARE, **dict.fromkeys(("x_dtype", "weight_dtype", "y_dtype"), "fp32"), numerics="as_torch")
WIDE = ConvProblem(32, 3, 224, 224, 64, 11, 11, 2, 2, 4, 4, **TYPES)


pytestmark = pytest.mark.usefixtures("libraries_are_there")


def pooling(pool, **change):
    return replace(POOLED, epilogue=replace(POOLED.epilogue, pool=pool, **change))


@pytest.mark.parametrize(
    ("problem", "target", "reason"),
    [
        (replace(BARE, layout="nchw"), GPU, "needs layout nhwc"),
        (replace(BARE, direction="wgrad", epilogue=Epilogue()), GPU, "direction fprop only"),
        (replace(BARE, x_dtype="fp32", weight_dtype="fp32", y_dtype="fp32"), GPU, "needs fp16 or bf16"),
        (replace(BARE, c=8), GPU, "at most 4 channels"),
        (replace(BARE, dilation_h=2), GPU, "dilation 1"),
        (replace(BARE, epilogue=Epilogue(residual=True)), GPU, "no residual"),
        (replace(BARE, stride_w=1), GPU, "stride of 2 or 4"),
        (replace(BARE, k=96), GPU, "at most 64 filters"),
        (replace(BARE, k=36), GPU, "multiple of 8"),
        (replace(BARE, w=600), GPU, "rows of at most 256 results"),
        (replace(POOLED, w=400), GPU, "rows of at most 184 results"),
        (pooling(Pool("avg", 3, 3, 2, 2)), GPU, "largest of 3x3"),
        (pooling(Pool("max", 2, 2, 2, 2)), GPU, "largest of 3x3"),
        (pooling(Pool("max", 3, 3, 2, 2, 1, 0)), GPU, "largest of 3x3"),
        (pooling(POOL, activation="silu"), GPU, "pools behind none, relu, relu6"),
        (replace(BARE, r=60, pad_h=29), GPU, "do not fit into shared memory"),
        (BARE, replace(GPU, arch="sm_80"), "capability 9.0 or newer"),
        (BARE, replace(GPU, arch="sm_100"), "capability 9.0 alone"),
    ],
)
def test_refusals_say_why(problem, target, reason):
    support = ENGINE.accepts(problem, target)
    assert not support
    assert reason in support.reason


def test_missing_bindings_are_a_reason(monkeypatch):
    monkeypatch.setattr(hopper_support_checks, "absence", lambda: "needs cuda-core")
    assert ENGINE.accepts(BARE, GPU).reason == "needs cuda-core"


@pytest.mark.parametrize("problem", [BARE, POOLED, SMALL, WIDE, replace(POOLED, n=1)])
def test_spaces_are_finite_distinct_and_ordered_by_their_guess(problem):
    assert ENGINE.accepts(problem, GPU)
    space = list(ENGINE.space(problem, GPU))
    assert 0 < len(space) <= 42
    assert len(set(space)) == len(space)
    guesses = [ENGINE.estimate_us(problem, knobs, GPU) for knobs in space]
    assert guesses == sorted(guesses)
    assert all(0 < guess < math.inf for guess in guesses)
    assert all(Layer(problem, Form.of(knobs)).shared_bytes <= SHARED_BYTES for knobs in space)


def test_a_single_image_is_cut_smaller_than_many():
    one, many = (ENGINE.space(replace(POOLED, n=n), GPU)[0] for n in (1, 32))
    assert Form.of(one).rows < Form.of(many).rows


@pytest.mark.parametrize("change", [{"rows": 0}, {"rows": 65}, {"warpgroups": 3}, {"rows": 3, "paired": True}])
def test_knobs_that_make_no_kernel_are_refused(change):
    with pytest.raises(InputError, match="knobs"):
        Form.of(Knobs.of(**({"rows": 2, "warpgroups": 1, "paired": False} | change)))


def test_a_form_without_room_is_refused():
    with pytest.raises(InputError, match="shared memory"):
        ENGINE.build(replace(WIDE, w=448), Form(1, 4).knobs, GPU)
    with pytest.raises(InputError, match="fewer warpgroups"):
        ENGINE.build(SMALL, Form(1, 4).knobs, GPU)


def test_packed_weights_are_in_the_order_of_the_products():
    weight = torch.arange(1, 40 * 3 * 7 * 7 + 1).reshape(40, 3, 7, 7)
    packed = in_slices(weight, Layer(replace(BARE, k=40), Form(1, 1)))
    assert packed.shape == (7, 2, 2, 8, 8, 2, 4)
    full = in_slices(weight, Layer(replace(FULL, k=40), Form(1, 1)))
    assert full.shape == (7, 4, 2, 8, 8, 1, 4)
    for k, c, r, s in ((0, 0, 0, 0), (39, 2, 6, 6), (9, 1, 3, 5), (17, 2, 4, 2)):
        assert packed[r, s // 4, s // 2 % 2, k // 8, k % 8, s % 2, c] == weight[k, c, r, s]
        assert full[r, s // 2, s % 2, k // 8, k % 8, 0, c] == weight[k, c, r, s]
    assert packed.count_nonzero() == full.count_nonzero() == weight.numel()


def test_filters_that_are_there_twice_are_a_row_of_y_apart():
    weight = torch.arange(1, 24 * 3 * 3 * 3 + 1).reshape(24, 3, 3, 3)
    packed = in_slices(weight, Layer(replace(SMALL, k=24), Form(2, 1, True)))
    assert packed.shape == (5, 1, 2, 8, 8, 2, 4)
    first, second = packed[:3, :, :, :4], packed[2:, :, :, 4:]
    assert torch.equal(first, second)
    assert not packed[3:, :, :, :4].any()
    assert not packed[:2, :, :, 4:].any()


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (BARE, "needs fp32, got fp16"),
        (replace(FULL, numerics="strict"), "numerics strict forbids"),
        (replace(FULL, stride_w=3), "a stride of 1 or 2 or 4"),
    ],
)
def test_tf32_has_an_engine_of_its_own(problem, reason):
    engine = first_layer_tf32.ENGINE
    assert engine.accepts(FULL, GPU)
    assert not ENGINE.accepts(FULL, GPU)
    assert reason in engine.accepts(problem, GPU).reason


FULL_LAYERS = [
    replace(
        FULL,
        epilogue=layer.epilogue,
        r=layer.r,
        s=layer.s,
        pad_h=layer.pad_h,
        pad_w=layer.pad_w,
        k=layer.k,
        stride_h=layer.stride_h,
        stride_w=layer.stride_w,
    )
    for layer in (BARE, POOLED, SMALL, WIDE)
]


@pytest.mark.parametrize("layer", [BARE, POOLED, SMALL, WIDE, *FULL_LAYERS])
def test_every_form_compiles_without_spills_or_serialised_products(layer):
    bindings = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        bindings.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(str(error))
    engine = first_layer_tf32.ENGINE if layer.x_dtype == "fp32" else ENGINE
    for knobs in engine.space(layer, GPU)[:4]:
        executable = engine.build(layer, knobs, GPU)
        assert_no_spills(executable.log)
        assert "serialized" not in executable.log
