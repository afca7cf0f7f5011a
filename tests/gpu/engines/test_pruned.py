"""The pruned engines on the GPU: every pattern of zeros, bit for bit; new values under one mask; graphs; infinite inputs."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from convoy.engines.base import Buffers
from convoy.engines.sparse_weights import pruned_channels_gpu, pruned_csr, pruned_cuda, pruned_direct
from convoy.engines.sparse_weights.direct_sparse_tile import DirectTile
from convoy.engines.sparse_weights.pruned_cuda import ENGINE
from convoy.measurement.accuracy import make_data, oracle
from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem, Epilogue
from tests.gpu.engines.exactness import check_chain, faults
from tests.unit.engines.conv_cases import EPILOGUES, SHAPES
from tests.unit.engines.pruned_cases import PATTERNS, mask_of, pattern, pruned

pytestmark = pytest.mark.gpu

LAYER = ConvProblem(4, 64, 28, 28, 64, 3, 3, 1, 1, epilogue=Epilogue(bias=True, residual=True, activation="relu"))
SETTINGS_LAYER = replace(LAYER, c=32, k=32)
DIRECT = (pruned_cuda.ENGINE, pruned_csr.ENGINE, pruned_direct.ENGINE)


@pytest.fixture(scope="module")
def target():
    return detect_target("cuda")


def typed(problem, dtype):
    return replace(problem, x_dtype=dtype, weight_dtype=dtype, y_dtype=dtype)


@pytest.mark.parametrize("engine", DIRECT, ids=lambda engine: engine.id)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.n])
def test_every_shape_is_exact(name, dtype, engine, target):
    turn = list(SHAPES).index(name)
    problem = typed(pruned(SHAPES[name], PATTERNS[turn % len(PATTERNS)]), dtype)
    assert not faults(engine, replace(problem, epilogue=EPILOGUES[turn % len(EPILOGUES)]), target)


@pytest.mark.parametrize("engine", DIRECT, ids=lambda engine: engine.id)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("name", [name for name in PATTERNS if name not in ("full", "half")])
def test_every_pattern_is_exact(name, dtype, engine, target):
    assert not faults(engine, typed(pruned(LAYER, name), dtype), target)


@pytest.mark.parametrize("engine", DIRECT, ids=lambda engine: engine.id)
def test_every_setting_is_exact(engine, target):
    problem = pruned(SETTINGS_LAYER, "tenth")
    for knobs in engine.space(problem, target):
        assert not faults(engine, problem, target, knobs)


@pytest.mark.parametrize("engine", DIRECT, ids=lambda engine: engine.id)
def test_it_replays_in_a_graph_and_new_values_use_the_same_code(engine, target):
    problem = pruned(LAYER, "tenth")
    executable = engine.build(problem, engine.space(problem, target)[0], target)
    workspace = torch.empty(executable.workspace_bytes, dtype=torch.uint8, device="cuda")
    for seed in (1, 2):
        data = make_data(problem, seed, "integer", "cuda")
        packed = executable.pack(data.constants)
        y = torch.full(problem.y_spec.shape, math.nan, device="cuda")
        buffers = Buffers(data.args, [y], packed)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            executable.launch(buffers, workspace)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            executable.launch(buffers, workspace)
        y.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y.double(), oracle(problem, data)[0])


def test_nan_weights_are_values_and_infinite_inputs_meet_no_zero(target):
    nonzero = pattern("single", (4, 2, 3, 3))
    problem = ConvProblem(1, 2, 9, 9, 4, 3, 3, 1, 1).with_mask(mask_of(nonzero))
    executable = ENGINE.build(problem, ENGINE.space(problem, target)[0], target)
    workspace = torch.empty(max(executable.workspace_bytes, 1), dtype=torch.uint8, device="cuda")
    weight = torch.from_numpy(np.where(nonzero, 1.0, 0.0)).float().cuda()
    for value, inputs in ((1.0, math.inf), (math.nan, 1.0)):
        packed = executable.pack((weight * value if value == 1 else torch.where(weight != 0, value, 0.0),))
        y = torch.zeros(problem.y_spec.shape, device="cuda")
        executable.launch(Buffers((torch.full((1, 2, 9, 9), inputs, device="cuda"),), [y], packed), workspace)
        assert bool(y.isnan().any()) is math.isnan(value)


FEW_PIXELS = {
    "1x1, 7x7": ConvProblem(1, 2048, 7, 7, 512, 1, 1, epilogue=Epilogue(bias=True, activation="relu")),
    "1x1, 7x7, many filters": ConvProblem(1, 512, 7, 7, 2048, 1, 1, epilogue=LAYER.epilogue),
    "1x1, 14x14": ConvProblem(1, 1024, 14, 14, 256, 1, 1, epilogue=Epilogue(bias=True, activation="relu6")),
    "1x1 stride 2": ConvProblem(1, 1024, 14, 14, 2048, 1, 1, 0, 0, 2, 2, epilogue=Epilogue(bias=True)),
    "3x3, 7x7": ConvProblem(1, 512, 7, 7, 512, 3, 3, 1, 1, epilogue=LAYER.epilogue),
    "3x3 stride 2": ConvProblem(2, 512, 14, 14, 512, 3, 3, 1, 1, 2, 2, epilogue=Epilogue(bias=True, activation="relu")),
    "3x3, 14x14": ConvProblem(1, 256, 14, 14, 256, 3, 3, 1, 1, epilogue=LAYER.epilogue),
}


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("name", FEW_PIXELS)
def test_direct_is_exact_on_layers_of_few_pixels_in_every_setting(name, dtype, target):
    problem = typed(pruned(FEW_PIXELS[name], "tenth"), dtype)
    found = [
        faults(pruned_direct.ENGINE, problem, target, knobs) for knobs in pruned_direct.ENGINE.space(problem, target)
    ]
    assert not [fault for each in found for fault in each]


@pytest.mark.parametrize("slices", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["3x3, 7x7", "3x3, 14x14"])
def test_direct_gives_the_same_bits_while_the_next_launch_begins(name, slices, target):
    problem = pruned(FEW_PIXELS[name], "tenth")
    form = DirectTile(vectors=2, filters=8, slices=slices, parts=1, each=2)
    executable = pruned_direct.ENGINE.build(problem, form.knobs, target)
    data = make_data(problem, 3, "normal", "cuda")
    check_chain(executable, data, executable.pack(tuple(constant * 0.02 for constant in data.constants)))


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_channels_are_exact_with_every_inner_engine(layout, dtype, target):
    problem = typed(LAYER, dtype).with_layout(layout)
    nonzero = np.ones(problem.weight_spec.shape, bool)
    nonzero[1::2] = nonzero[:, 5:40] = False
    problem = problem.with_mask(mask_of(nonzero))
    for knobs in pruned_channels_gpu.ENGINE.space(problem, target):
        assert not faults(pruned_channels_gpu.ENGINE, problem, target, knobs)
