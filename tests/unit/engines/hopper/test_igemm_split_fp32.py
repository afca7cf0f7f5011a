"""The problems that cuda.split_fp32 takes and refuses, its settings and packed weights, and NVRTC's code; no device needed."""

from dataclasses import replace

import pytest
import torch

from convoy.engines.hopper import hopper_support_checks
from convoy.engines.hopper.igemm_split_fp32 import ENGINE, planes_in_blocks
from convoy.engines.hopper.igemm_swap_ab import in_blocks
from convoy.engines.hopper.igemm_swap_ab_limits import SHARED_BYTES
from convoy.engines.hopper.igemm_swap_ab_variants import PlanesForm
from convoy.engines.triton.split_planes import split_weight
from convoy.errors import InputError
from convoy.problem import ConvProblem, Epilogue, Knobs
from convoy.target import Target
from tests.unit.engines.spills import assert_no_spills

GPU = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
LAYER = ConvProblem(1, 512, 28, 28, 512, 3, 3, 1, 1, layout="nhwc", numerics="strict")
FULL = Epilogue(bias=True, residual=True, activation="relu")


pytestmark = pytest.mark.usefixtures("libraries_are_there")


@pytest.mark.parametrize(
    ("problem", "target", "reason"),
    [
        (replace(LAYER, layout="nchw"), GPU, "needs layout nhwc"),
        (replace(LAYER, direction="wgrad"), GPU, "direction fprop only"),
        (replace(LAYER, x_dtype="fp16", weight_dtype="fp16", y_dtype="fp16"), GPU, "splits fp32"),
        (replace(LAYER, groups=2), GPU, "groups = 1"),
        (replace(LAYER, c=60), GPU, "multiples of 8"),
        (replace(LAYER, k=12), GPU, "multiples of 8"),
        (replace(LAYER, n=0), GPU, "at least one image"),
        (replace(LAYER, stride_h=9), GPU, "strides up to 8"),
        (LAYER, replace(GPU, arch="sm_80"), "capability 9.0 or newer"),
        (LAYER, replace(GPU, arch="sm_100"), "capability 9.0 alone"),
    ],
)
def test_refusals_say_why(problem, target, reason):
    support = ENGINE.accepts(problem, target)
    assert not support
    assert reason in support.reason


def test_missing_bindings_are_a_reason(monkeypatch):
    monkeypatch.setattr(hopper_support_checks, "absence", lambda: "needs cuda-core")
    assert ENGINE.accepts(LAYER, GPU).reason == "needs cuda-core"


@pytest.mark.parametrize(
    "problem", [LAYER, replace(LAYER, n=32, h=14, w=14), replace(LAYER, r=1, s=1, pad_h=0, pad_w=0)]
)
def test_spaces_have_room_for_two_planes_and_three_sums(problem):
    space = list(ENGINE.space(problem, GPU))
    assert 0 < len(space) <= 40
    assert len(set(space)) == len(space)
    guesses = [ENGINE.estimate_us(problem, knobs, GPU) for knobs in space]
    assert guesses == sorted(guesses)
    assert ENGINE.workspace_bytes(problem, space[0]) > 4 * problem.x_spec.elements
    for knobs in space:
        form = PlanesForm.of(knobs)
        assert form.shared_bytes <= SHARED_BYTES[form.blocks]
        assert (form.depth, form.cluster, form.staged) == (1, 1, 0)
        assert 3 * form.rows // 64 * form.pixels // 2 <= 192


@pytest.mark.parametrize("change", [{"depth": 2}, {"cluster": 2}, {"staged": 1}, {"stages": 12}])
def test_knobs_that_make_no_kernel_are_refused(change):
    good = {"rows": 64, "pixels": 64, "stages": 4, "consumers": 2, "cluster": 1, "depth": 1, "split": 1, "blocks": 1}
    good |= {"staged": 0, "halo": 0}
    assert PlanesForm.of(Knobs.of(**good)).filter_bytes == 256
    with pytest.raises(InputError, match="knobs"):
        PlanesForm.of(Knobs.of(**(good | change)))


def test_both_planes_of_a_block_follow_each_other():
    weight, form = torch.randn(72, 16, 3, 3, generator=torch.Generator().manual_seed(3)), PlanesForm(64, 32, 4, 1, 1)
    planes, inverse = planes_in_blocks(weight, form)
    assert planes.shape == (2, 9, 2, 64, 64)
    high, low, scales = split_weight(weight)
    assert torch.equal(inverse, scales)
    assert torch.equal(planes[:, :, 0], in_blocks(high, form))
    assert torch.equal(planes[:, :, 1], in_blocks(low, form))
    whole = (high.double() + low.double() / 2048) * scales.double()[:, None, None, None]
    assert (whole - weight).abs().max() <= 2.0**-21 * weight.abs().max()


@pytest.mark.parametrize("epilogue", [Epilogue(), FULL])
def test_the_first_guesses_compile_without_spills_or_serialised_products(epilogue):
    bindings = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        bindings.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(str(error))
    pytest.importorskip("triton")
    problem = replace(LAYER, epilogue=epilogue)
    for knobs in ENGINE.space(problem, GPU)[:2]:
        executable = ENGINE.build(problem, knobs, GPU)
        assert_no_spills(executable.log)
        assert "serialized" not in executable.log
        assert executable.workspace_bytes == ENGINE.workspace_bytes(problem, knobs)
