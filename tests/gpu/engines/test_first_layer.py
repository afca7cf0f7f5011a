"""First layers of nets on the GPU with what pools them, in halves and TF32: exact, the same bits every time, slices, graphs."""

import math
from dataclasses import replace

import pytest
import torch

from convoy.engines.base import Buffers
from convoy.engines.hopper import first_layer, first_layer_tf32
from convoy.engines.hopper.first_layer_tile_config import FirstLayerTile as Form
from convoy.engines.hopper.nvrtc_kernel import SpillError
from convoy.measurement.accuracy import make_data, oracle
from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem, Epilogue, Pool
from tests.gpu.engines.exactness import faults

pytestmark = pytest.mark.gpu


def layer(*sizes, dtype="fp16", pool=None, activation="relu", bias=True):
    types = dict.fromkeys(("x_dtype", "weight_dtype", "y_dtype"), dtype)
    epilogue = Epilogue(bias=bias, activation=activation, pool=pool)
    numerics = "as_torch" if dtype == "fp32" else "half"
    return ConvProblem(*sizes, layout="nhwc", numerics=numerics, epilogue=epilogue, **types)


PADDED, BARE = Pool("max", 3, 3, 2, 2, 1, 1), Pool("max", 3, 3, 2, 2)
FULL = {**dict.fromkeys(("x_dtype", "weight_dtype", "y_dtype"), "fp32"), "numerics": "as_torch"}
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
LAYERS = {
    "resnet50": layer(2, 3, 224, 224, 64, 7, 7, 3, 3, 2, 2, pool=PADDED),
    "resnet50, bf16, not pooled": layer(2, 3, 224, 224, 64, 7, 7, 3, 3, 2, 2, dtype="bf16"),
    "googlenet": layer(2, 3, 224, 224, 64, 7, 7, 3, 3, 2, 2, pool=replace(BARE, ceil_mode=True)),
    "alexnet": layer(3, 3, 224, 224, 64, 11, 11, 2, 2, 4, 4, pool=BARE),
    "inception": layer(1, 3, 299, 299, 32, 3, 3, 0, 0, 2, 2),
    "mobilenet": layer(2, 3, 224, 224, 32, 3, 3, 1, 1, 2, 2, activation="relu6"),
    "efficientnet": layer(2, 3, 224, 224, 32, 3, 3, 1, 1, 2, 2, activation="silu"),
    "odd sides, one channel": layer(3, 1, 63, 77, 40, 5, 5, 2, 2, 2, 2, pool=PADDED, activation="none", bias=False),
    "four channels": layer(1, 4, 50, 66, 64, 7, 7, 3, 3, 2, 2, dtype="bf16", pool=BARE, activation="relu6"),
}
LAYERS |= {
    f"{name}, fp32": replace(LAYERS[name], **FULL)
    for name in ("resnet50", "googlenet", "alexnet", "inception", "mobilenet")
} | {
    "vgg, fp32": layer(1, 3, 224, 224, 64, 3, 3, 1, 1, dtype="fp32"),
    "odd sides, one channel, fp32": replace(LAYERS["odd sides, one channel"], **FULL),
    "not pooled, fp32": layer(2, 3, 224, 224, 64, 7, 7, 3, 3, 2, 2, dtype="fp32", activation="none", bias=False),
}


def engine_of(problem):
    """The engine that takes the problem."""
    return first_layer_tf32.ENGINE if problem.x_dtype == "fp32" else first_layer.ENGINE


@pytest.fixture(scope="module")
def target():
    return detect_target("cuda")


@pytest.mark.parametrize("name", LAYERS)
def test_exact_in_every_form(name, target):
    problem = LAYERS[name]
    engine, refused, found = engine_of(problem), [], []
    space = engine.space(problem, target)
    for knobs in space:
        try:
            found += faults(engine, problem, target, knobs, tf32=problem.x_dtype == "fp32")
        except SpillError as error:  # the tuner drops such a form
            refused.append(error)
    assert not found
    assert len(refused) <= len(space) // 10


@pytest.mark.parametrize("name", ["resnet50", "alexnet", "inception", "resnet50, fp32", "inception, fp32"])
def test_a_hundred_runs_give_the_same_bits_in_a_graph_and_beside_it(name, target):
    problem = LAYERS[name]
    executable = engine_of(problem).build(problem, Form(2, 1).knobs, target)
    data = make_data(problem, 5, "normal", "cuda")
    y = torch.full(problem.y_spec.shape, math.nan, dtype=DTYPES[problem.y_dtype], device="cuda")
    y = y.contiguous(memory_format=torch.channels_last)
    buffers = Buffers(data.args, [y], executable.pack(data.constants))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        executable.launch(buffers, None)
    stream.synchronize()
    first = y.clone()
    assert first.isfinite().all()
    for _ in range(100):
        y.fill_(math.nan)
        executable.launch(buffers, None)
        assert torch.equal(y, first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        executable.launch(buffers, None)
        executable.launch(buffers, None)
    for _ in range(20):
        y.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, first)


@pytest.mark.parametrize("name", ["resnet50", "mobilenet", "resnet50, fp32"])
def test_a_slice_of_a_larger_tensor_is_written_and_nothing_beside_it(name, target):
    problem = LAYERS[name]
    engine, dtype = engine_of(problem), DTYPES[problem.y_dtype]
    executable = engine.build(problem, engine.space(problem, target)[0], target)
    data = make_data(problem, 3, "integer", "cuda")
    n, k, p, q = problem.y_spec.shape
    whole = torch.full((n, p, q, k + 32), math.nan, device="cuda", dtype=dtype).permute(0, 3, 1, 2)
    y = whole.narrow(1, 16, k)
    assert executable.accept_slice(0, k + 32, 16)
    executable.launch(Buffers(data.args, [y], executable.pack(data.constants)), None)
    torch.cuda.synchronize()
    assert torch.equal(y.double(), oracle(problem, data)[0].to(dtype).double())
    assert int(whole.isnan().sum()) == n * p * q * 32
