"""The copy of a first layer's image for windows, and NVRTC's code for it. Its arithmetic: test_emulated_igemm.py."""

from dataclasses import replace

import pytest

from convoy.engines.hopper.image_windows import ImageCopy, Windows
from convoy.problem import ConvProblem
from convoy.target import Target
from tests.unit.engines.spills import assert_no_spills

GPU = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
HALF = ConvProblem(32, 3, 224, 224, 64, 7, 7, 3, 3, 2, 2, layout="nhwc", x_dtype="fp16", weight_dtype="fp16",
                   y_dtype="fp16", numerics="half")  # fmt: skip
FLOAT = replace(HALF, x_dtype="fp32", weight_dtype="fp32", y_dtype="fp32", numerics="as_torch")
ALEXNET = replace(HALF, r=11, s=11, pad_h=2, pad_w=2, stride_h=4, stride_w=4)
VGG = replace(HALF, r=3, s=3, pad_h=1, pad_w=1, stride_h=1, stride_w=1)


@pytest.mark.parametrize(
    ("problem", "taps", "window", "step"),
    [(HALF, 4, 56, 32), (ALEXNET, 3, 176, 128), (VGG, 3, 24, 16), (FLOAT, 4, 56, 64)],
)
def test_windows_keep_to_sixteen_bytes_and_the_same_output(problem, taps, window, step):
    windows = Windows(problem)
    left = windows.left
    assert (left.r, left.c, windows.strides[0]) == (taps, window, step)
    assert (left.p, left.q) == (problem.p, problem.q)
    assert all(stride % 16 == 0 and stride % step == 0 for stride in windows.strides)
    assert (problem.q - 1) * step + window * (4 if problem is FLOAT else 2) <= windows.strides[1]
    assert problem.n * windows.strides[2] == windows.bytes


def test_the_copy_compiles_without_spills():
    bindings = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        bindings.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(str(error))
    assert_no_spills(ImageCopy("triton.stem_wgrad", Windows(HALF), GPU).log)
