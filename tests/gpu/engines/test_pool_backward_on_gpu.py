"""triton.pool_backward on the GPU: every setting exact on integers, in a captured graph, the same bits every time."""

import pytest
import torch

from convoy.engines.base import Buffers
from convoy.engines.library.aten import ENGINE as BASELINE
from convoy.engines.triton.pooling.pool_backward import ENGINE
from convoy.measurement.accuracy import judge, make_data
from convoy.measurement.data import Data
from convoy.measurement.device.detect import detect_target
from convoy.measurement.oracle import oracle
from convoy.problem import SubgraphProblem
from tests.unit.engines.dealt import dealt
from tests.unit.engines.pool_backward_cases import AVERAGES, average_piece

pytestmark = pytest.mark.gpu

SHAPES = {
    # c, side of x, side of y, window, stride, padding, ceil mode: those of GoogLeNet and ResNet, and odd ones
    "112 to 56, ceil": (64, 112, 56, 3, 2, 0, True),
    "112 to 56, padded": (64, 112, 56, 3, 2, 1, False),
    "28, stride 1": (192, 28, 28, 3, 1, 1, True),
    "7, stride 1": (832, 7, 7, 3, 1, 1, True),
    "14 to 7, 2x2": (832, 14, 7, 2, 2, 0, True),
    "odd channels": (37, 15, 7, 3, 2, 0, False),
}
DTYPES = [("fp32", "i64"), ("bf16", "i16"), ("fp16", "i32")]


@pytest.fixture(scope="module")
def target():
    return detect_target("cuda")


def piece(name, dtype, n, indices="i64"):
    c, x, y, window, stride, padding, ceil_mode = SHAPES[name]
    pair = lambda value: f"({value}, {value})"  # noqa: E731 - the text below is long enough
    cast = f"%w: i64[{n},{c},{y},{y}] = aten._to_copy.default(%v2, dtype=dtype.i64)\n" if indices != "i64" else ""
    wide = "%w" if cast else "%v2"
    return SubgraphProblem(
        f"graph 1\ninput %v0: {dtype}[{n},{c},{y},{y}]\ninput %v1: {dtype}[{n},{c},{x},{x}]\n"
        f"input %v2: {indices}[{n},{c},{y},{y}]\n{cast}"
        f"%v3: {dtype}[{n},{c},{x},{x}] = aten.max_pool2d_with_indices_backward.default(%v0, %v1, {pair(window)}, {pair(stride)},"
        f" {pair(padding)}, (1, 1), {ceil_mode}, {wide})\nreturn %v3\n",
        "nhwc",
    )


@pytest.mark.parametrize(("dtype", "indices"), DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_every_setting_is_right(name, dtype, indices, target):
    """Each with one pair of dtypes of a shape, another one for the next shape: a kernel takes a second to compile."""
    problem = piece(name, dtype, 3, indices)
    place = list(SHAPES).index(name) + DTYPES.index((dtype, indices))
    for knobs in dealt(ENGINE.space(problem, target), place, len(DTYPES)):
        executable = ENGINE.build(problem, knobs, target)
        for kind in ("integer", "normal"):
            verdict = judge(executable, ENGINE.family, problem, make_data(problem, 5, kind, "cuda"), kind)
            assert verdict.ok, f"[{knobs}] {kind}: {verdict.reason}"


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", AVERAGES)
def test_every_setting_of_an_average_is_right(name, dtype, target):
    problem = average_piece(name, dtype)
    for knobs in dealt(ENGINE.space(problem, target), list(AVERAGES).index(name), 2):
        executable = ENGINE.build(problem, knobs, target)
        for kind in ("integer", "normal"):
            verdict = judge(executable, ENGINE.family, problem, make_data(problem, 5, kind, "cuda"), kind)
            assert verdict.ok, f"[{knobs}] {kind}: {verdict.reason}"


@pytest.mark.parametrize("name", AVERAGES)
def test_the_baseline_of_an_average_is_right_too(name, target):
    """PyTorch's own kernel is not, in channels_last with padding, and the oracle must not be what is wrong."""
    problem = average_piece(name)
    data = make_data(problem, 5, "normal", "cuda")
    (found,) = oracle(problem, data)
    plain = Data(tuple(t.cpu() for t in data.args), ())
    torch.testing.assert_close(found.cpu(), oracle(problem, plain)[0])
    verdict = judge(
        BASELINE.build(problem, BASELINE.space(problem, target)[0], target), BASELINE.family, problem, data, "normal"
    )
    assert verdict.ok, verdict.reason


def test_replays_of_a_graph_give_the_same_bits(target):
    problem = piece("112 to 56, padded", "bf16", 8)
    executable = ENGINE.build(problem, ENGINE.space(problem, target)[0], target)
    data = make_data(problem, 6, "normal", "cuda")
    result = torch.empty_like(data.args[1])
    executable.launch(Buffers(data.args, [result], ()), None)
    torch.cuda.synchronize()
    wanted = result.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        executable.launch(Buffers(data.args, [result], ()), None)
    for _ in range(20):
        result.fill_(7)
        graph.replay()
        assert torch.equal(result, wanted)
