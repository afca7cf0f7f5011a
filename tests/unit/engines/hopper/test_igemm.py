"""The problems that cuda.implicit_gemm takes and refuses, its settings, and NVRTC's code for them; no device needed."""

import math
from dataclasses import replace

import pytest

from convoy.engines.hopper import hopper_support_checks, igemm, nvrtc_kernel
from convoy.engines.hopper.igemm import ENGINE
from convoy.engines.hopper.igemm_tile_config import SHARED_BYTES
from convoy.engines.hopper.igemm_tile_config import IgemmTile as Form
from convoy.engines.hopper.nvrtc_source import (
    ACTIVATIONS,
    CudaSource,
    kernel_source,
    nvrtc_options,
    reciprocal,
    wgmma_function,
)
from convoy.engines.hopper.tensor_maps import PixelMap
from convoy.errors import CompileError, InputError
from convoy.problem import ConvProblem, Epilogue, Knobs
from convoy.problem.conv import ACTIVATIONS as WORDS
from convoy.target import Target
from tests.unit.engines.spills import assert_no_spills

GPU = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
HALF = ConvProblem(
    32,
    256,
    14,
    14,
    256,
    3,
    3,
    1,
    1,
    layout="nhwc",
    x_dtype="fp16",
    weight_dtype="fp16",
    y_dtype="fp16",
    numerics="half",
)
FLOAT = replace(HALF, x_dtype="fp32", weight_dtype="fp32", y_dtype="fp32", numerics="as_torch")


pytestmark = pytest.mark.usefixtures("libraries_are_there")


@pytest.mark.parametrize(
    ("problem", "target", "reason"),
    [
        (replace(HALF, layout="nchw"), GPU, "needs layout nhwc"),
        (replace(HALF, direction="dgrad"), GPU, "direction fprop only"),
        (replace(FLOAT, numerics="strict"), GPU, "strict forbids"),
        (replace(HALF, groups=2), GPU, "groups = 1"),
        (replace(HALF, c=60), GPU, "multiples of 8"),
        (replace(HALF, pad_h=150, pad_w=1), GPU, "padding and filter under 128"),
        (replace(HALF, stride_h=9), GPU, "strides up to 8"),
        (HALF, replace(GPU, arch="sm_80"), "capability 9.0 or newer"),
        (HALF, replace(GPU, arch="sm_100"), "capability 9.0 alone"),
    ],
)
def test_refusals_say_why(problem, target, reason):
    support = ENGINE.supports(problem, target)
    assert not support
    assert reason in support.reason


def test_missing_bindings_are_a_reason(monkeypatch):
    monkeypatch.setattr(hopper_support_checks, "absence", lambda: "needs cuda-core")
    assert ENGINE.supports(HALF, GPU).reason == "needs cuda-core"


def test_what_may_be_offered_is_a_kernel():
    """Of fp32 layers with many channels, a split's sums once had no room in the ring."""
    for c, side, taps in ((512, 28, 3), (256, 56, 3), (512, 7, 3), (2048, 7, 1)):
        for problem in (HALF, FLOAT, replace(HALF, n=1), replace(FLOAT, n=1)):
            sizes = {"c": c, "k": c, "h": side, "w": side, "r": taps, "s": taps, "pad_h": taps // 2, "pad_w": taps // 2}
            for form in igemm.forms(replace(problem, **sizes), GPU.units, limit=10_000):
                assert Form.of(form.knobs) == form


@pytest.mark.parametrize(
    "problem", [HALF, FLOAT, replace(HALF, k=16), replace(HALF, n=1, c=8, h=7, w=7, k=2048, r=1, s=1, pad_h=0, pad_w=0)]
)
def test_spaces_are_finite_distinct_and_ordered_by_their_guess(problem):
    assert ENGINE.supports(problem, GPU)
    space = list(ENGINE.space(problem, GPU))
    assert 0 < len(space) <= 40
    assert len(set(space)) == len(space)
    guesses = [ENGINE.estimate_us(problem, knobs, GPU) for knobs in space]
    assert guesses[0] == min(guesses)
    assert all(0 < guess < math.inf for guess in guesses)
    for knobs in space:
        form = Form.of(knobs)
        assert form.knobs == knobs
        assert form.shared_bytes <= SHARED_BYTES
        assert PixelMap.of(problem, form.pixels).fits(problem)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 96},
        {"filters": 20},
        {"filters": 264},
        {"cluster": 4},
        {"stages": 1},
        {"split": 2},
        {"split": 9, "cluster": 1, "turns": False},
    ],
)
def test_knobs_that_make_no_kernel_are_refused(change):
    good = {"rows": 64, "filters": 64, "stages": 4, "consumers": 2, "turns": True, "cluster": 2, "split": 1}
    assert Form.of(Knobs.of(**good)).pixels == 64
    with pytest.raises(InputError, match="knobs"):
        Form.of(Knobs.of(**(good | change)))


