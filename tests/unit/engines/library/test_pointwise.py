"""1x1 as GEMM: no workspace but for a stride's pixels, and clear refusals."""

import pytest

from convoy.engines.library.pointwise import ENGINE
from convoy.problem import ConvProblem, Epilogue, Knobs, LinearProblem
from convoy.target import Target

CPU = Target("cpu", "test", "avx2", 1, 1 << 33, 0)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_stride_1_needs_no_workspace_and_a_stride_only_the_pixels_that_it_picks(layout):
    dense = ConvProblem(2, 8, 9, 9, 4, 1, 1, layout=layout)
    strided = ConvProblem(2, 8, 9, 9, 4, 1, 1, stride_h=2, stride_w=3, layout=layout)
    assert all(ENGINE.workspace_bytes(dense, knobs) == 0 for knobs in ENGINE.space(dense, CPU))
    expected = -(-2 * 8 * 5 * 3 * 4 // 256) * 256
    assert all(ENGINE.workspace_bytes(strided, knobs) == expected for knobs in ENGINE.space(strided, CPU))


def test_knobs_are_those_that_matter():
    one, many = ConvProblem(1, 8, 9, 9, 4, 1, 1), ConvProblem(2, 8, 9, 9, 4, 1, 1)
    assert ENGINE.space(one, CPU) == [Knobs.of(per_image=True)]
    assert ENGINE.space(many, CPU) == [Knobs.of(per_image=True), Knobs.of(per_image=False)]
    both = [Knobs.of(transposed=False), Knobs.of(transposed=True)]
    assert ENGINE.space(many.with_layout("nhwc"), CPU) == both
    assert ENGINE.space(LinearProblem(1, 2, 3), CPU) == both


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (ConvProblem(1, 4, 5, 5, 4, 3, 1), "needs a 1x1 filter, got 3x1"),
        (ConvProblem(1, 4, 5, 5, 4, 1, 1, 0, 1), "needs padding 0, got 0x1"),
        (ConvProblem(1, 4, 5, 5, 4, 1, 1, groups=2), "needs groups = 1, got 2"),
        (ConvProblem(1, 4, 5, 5, 4, 1, 1, direction="wgrad"), "computes fprop and dgrad, got wgrad"),
        (
            ConvProblem(1, 4, 5, 5, 4, 1, 1, stride_h=2, direction="dgrad"),
            "computes dgrad at stride 1, got 2x1",
        ),
    ],
)
def test_refusals(problem, reason):
    assert ENGINE.supports(problem, CPU).reason == reason


def test_linear_layers_with_any_epilogue_are_taken():
    for activation in ("none", "relu", "gelu", "hardswish"):
        problem = LinearProblem(2, 3, 4, epilogue=Epilogue(bias=True, residual=True, activation=activation))
        assert ENGINE.supports(problem, CPU)
