"""triton.depthwise_gradients on the GPU: every setting exact on integers and within bounds on real numbers, the same bits."""

import pytest
import torch

from convoy.engines.base import Buffers
from convoy.engines.triton.depthwise_gradients import ENGINE
from convoy.measurement.accuracy import judge, make_data
from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem
from tests.unit.engines.dealt import dealt

pytestmark = pytest.mark.gpu

SHAPES = {
    # n, c, side, filter, padding, stride, dilation: those of MobileNet-v2 and EfficientNet-b0, and odd ones
    "3x3": (4, 144, 56, 3, 1, 1, 1),
    "3x3 stride 2": (4, 96, 112, 3, 1, 2, 1),
    "5x5 stride 2": (4, 240, 28, 5, 2, 2, 1),
    "5x5": (2, 672, 14, 5, 2, 1, 1),
    "last": (8, 960, 7, 3, 1, 1, 1),
    "odd channels": (2, 37, 15, 3, 1, 2, 1),
    "dilation": (2, 32, 17, 3, 2, 1, 2),
    "unseen rows": (2, 16, 16, 2, 0, 3, 1),
}
DTYPES = ["fp32", "bf16", "fp16"]


@pytest.fixture(scope="module")
def target():
    return detect_target("cuda")


def problem(name, direction, dtype):
    n, c, side, taps, pad, stride, dilation = SHAPES[name]
    return ConvProblem(
        n, c, side, side, c, taps, taps, pad, pad, stride, stride, dilation, dilation, c, layout="nhwc", x_dtype=dtype,
        weight_dtype=dtype, y_dtype=dtype, direction=direction, numerics="half" if dtype != "fp32" else "strict",
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", ["dgrad", "wgrad"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_setting_is_right(name, direction, dtype, target):
    """Each with one dtype of a shape, another one for the next shape: a kernel takes a second to compile."""
    given = problem(name, direction, dtype)
    assert ENGINE.supports(given, target)
    place = list(SHAPES).index(name) + DTYPES.index(dtype)
    for knobs in dealt(ENGINE.space(given, target), place, len(DTYPES), launch=("parts",)):
        executable = ENGINE.build(given, knobs, target)
        for kind in ("integer", "normal"):
            verdict = judge(executable, ENGINE.family, given, make_data(given, 5, kind, "cuda"), kind)
            assert verdict.ok, f"[{knobs}] {kind}: {verdict.reason}"


@pytest.mark.parametrize("direction", ["dgrad", "wgrad"])
def test_replays_of_a_graph_give_the_same_bits(direction, target):
    given = problem("3x3", direction, "bf16")
    executable = ENGINE.build(given, ENGINE.space(given, target)[0], target)
    data = make_data(given, 6, "normal", "cuda")
    spec = given.x_spec if direction == "dgrad" else given.weight_spec
    made = torch.empty(spec.shape, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    workspace = torch.empty(executable.workspace_bytes, dtype=torch.uint8, device="cuda")
    executable.launch(Buffers(data.args, [made], ()), workspace)
    torch.cuda.synchronize()
    wanted = made.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        executable.launch(Buffers(data.args, [made], ()), workspace)
    for _ in range(100):
        made.fill_(float("nan"))
        workspace.fill_(255)
        graph.replay()
        assert torch.equal(made, wanted)
