"""What cuda.stem takes, refuses and proposes, and what NVRTC makes of it; no device needed. Its arithmetic: test_emulated.py."""

from dataclasses import replace

import pytest

from convoy.engines.hopper.igemm import Form
from convoy.engines.hopper.stem import ENGINE, Windows
from convoy.problem import ConvProblem, Epilogue
from convoy.target import Target

GPU = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
HALF = ConvProblem(32, 3, 224, 224, 64, 7, 7, 3, 3, 2, 2, layout="nhwc", x_dtype="fp16", weight_dtype="fp16",
                   y_dtype="fp16", numerics="half")  # fmt: skip
FLOAT = replace(HALF, x_dtype="fp32", weight_dtype="fp32", y_dtype="fp32", numerics="as_torch")
ALEXNET = replace(HALF, r=11, s=11, pad_h=2, pad_w=2, stride_h=4, stride_w=4)
VGG = replace(HALF, r=3, s=3, pad_h=1, pad_w=1, stride_h=1, stride_w=1)


pytestmark = pytest.mark.usefixtures("libraries_are_there")


@pytest.mark.parametrize(
    ("problem", "target", "reason"),
    [
        (replace(HALF, layout="nchw"), GPU, "needs layout nhwc"),
        (replace(HALF, c=5), GPU, "at most 4 channels"),
        (replace(FLOAT, numerics="strict"), GPU, "strict forbids"),
        (replace(HALF, dilation_h=2), GPU, "dilation 1"),
        (replace(HALF, k=60), GPU, "k as a multiple of 8"),
        (replace(HALF, n=80, h=2000, w=2000, k=8), GPU, "fewer images"),
        (HALF, replace(GPU, arch="sm_100"), "capability 9.0 alone"),
    ],
)
def test_refusals_say_why(problem, target, reason):
    support = ENGINE.supports(problem, target)
    assert not support
    assert reason in support.reason


@pytest.mark.parametrize(
    ("problem", "taps", "window", "step"),
    [(HALF, 4, 56, 32), (ALEXNET, 3, 176, 128), (VGG, 3, 24, 16), (FLOAT, 4, 56, 64)],
)
def test_windows_keep_to_sixteen_bytes_and_the_same_output(problem, taps, window, step):
    assert ENGINE.supports(problem, GPU)
    windows = Windows(problem)
    left, told = windows.left, windows.pixel_map(64)
    assert (left.r, left.c, told.strides[0]) == (taps, window, step)
    assert (left.p, left.q) == (problem.p, problem.q)
    assert all(stride % 16 == 0 and stride % step == 0 for stride in told.strides)
    assert (problem.q - 1) * step + window * (4 if problem is FLOAT else 2) <= told.strides[1]
    assert (
        problem.n * told.strides[2]
        == windows.bytes
        == ENGINE.workspace_bytes(problem, Form(64, 64, 2, 2, False, 1).knobs)
    )


def test_the_first_guess_compiles_without_spills():
    bindings = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        bindings.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(str(error))
    problem = replace(HALF, epilogue=Epilogue(True, False, "relu"))
    executable = ENGINE.build(problem, ENGINE.space(problem, GPU)[0], GPU)
    assert "0 bytes spill stores" in executable.copy.log
    assert "0 bytes spill stores" in executable.product.log