def test_a_pair_splits_its_filters_into_whole_groups():
    with pytest.raises(InputError, match="knobs"):
        Form.of(Knobs.of(rows=64, filters=24, stages=4, consumers=2, turns=True, cluster=2, split=1))


def test_a_split_has_a_share_for_every_block_and_room_for_its_sums():
    problem = replace(HALF, n=1)
    splits = [form for form in map(Form.of, ENGINE.space(problem, GPU)) if form.split > 1]
    assert splits
    for form in splits:
        assert (form.split - 1) * form.each(problem) < 36
        assert form.sum_bytes <= form.ring_bytes


def test_epilogues_have_the_words_of_problems():
    assert set(ACTIVATIONS) == set(WORDS)


def test_the_box_of_base_pixels_has_as_many_as_the_output():
    for problem in (HALF, replace(HALF, stride_h=2, stride_w=3), replace(HALF, dilation_w=2, pad_w=3, s=2)):
        told = PixelMap.of(problem, 64)
        for size, low, high, step, out in zip(
            told.sizes[1:3], told.low, told.high, told.step, (problem.q, problem.p), strict=True
        ):
            assert (size + high - low - 1) // step + 1 == out


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 49, 196, 784, 3136, 12544, 65537, 2**30 + 1])
def test_a_product_and_a_shift_divide(divisor):
    factor, shift = reciprocal(divisor)
    assert factor < 1 << 32
    last = (1 << 31) - 1
    for n in {0, 1, divisor - 1, divisor, divisor + 1, last, last // divisor * divisor, last // divisor * divisor - 1}:
        if 0 <= n <= last:
            assert n * factor >> shift == n // divisor


def test_products_name_every_register():
    made = wgmma_function(16, "fp16")
    assert "m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 1, 1, 1, 0, 0;" in made
    assert "m64n8k8.f32.tf32.tf32 {%0, %1, %2, %3}, %4, %5, 1, 1, 1;" in wgmma_function(8, "fp32")


def nvrtc_or_skip():
    bindings = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        bindings.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("problem", [replace(HALF, epilogue=Epilogue(True, True, "relu")), FLOAT])
@pytest.mark.parametrize("split", [False, True])
def test_the_first_guess_compiles_without_spills_or_serialised_products(problem, split):
    nvrtc_or_skip()
    if split:
        problem = replace(problem, n=1)
    knobs = next(k for k in ENGINE.space(problem, GPU) if (Form.of(k).split > 1) is split)
    executable = ENGINE.build(problem, knobs, GPU)
    assert_no_spills(executable.log)
    assert "serialized" not in executable.log


def test_a_refused_source_keeps_the_compilers_words():
    nvrtc_or_skip()
    with pytest.raises(CompileError, match="NVRTC refused") as caught:
        nvrtc_kernel.compile_cubin(
            "cuda.implicit_gemm", CudaSource("k.cu", 'extern "C" __global__ void k() { no_such_thing(); }'), GPU
        )
    assert "no_such_thing" in caught.value.log


@pytest.mark.parametrize("count", [4, 300])
def test_a_log_that_names_spilled_bytes_is_a_refusal(monkeypatch, count):
    nvrtc_or_skip()
    log = f"ptxas info    : 8 bytes stack frame, {count} bytes spill stores, 0 bytes spill loads"
    monkeypatch.setattr(nvrtc_kernel, "cached", lambda *_: len(log).to_bytes(4, "little") + log.encode() + b"cubin")
    with pytest.raises(CompileError, match="spills"):
        nvrtc_kernel.compile_cubin("cuda.implicit_gemm", CudaSource("k.cu", ""), GPU)


def test_divisions_are_exact_in_fp32_alone():
    assert (
        nvrtc_options("silu", "fp16")
        == nvrtc_options("hardswish", "bf16")
        == ("--prec-div=false", "--define-macro=FAST_DIVISION")
    )
    assert nvrtc_options("silu", "fp32") == nvrtc_options("relu", "fp16") == ()


def test_a_kernel_with_too_few_registers_is_refused():
    nvrtc_or_skip()
    form = Form(64, 256, 4, 3, False, 1)
    with pytest.raises(CompileError):
        nvrtc_kernel.compile_cubin(
            "cuda.implicit_gemm",
            kernel_source("igemm", form.parameters(HALF), wgmma_function(form.filters, "fp16")),
            GPU,
        )
