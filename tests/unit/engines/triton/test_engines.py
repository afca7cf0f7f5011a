"""The problems that the Triton engines take and refuse, and their settings: no triton needed."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest

from convoy.engines import manifest
from convoy.engines.manifest import MANIFEST
from convoy.engines.triton import stem_wgrad, triton_build
from convoy.engines.triton.persistent import PersistentTile
from convoy.engines.triton.triton_tiles import TritonTile, conv_view
from convoy.engines.triton.triton_wgrad_tile import WgradTile
from convoy.problem import ConvProblem, Epilogue, LinearProblem, Pool
from convoy.target import Target

GPU = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
CPU = Target("cpu", "a CPU", "avx2", 2, 8 << 30, 1 << 20)
AMPERE = replace(GPU, arch="sm_80", name="an A100 that is not there")
PIECES = (
    "triton.merged", "triton.pooled", "triton.pooling", "triton.pool_backward", "triton.batch_norm", "triton.stem_wgrad",
    "triton.group_norm", "triton.conv3d",
)  # fmt: skip
"""Engines that take more or other things than a convolution, or first layers alone: they have tests of their own."""
ENGINES = [name for name in MANIFEST if name.startswith("triton.") and name not in PIECES]
DIRECTIONS = {"triton.dgrad": "dgrad", "triton.wgrad": "wgrad", "triton.depthwise_gradients": "dgrad"}
HALF = ConvProblem(1, 64, 14, 14, 64, 3, 3, 1, 1, layout="nhwc", x_dtype="fp16", weight_dtype="fp16", y_dtype="fp16")
DGRAD, WGRAD = replace(HALF, direction="dgrad"), replace(HALF, direction="wgrad")
TF32 = replace(HALF, x_dtype="fp32", weight_dtype="fp32", y_dtype="fp32")
STRICT = replace(HALF, x_dtype="fp32", weight_dtype="fp32", y_dtype="fp32", numerics="strict")


def load_engine(engine_id):
    return manifest.load_engine(engine_id)


def test_importing_the_engines_imports_no_library_of_the_gpu():
    libraries = "{'triton', 'cudnn', 'cuda'}"
    code = "import sys\nfrom convoy.engines.manifest import MANIFEST, load_engine\n"
    code += "[load_engine(e) for e in MANIFEST if e.startswith(('triton.', 'cuda.', 'cudnn'))]\n"
    code += f"assert not {libraries} & set(sys.modules)"
    # torch itself may import them where they are installed: only what these modules add is looked at.
    drop = f"for m in [m for m in sys.modules if m.partition('.')[0] in {libraries}]: del sys.modules[m]\n"
    subprocess.run([sys.executable, "-c", "import sys, torch\n" + drop + code], check=True, timeout=120)


@pytest.mark.parametrize("engine_id", ENGINES)
@pytest.mark.parametrize(
    ("problem", "target", "reason"),
    [
        (HALF, CPU, "needs a CUDA device of capability"),
        (replace(HALF, layout="nchw"), GPU, "needs layout nhwc, got nchw"),
        (replace(HALF, y_dtype="fp32"), GPU, "of one dtype"),
        (replace(HALF, acc_dtype="fp16"), GPU, "accumulates in fp32"),
        (replace(HALF, n=1 << 18), GPU, "fewer than 2^31 elements"),
    ],
)
def test_refusals_say_why(engine_id, problem, target, reason):
    problem = replace(problem, direction=DIRECTIONS.get(engine_id, "fprop"))
    support = load_engine(engine_id).supports(problem, target)
    assert not support
    assert reason in support.reason


@pytest.mark.parametrize("engine_id", ENGINES)
def test_each_engine_has_its_directions(engine_id):
    own = DIRECTIONS.get(engine_id, "fprop")
    both = engine_id == "triton.depthwise_gradients"
    for direction in {"fprop"} if both else {"fprop", "dgrad", "wgrad"} - {own}:
        support = load_engine(engine_id).supports(replace(HALF, direction=direction), GPU)
        words = "directions dgrad and wgrad only" if both else f"direction {own} only, got {direction}"
        assert f"computes {words}" in support.reason


@pytest.mark.parametrize(
    ("engine_id", "problem", "reason"),
    [
        ("triton.swapped", STRICT, "strict"),
        ("triton.swapped", replace(HALF, groups=2), "groups = 1"),
        ("triton.swapped", replace(HALF, c=60), "multiples of 8"),
        ("triton.swapped", replace(HALF, stride_h=2, stride_w=2, h=15), "multiples of the stride"),
        ("triton.swapped", replace(TF32, stride_h=2, c=8), "c as a multiple of 16 with a stride, got 8"),
        ("triton.swapped", replace(TF32, stride_h=2, c=24), "c as a multiple of 16 with a stride, got 24"),
        ("triton.persistent", replace(TF32, stride_w=2, c=40), "c as a multiple of 16 with a stride, got 40"),
        ("triton.swapped", replace(HALF, stride_h=2, c=24), "c as a multiple of 16 with a stride, got 24"),
        ("triton.pointwise", HALF, "1x1 filter"),
        ("triton.stem", HALF, "at most 4 channels"),
        ("triton.stem", replace(HALF, c=3, dilation_h=2), "dilation 1"),
        ("triton.depthwise", HALF, "groups = c = k"),
        ("triton.gemv", HALF, "1x1 map"),
        ("triton.gemv", LinearProblem(9, 64, 64), "batch of at most 8"),
        ("triton.split_fp32", HALF, "splits fp32"),
        ("triton.persistent", replace(HALF, groups=2), "groups = 1"),
        ("triton.persistent", STRICT, "strict"),
        ("triton.depthwise_gradients", DGRAD, "groups = c = k"),
        ("triton.depthwise_gradients", replace(WGRAD, groups=64, r=8, s=8, pad_h=4, pad_w=4), "at most 49 taps"),
        ("triton.dgrad", replace(DGRAD, stride_h=2, dilation_h=2), "dilation 1 where it has a stride"),
        ("triton.dgrad", replace(DGRAD, k=60), "multiples of 8"),
        ("triton.dgrad", replace(STRICT, direction="dgrad", numerics="as_torch", k=24), "multiple of 16 in fp32"),
        ("triton.wgrad", replace(WGRAD, c=60), "multiples of 8"),
        ("triton.wgrad", replace(WGRAD, epilogue=Epilogue(activation="relu")), "no epilogue but the bias's"),
    ],
)
def test_each_engine_names_its_own_limits(engine_id, problem, reason):
    support = load_engine(engine_id).supports(problem, GPU)
    assert not support
    assert reason in support.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"c": 64}, "at most 4 channels"),
        ({"k": 60}, "k and windows as multiples of 8"),
        ({"dilation_h": 2}, "dilation 1"),
        ({"direction": "fprop"}, "direction wgrad only"),
        ({"epilogue": Epilogue(activation="relu")}, "no epilogue but the bias's"),
    ],
)
def test_gradients_of_first_layers_say_what_they_do_not_take(monkeypatch, change, reason):
    monkeypatch.setattr(stem_wgrad, "absence", lambda: "")
    stem = replace(WGRAD, n=32, c=3, h=224, w=224, r=7, s=7, pad_h=3, pad_w=3, stride_h=2, stride_w=2)
    engine = stem_wgrad.ENGINE
    assert engine.supports(stem, GPU)
    space = list(engine.space(stem, GPU))
    assert 0 < len(space) == len(set(space)) <= 24
    assert not WgradTile.of(space[0]).by_registers
    assert reason in engine.supports(replace(stem, **change), GPU).reason


@pytest.mark.parametrize("engine_id", ENGINES)
def test_no_images_are_refused_or_have_settings(engine_id):
    problem = replace(HALF, n=0, direction=DIRECTIONS.get(engine_id, "fprop"))
    engine = load_engine(engine_id)
    assert not engine.supports(problem, GPU) or engine.space(problem, GPU)


def test_a_missing_triton_is_a_reason(monkeypatch):
    monkeypatch.setattr(triton_build, "installed", lambda: False)
    support = load_engine("triton.implicit_gemm").supports(HALF, GPU)
    assert support.reason == "triton is not installed: pip install convoy-cnn[gpu]"


def test_gathered_kernels_run_on_ampere_and_tma_kernels_do_not():
    assert load_engine("triton.implicit_gemm").supports(HALF, AMPERE)
    assert "capability 9.0" in load_engine("triton.swapped").supports(HALF, AMPERE).reason


def typical():
    point = replace(HALF, r=1, s=1, pad_h=0, pad_w=0)
    yield "triton.implicit_gemm", HALF
    yield "triton.implicit_gemm", STRICT
    yield "triton.implicit_gemm", replace(HALF, c=3)
    yield "triton.swapped", replace(HALF, c=512, k=512)
    yield "triton.swapped", replace(HALF, n=32)
    yield "triton.swapped", replace(HALF, c=8, k=8)
    yield "triton.pointwise", point
    yield "triton.pointwise", LinearProblem(1, 40, 16, "fp16", "half")
    yield "triton.stem", replace(HALF, c=3, h=224, w=224, r=7, s=7, stride_h=2, stride_w=2, pad_h=3, pad_w=3)
    yield "triton.depthwise", replace(HALF, groups=64)
    yield "triton.gemv", LinearProblem(8, 4096, 1000, "fp32", "strict")
    yield "triton.split_fp32", STRICT
    yield "triton.persistent", replace(HALF, n=32, c=256, k=256)
    yield "triton.persistent", replace(point, n=128, c=1024, k=256)
    yield "triton.dgrad", replace(DGRAD, n=32, stride_h=2, stride_w=2)
    yield "triton.dgrad", replace(DGRAD, n=1)
    yield "triton.depthwise_gradients", replace(DGRAD, groups=64)
    yield "triton.depthwise_gradients", replace(WGRAD, groups=64)
    yield "triton.wgrad", replace(WGRAD, n=32)
    yield "triton.wgrad", WGRAD


@pytest.mark.parametrize(("engine_id", "problem"), list(typical()))
def test_spaces_are_finite_distinct_and_ordered_by_their_guess(engine_id, problem):
    engine = load_engine(engine_id)
    space = list(engine.space(problem, GPU))
    assert 0 < len(space) <= 40
    assert len(set(space)) == len(space)
    assert space == list(engine.space(problem, GPU))
    guesses = [engine.estimate_us(problem, knobs, GPU) for knobs in space]
    assert all(guess is not None and 0 < guess < math.inf for guess in guesses)
    # The first of triton.wgrad is one that is sure to build.
    assert guesses[0] <= (1.5 if engine_id == "triton.wgrad" else 1.05) * min(guesses)
    assert all(engine.workspace_bytes(problem, knobs) >= 0 for knobs in space)


def summing(c, stride):
    """Problems of so many channels for the engines whose dot sums over channels."""
    wide = replace(TF32, c=c, stride_h=stride, stride_w=stride)
    yield "triton.swapped", wide
    yield "triton.persistent", replace(wide, n=32)
    yield "triton.pooled", replace(wide, epilogue=Epilogue(pool=Pool("max", 2, 2, 2, 2)))
    yield "triton.pooled", replace(wide, n=128, h=32, w=32, epilogue=Epilogue(pool=Pool("max", 3, 3, 2, 2)))
    if stride == 1:
        yield "triton.pointwise", replace(wide, r=1, s=1, pad_h=0, pad_w=0)
        yield "triton.persistent", replace(wide, n=32, r=1, s=1, pad_h=0, pad_w=0)
    if c <= 4:
        yield "triton.stem", wide


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("c", [4, 8, 12, 16, 24, 32, 40, 48, 64, 96, 128])
def test_no_setting_sums_over_fewer_channels_than_a_dot_takes(c, stride):
    for engine_id, problem in summing(c, stride):
        engine = load_engine(engine_id)
        support = engine.supports(problem, GPU)
        assert support or (stride == 2 and c % 16 and "multiple of 16 with a stride" in support.reason)
        space = engine.space(problem, GPU) if support else []
        assert space or not support
        blocks = {knobs.integer("block_c") for knobs in space}
        assert all(block >= 16 for block in blocks)
        if stride == 2 and engine_id in ("triton.swapped", "triton.persistent"):
            assert all(c % block == 0 for block in blocks)


def test_weight_gradients_sum_over_pixels_and_take_boxes_of_eight_channels():
    few = replace(TF32, c=8, stride_h=2, stride_w=2, direction="wgrad")
    assert not WgradTile.of(load_engine("triton.wgrad").space(few, GPU)[0]).images


def test_a_tile_survives_its_knobs():
    tile = TritonTile(64, 1, 8, 16, 128, stages=6, warps=8, split=4, pdl=True)
    assert TritonTile.of(tile.knobs) == tile


def test_forms_and_shares_survive_their_knobs():
    form = PersistentTile(TritonTile(128, 2, 8, 8, 64, stages=3, warps=8, pdl=True), 2, 1, True)
    assert PersistentTile.of(form.knobs) == form
    share = WgradTile(128, 64, 32, 1, 1, 4, 8, 7, True)
    assert WgradTile.of(share.knobs) == share


@pytest.mark.parametrize("n", [1, 3, 8, 32])
@pytest.mark.parametrize("sizes", [(40, 13, 11), (64, 28, 28), (512, 7, 7), (16, 3, 3)])
def test_the_first_share_is_none_that_ptxas_may_serialise(n, sizes):
    c, h, w = sizes
    first = next(iter(load_engine("triton.wgrad").space(replace(WGRAD, n=n, c=c, h=h, w=w), GPU)))
    assert not WgradTile.of(first).by_registers


def test_splits_leave_no_share_empty():
    view = conv_view(replace(HALF, c=512))
    for split in range(1, 80):
        splits, each = TritonTile(64, 1, 8, 8, 64, split=split).splits(view)
        assert (splits - 1) * each < 72 <= splits * each
