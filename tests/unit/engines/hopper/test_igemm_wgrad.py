"""The problems that cuda.wgrad takes and refuses, its settings, and NVRTC's code for them; no device needed."""

import math
from dataclasses import replace

import pytest
import torch

from convoy.engines.base import Buffers
from convoy.engines.hopper import hopper_support_checks, igemm_wgrad
from convoy.engines.hopper.igemm_wgrad_tile_config import IgemmWgradTile as Form
from convoy.engines.hopper.igemm_wgrad_tile_search import forms
from convoy.errors import InputError, LaunchError
from convoy.problem import ConvProblem, Epilogue
from convoy.target import Target
from tests.unit.engines.spills import assert_no_spills

GPU = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
TYPES = {"x_dtype": "bf16", "weight_dtype": "bf16", "y_dtype": "bf16", "numerics": "half", "layout": "nhwc"}
FLOAT = dict.fromkeys(("x_dtype", "weight_dtype", "y_dtype"), "fp32") | {"numerics": "as_torch"}
ENGINE = igemm_wgrad.ENGINE


def gradient(*sizes, **rest):
    return ConvProblem(*sizes, **(TYPES | {"direction": "wgrad"} | rest))


DEEP = gradient(32, 256, 14, 14, 256, 3, 3, 1, 1)
LAYERS = {
    "3x3": DEEP,
    "3x3, many filters": gradient(32, 512, 7, 7, 512, 3, 3, 1, 1),
    "1x1/2": gradient(32, 1024, 14, 14, 2048, 1, 1, 0, 0, 2, 2),
    "few columns, many pixels": gradient(32, 64, 56, 56, 64, 1, 1),
    "odd": gradient(3, 40, 13, 11, 72, 3, 2, 1, 0, 2, 1),
    "one pixel": gradient(1, 8, 1, 1, 8, 1, 1),
}

each = pytest.mark.parametrize("name", LAYERS)


pytestmark = pytest.mark.usefixtures("libraries_are_there")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layout": "nchw"}, "needs layout nhwc"),
        ({"groups": 2}, "groups = 1"),
        ({"c": 60}, "multiples of 8"),
        ({"k": 12}, "multiples of 8"),
        (FLOAT, "needs fp16 or bf16"),
        ({"direction": "dgrad"}, "direction"),
        ({"n": 1 << 17}, "2^31"),
        ({"stride_w": 9}, "strides up to 8"),
        ({"epilogue": Epilogue(activation="relu")}, "no epilogue but the bias's"),
    ],
)
def test_refusals_say_why(change, reason):
    support = ENGINE.accepts(replace(DEEP, **change), GPU)
    assert not support
    assert reason in support.reason


def test_other_devices_and_missing_bindings_are_reasons(monkeypatch):
    assert "capability 9.0 alone" in ENGINE.accepts(DEEP, replace(GPU, arch="sm_100")).reason
    monkeypatch.setattr(hopper_support_checks, "absence", lambda: "needs cuda-core")
    assert ENGINE.accepts(DEEP, GPU).reason == "needs cuda-core"


@each
def test_spaces_are_finite_distinct_and_ordered_by_their_guess(name):
    problem = LAYERS[name]
    assert ENGINE.accepts(problem, GPU)
    space = list(ENGINE.space(problem, GPU))
    assert 0 < len(space) <= 24
    assert len(set(space)) == len(space)
    guesses = [ENGINE.estimate_us(problem, knobs, GPU) for knobs in space]
    assert guesses == sorted(guesses)
    assert all(0 < guess < math.inf for guess in guesses)


@each
def test_forms_fit_and_their_shares_are_the_whole_sum(name):
    problem = LAYERS[name]
    for form in forms(problem, GPU.units):
        assert Form.of(form.knobs) == form
        sizes = form.sizes(problem)
        parts = form.split * form.shares
        assert sizes["each"] * parts + sizes["more"] == form.iterations(problem)
        assert sizes["each"] or parts == 1
        assert ENGINE.workspace_bytes(problem, form.knobs) == (
            4 * form.shares * problem.weight_spec.elements if form.shares > 1 else 0
        )


def test_where_tiles_are_few_sums_are_split():
    problem = LAYERS["few columns, many pixels"]
    best = forms(problem, GPU.units)[0]
    assert best.split * best.units(problem) > GPU.units / 2


@pytest.mark.parametrize(
    "change",
    [
        {"columns": 96},
        {"rows": 32},
        {"pixels": 96},
        {"split": 9},
        {"shares": 65},
        {"stages": 12},
        {"split": 8, "stages": 2},
    ],
)
def test_knobs_of_which_no_kernel_can_be_made(change):
    form = Form(64, 256, 64, 4, 2, 2)
    assert Form.of(form.knobs) == form
    with pytest.raises(InputError, match="knobs"):
        Form.of(replace(form, **change).knobs)


@each
def test_first_guesses_compile(name):
    bindings = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        bindings.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(str(error))
    problem = LAYERS[name]
    for form in [form for form in forms(problem, GPU.units) if form.shares == 1][:3]:
        executable = ENGINE.build_tile(problem, form, GPU)
        assert_no_spills(executable.log)
        assert "serialized" not in executable.log


def test_a_batch_of_no_images_is_zeros():
    pytest.importorskip("cuda.bindings.nvrtc")
    problem = replace(DEEP, n=0)
    executable = ENGINE.build(problem, ENGINE.space(problem, GPU)[0], GPU)
    x, dy, dweight = (
        torch.ones(spec.shape, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
        for spec in (problem.x_spec, problem.y_spec, problem.weight_spec)
    )
    executable.launch(Buffers((x, dy), [dweight]), None)
    assert not dweight.any()
    with pytest.raises(LaunchError, match="dweight"):
        executable.launch(Buffers((x, dy), [None]), None)
