"""im2col + GEMM: exactly the workspace that its columns need, and its knob's meaning."""

import pytest
import torch

from convoy.engines.algorithms.gemm import ENGINE
from convoy.engines.base import Buffers
from convoy.measurement.accuracy import make_data, oracle
from convoy.problem import ConvProblem, Epilogue, Knobs
from convoy.target import Target

CPU = Target("cpu", "test", "avx2", 1, 1 << 33, 0)
PROBLEM = ConvProblem(4, 16, 10, 12, 8, 3, 3, 1, 1)


def test_the_columns_of_one_image_are_unfolded_by_default():
    columns = 16 * 9 * 10 * 12 * 4
    assert ENGINE.space(PROBLEM, CPU)[0] == Knobs.of(images=1)
    assert ENGINE.workspace_bytes(PROBLEM, Knobs.of(images=1)) == -(-columns // 256) * 256
    assert ENGINE.workspace_bytes(PROBLEM, Knobs.of(images=4)) == -(-4 * columns // 256) * 256


def test_nhwc_needs_the_padded_images_too():
    problem = PROBLEM.with_layout("nhwc")
    columns, padded = 16 * 9 * 10 * 12 * 4, 12 * 14 * 16 * 4
    expected = -(-columns // 256) * 256 + -(-padded // 256) * 256
    assert ENGINE.workspace_bytes(problem, Knobs.of(images=1)) == expected


def test_one_image_at_a_time_is_the_only_choice_for_one_image_and_for_gradients():
    assert ENGINE.space(ConvProblem(1, 4, 5, 5, 4, 3, 3), CPU) == [Knobs.of(images=1)]
    gradient = ConvProblem(4, 4, 5, 5, 4, 3, 3, direction="wgrad")
    assert ENGINE.space(gradient, CPU) == [Knobs.of(images=1)]


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("images", [1, 2, 3, 4, 9])
def test_a_batch_that_does_not_divide_is_computed_whole(images, layout):
    problem = PROBLEM.with_layout(layout)
    executable = ENGINE.build(problem, Knobs.of(images=images), CPU)
    data = make_data(problem, 1, "integer")
    y = torch.full(problem.y_spec.shape, torch.nan).contiguous(
        memory_format=torch.channels_last if layout == "nhwc" else torch.contiguous_format
    )
    workspace = torch.full((executable.workspace_bytes,), 255, dtype=torch.uint8)
    executable.launch(Buffers(data.args, [y], executable.pack(data.constants)), workspace)
    assert torch.equal(y.double(), oracle(problem, data)[0])


def test_half_gradients_are_summed_in_fp32():
    problem = ConvProblem(
        1, 4, 24, 24, 4, 11, 11, 5, 5, direction="dgrad", x_dtype="bf16", weight_dtype="bf16", y_dtype="bf16"
    )
    executable = ENGINE.build(problem, Knobs.of(images=1), CPU)
    data = make_data(problem, 1)
    dx = torch.empty(problem.x_spec.shape, dtype=torch.bfloat16)
    executable.launch(Buffers(data.args, [dx]), torch.empty(executable.workspace_bytes, dtype=torch.uint8))
    exact = oracle(problem, data)[0]
    rounded_once = exact.bfloat16().double()
    assert float((dx.double() - exact).norm()) < 1.05 * float((rounded_once - exact).norm())


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (ConvProblem(1, 4, 5, 5, 4, 3, 3, layout="blocked"), "takes nchw and nhwc tensors, got blocked"),
        (ConvProblem(1, 4, 5, 5, 4, 3, 3, x_dtype="fp16"), "needs x, weight and y of one dtype, got fp16, fp32"),
        (ConvProblem(1, 4, 5, 5, 4, 3, 3, acc_dtype="fp64"), "accumulates in fp32, got acc_dtype fp64"),
        (
            ConvProblem(1, 4, 5, 5, 4, 3, 3, direction="dgrad", epilogue=Epilogue(bias=True)),
            "a data gradient has no epilogue, got bias",
        ),
        (
            ConvProblem(1, 4, 5, 5, 4, 3, 3, direction="wgrad", epilogue=Epilogue(activation="relu")),
            "a weight gradient has no epilogue but the bias's, got relu",
        ),
    ],
)
def test_refusals(problem, reason):
    assert ENGINE.supports(problem, CPU).reason == reason
