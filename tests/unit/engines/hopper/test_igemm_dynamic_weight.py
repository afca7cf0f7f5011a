"""The problems that cuda.fresh and cuda.dgrad take and refuse, their settings, and NVRTC's code for them; no device needed."""

import math
from dataclasses import replace

import pytest
import torch

from convoy.engines import dynamic_weight as fresh_weights
from convoy.engines.hopper import hopper_support_checks, igemm_dgrad, igemm_dynamic_weight
from convoy.engines.hopper.igemm_dgrad import turned
from convoy.errors import LaunchError
from convoy.problem import ConvProblem, Epilogue
from convoy.target import Target
from tests.unit.engines.spills import assert_no_spills

GPU = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
TYPES = {"x_dtype": "bf16", "weight_dtype": "bf16", "y_dtype": "bf16", "numerics": "half", "layout": "nhwc"}
FRESH = ConvProblem(32, 256, 14, 14, 128, 3, 3, 1, 1, dynamic_weight=True, **TYPES)
BACK = ConvProblem(32, 256, 14, 14, 128, 3, 3, 1, 1, direction="dgrad", **TYPES)
CASES = {igemm_dynamic_weight.ENGINE: FRESH, igemm_dgrad.ENGINE: BACK}
FLOAT = dict.fromkeys(("x_dtype", "weight_dtype", "y_dtype"), "fp32") | {"numerics": "as_torch"}

both = pytest.mark.parametrize(("engine", "problem"), CASES.items(), ids=lambda value: getattr(value, "id", ""))


pytestmark = pytest.mark.usefixtures("libraries_are_there")


@both
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layout": "nchw"}, "needs layout nhwc"),
        ({"groups": 2}, "groups = 1"),
        ({"c": 60}, "multiples of 8"),
        ({"k": 12}, "multiples of 8"),
        (FLOAT, "needs fp16 or bf16"),
        ({"direction": "wgrad", "dynamic_weight": False}, "direction"),
        ({"n": 1 << 17}, "2^31"),
    ],
)
def test_refusals_say_why(engine, problem, change, reason):
    support = engine.accepts(replace(problem, **change), GPU)
    assert not support
    assert reason in support.reason


@pytest.mark.parametrize(
    ("engine", "problem", "reason"),
    [
        (igemm_dynamic_weight.ENGINE, replace(FRESH, dynamic_weight=False), "cuda.swapped packs the others"),
        (igemm_dynamic_weight.ENGINE, replace(FRESH, stride_h=9), "strides up to 8"),
        (igemm_dgrad.ENGINE, replace(BACK, stride_w=2), "stride of 1, got 1x2"),
        (igemm_dgrad.ENGINE, replace(BACK, pad_h=3), "no wider than the filter"),
    ],
)
def test_refusals_of_one_say_why(engine, problem, reason):
    support = engine.accepts(problem, GPU)
    assert not support
    assert reason in support.reason


@both
def test_other_devices_and_missing_bindings_are_reasons(engine, problem, monkeypatch):
    assert "capability 9.0 alone" in engine.accepts(problem, replace(GPU, arch="sm_100")).reason
    monkeypatch.setattr(hopper_support_checks, "absence", lambda: "needs cuda-core")
    assert engine.accepts(problem, GPU).reason == "needs cuda-core"


@both
def test_spaces_are_finite_distinct_and_ordered_by_their_guess(engine, problem):
    assert engine.accepts(problem, GPU)
    space = list(engine.space(problem, GPU))
    assert 0 < len(space) <= 40
    assert len(set(space)) == len(space)
    guesses = [engine.estimate_us(problem, knobs, GPU) for knobs in space]
    assert guesses == sorted(guesses)
    assert all(0 < guess < math.inf for guess in guesses)
    assert any(knobs["halo"] for knobs in space)


@pytest.mark.parametrize(
    "change",
    [{}, {"pad_h": 0, "pad_w": 2}, {"dilation_h": 2, "dilation_w": 3}, {"r": 1, "s": 5, "pad_h": 0}, {"h": 9, "w": 20}],
)
def test_the_convolution_of_a_gradient_has_the_image_for_a_result(change):
    problem = replace(BACK, **change)
    made = turned(problem)
    assert made.y_spec.shape == problem.x_spec.shape
    assert made.x_spec.shape == (problem.n, problem.k, problem.p, problem.q)


@both
def test_weights_lie_as_they_are_and_first_guesses_compile(engine, problem):
    bindings = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        bindings.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(str(error))
    for knobs in list(engine.space(problem, GPU))[:3]:
        executable = engine.build(problem, knobs, GPU)
        assert_no_spills(executable.log)
        assert "serialized" not in executable.log
    weight = torch.ones(problem.weight_spec.shape, dtype=torch.bfloat16)
    if engine is igemm_dgrad.ENGINE:
        assert executable.pack((weight,)) == ()
        return
    lies = weight.contiguous(memory_format=torch.channels_last)
    assert executable.pack((lies,))[0].data_ptr() == lies.data_ptr()
    with pytest.raises(LaunchError, match="weight"):
        executable.pack((weight,))


def test_a_launch_with_a_fresh_weight_copies_nothing():
    pytest.importorskip("cuda.bindings.nvrtc")
    problem = replace(FRESH, epilogue=Epilogue(bias=True))
    made = fresh_weights.build(
        igemm_dynamic_weight.ENGINE, problem, igemm_dynamic_weight.ENGINE.space(problem, GPU)[0], GPU
    )
    assert made.workspace_bytes == 0
