"""The pruned engines on the GPU: every pattern of zeros, bit for bit; new values under one mask; graphs; infinite inputs."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "engines"))
from conv_cases import EPILOGUES, SHAPES
from pruned_cases import PATTERNS, mask_of, pattern, pruned

from convoy.engines.base import Buffers
from convoy.engines.pruned import blocks, channels_gpu, csr, cuda, direct, sparse24
from convoy.engines.pruned.cuda import ENGINE
from convoy.engines.pruned.direct_form import Form as DirectForm
from convoy.engines.pruned.sparse24_form import SHARED_BYTES, Form, iterations
from convoy.measurement.accuracy import judge, make_data, oracle
from convoy.measurement.detect import detect_target
from convoy.problem import ConvProblem, Epilogue

pytestmark = pytest.mark.gpu

LAYER = ConvProblem(4, 64, 28, 28, 64, 3, 3, 1, 1, epilogue=Epilogue(bias=True, residual=True, activation="relu"))
SETTINGS_LAYER = replace(LAYER, c=32, k=32)
DIRECT = (cuda.ENGINE, csr.ENGINE, direct.ENGINE)


@pytest.fixture(scope="module")
def target():
    return detect_target("cuda")


def typed(problem, dtype):
    return replace(problem, x_dtype=dtype, weight_dtype=dtype, y_dtype=dtype)


def faults(engine, problem, target, knobs=None):
    support = engine.accepts(problem, target)
    assert support, support.reason
    chosen = knobs or engine.space(problem, target)[0]
    executable = engine.build(problem, chosen, target)
    assert executable.workspace_bytes == engine.workspace_bytes(problem, chosen)
    kinds = ("integer", "normal")
    # PyTorch's own kernels, which may be inside, take TF32 products for fp32 here.
    tf32 = engine is channels_gpu.ENGINE and problem.x_dtype == "fp32"
    verdicts = [
        judge(executable, engine.family, problem, make_data(problem, 1, k, "cuda"), k, tf32=tf32) for k in kinds
    ]
    return [f"{problem} [{chosen}]: {verdict.reason}" for verdict in verdicts if not verdict.ok]


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


def check_chain(executable, data, packed):
    """Launches of which each reads what the one before wrote: bits are those of launches that are waited for."""
    results = [torch.empty_like(data.args[1]) for _ in range(8)]

    def chain():
        given = data.args
        for y in results:
            executable.launch(Buffers(given, [y], packed), None)
            given = (y, y)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain()
    stream.synchronize()
    given = data.args
    for y in results:
        expected = torch.empty_like(y)
        executable.launch(Buffers(given, [expected], packed), None)
        torch.cuda.synchronize()
        assert expected.isfinite().all()
        assert torch.equal(y, expected)
        given = (expected, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(20):
        for y in results:
            y.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(results[-1], expected)


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
    found = [faults(direct.ENGINE, problem, target, knobs) for knobs in direct.ENGINE.space(problem, target)]
    assert not [fault for each in found for fault in each]


@pytest.mark.parametrize("slices", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["3x3, 7x7", "3x3, 14x14"])
def test_direct_gives_the_same_bits_while_the_next_launch_begins(name, slices, target):
    problem = pruned(FEW_PIXELS[name], "tenth")
    form = DirectForm(vectors=2, filters=8, slices=slices, parts=1, each=2)
    executable = direct.ENGINE.build(problem, form.knobs, target)
    data = make_data(problem, 3, "normal", "cuda")
    check_chain(executable, data, executable.pack(tuple(constant * 0.02 for constant in data.constants)))


# --- tensor cores -------------------------------------------------------------------------------------------------------


def two_of_four(shape):
    """At most two values in every four channels: often two, at times one or none."""
    k, c, r, s = shape
    rng = np.random.default_rng([k, c, r, s])
    order = rng.random((k, c // 4, 4, r, s)).argsort(axis=2).argsort(axis=2)
    return (order < rng.choice([0, 1, 2, 2, 2, 2], (k, c // 4, 1, r, s))).reshape(k, c, r, s)


def in_blocks(shape):
    """Blocks of 32 filters by eight channels at a tap, of which a quarter is there."""
    k, c, r, s = shape
    kept = np.random.default_rng([k, c, r, s]).random((-(-k // 32), c // 8, r, s)) < 0.25
    return kept.repeat(32, axis=0)[:k].repeat(8, axis=1)


def nhwc(*sizes, dtype="fp16", **rest):
    half = {"x_dtype": dtype, "weight_dtype": dtype, "y_dtype": dtype, "numerics": "half"}
    return ConvProblem(*sizes, layout="nhwc", **half, **rest)


FULL = Epilogue(bias=True, residual=True, activation="relu")
TENSOR_CORE = {
    "1x1": nhwc(1, 64, 8, 8, 64, 1, 1),
    "3x3": nhwc(4, 128, 14, 14, 128, 3, 3, 1, 1, epilogue=FULL),
    "3x3 bf16": nhwc(4, 128, 14, 14, 128, 3, 3, 1, 1, dtype="bf16", epilogue=FULL),
    "odd blocks": nhwc(3, 200, 9, 11, 72, 3, 3, 1, 1, epilogue=Epilogue(bias=True, activation="silu")),
    "stride and dilation": nhwc(2, 64, 23, 25, 136, 3, 2, 2, 1, 2, 3, 2, 3, epilogue=FULL),
    "wide": nhwc(32, 256, 14, 14, 256, 3, 3, 1, 1, epilogue=FULL),
    "many filters": nhwc(8, 256, 14, 14, 1024, 1, 1, epilogue=FULL),
    "deep": nhwc(8, 512, 7, 7, 512, 3, 3, 1, 1, epilogue=FULL),
}


ENGINES = {sparse24.ENGINE: two_of_four, blocks.ENGINE: in_blocks}


def masked(engine, name):
    problem = TENSOR_CORE[name]
    return problem.with_mask(mask_of(ENGINES[engine](problem.weight_spec.shape)))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.id)
@pytest.mark.parametrize("name", TENSOR_CORE)
def test_tensor_cores_are_exact(engine, name, target):
    assert not faults(engine, masked(engine, name), target)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.id)
@pytest.mark.parametrize("name", ["3x3", "many filters", "deep"])
def test_tensor_cores_are_exact_in_every_setting(engine, name, target):
    problem = masked(engine, name)
    found = [faults(engine, problem, target, knobs) for knobs in engine.space(problem, target)]
    assert not [fault for each in found for fault in each]


@pytest.mark.parametrize("cluster", [1, 2, 4])
@pytest.mark.parametrize(("rows", "consumers"), [(64, 1), (64, 2), (64, 3), (128, 1), (128, 2)])
def test_sparse24_is_exact_in_every_kind_of_tile(rows, consumers, cluster, target):
    form = Form(rows, 96, 3, consumers, cluster)
    assert not faults(sparse24.ENGINE, masked(sparse24.ENGINE, "many filters"), target, form.knobs)


@pytest.mark.parametrize(
    ("stages", "change"), [(12, {}), (11, {}), (12, {"cluster": 2}), (12, {"split": 2}), (12, {"blocks": 2})]
)
@pytest.mark.parametrize("name", ["deep", "wide"])
def test_sparse24_is_exact_in_deep_rings(name, stages, change, target):
    form = replace(Form(64, 32, stages, 1, 1), **change)
    assert not faults(sparse24.ENGINE, masked(sparse24.ENGINE, name), target, form.knobs)


SPLIT_SHAPES = [(64, 40, 3, 1, 1), (64, 56, 3, 2, 1), (128, 72, 3, 1, 1), (128, 48, 3, 2, 1), (64, 56, 3, 1, 1, 2)]
"""(rows, pixels, stages, consumers, cluster, depth)."""


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("split", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["odd blocks", "deep"])
def test_sparse24_is_exact_in_every_split(name, split, blocks, target):
    problem = masked(sparse24.ENGINE, name)
    forms = [Form(*shape, split=split, blocks=blocks) for shape in SPLIT_SHAPES]
    fit = [
        form
        for form in forms
        if form.shared_bytes <= SHARED_BYTES[blocks] and (split - 1) * form.each(problem) < form.steps(problem)
    ]
    turn = (split + 2 * blocks + len(name)) % len(fit)
    found = [faults(sparse24.ENGINE, problem, target, form.knobs) for form in (fit[turn], fit[turn - 2])]
    assert not [fault for each in found for fault in each]


STAGED = [
    Form(64, 48, 12, 1, 1, staged=1), Form(64, 72, 4, 2, 1, staged=1), Form(128, 96, 5, 1, 1, staged=1),
    Form(128, 64, 3, 2, 1, depth=2, staged=1), Form(64, 96, 4, 3, 1, staged=1), Form(128, 32, 4, 2, 2, staged=1),
    Form(64, 56, 4, 1, 1, split=3, blocks=2, staged=1), Form(128, 80, 4, 1, 1, split=2, staged=1),
    Form(64, 48, 9, 1, 1, blocks=2, staged=2), Form(128, 96, 5, 1, 1, blocks=2, staged=2), Form(64, 72, 4, 2, 1, staged=2),
    Form(128, 64, 4, 2, 2, staged=2), Form(128, 56, 5, 1, 1, split=4, blocks=2, staged=2),
]  # fmt: skip


@pytest.mark.parametrize("form", STAGED, ids=lambda form: str(form.knobs))
@pytest.mark.parametrize("name", ["3x3 bf16", "odd blocks", "stride and dilation", "wide"])
def test_sparse24_is_exact_with_results_through_shared_memory(name, form, target):
    problem = masked(sparse24.ENGINE, name)
    if iterations(problem) % form.depth:
        form = replace(form, depth=1)
    if (form.split - 1) * form.each(problem) >= form.steps(problem):
        form = replace(form, split=3)
    assert not faults(sparse24.ENGINE, problem, target, form.knobs)


HALOS = [
    Form(64, 64, 12, 1, 1), Form(64, 64, 4, 1, 1, depth=3, blocks=2), Form(128, 112, 8, 1, 1), Form(64, 224, 4, 1, 1),
    Form(64, 32, 6, 2, 1, depth=3), Form(128, 48, 4, 2, 1), Form(64, 64, 6, 1, 1, split=2),
    Form(128, 32, 4, 1, 1, depth=3, split=2), Form(64, 64, 4, 1, 1, depth=3, blocks=2, staged=2),
    Form(64, 96, 5, 1, 1, split=4, blocks=2),
]  # fmt: skip
"""Of tiles of 16 columns a row: of 14 by 14, or of 9 by 11 pixels."""


@pytest.mark.parametrize("form", HALOS, ids=lambda form: str(form.knobs))
@pytest.mark.parametrize("name", ["3x3 bf16", "odd blocks", "wide"])
def test_sparse24_is_exact_with_pixels_that_all_taps_share(name, form, target):
    problem = masked(sparse24.ENGINE, name)
    form = replace(form, staged=max(form.staged, 1), halo=16)
    if (form.split - 1) * form.each(problem) >= form.steps(problem):
        form = replace(form, split=2)
    assert not faults(sparse24.ENGINE, problem, target, form.knobs)


@pytest.mark.parametrize(
    "change",
    [{}, {"rows": 128}, {"depth": 3, "stages": 4}, {"split": 2}, {"split": 8}, {"consumers": 2}, {"pixels": 16}],
)
def test_sparse24_is_exact_with_rows_whose_padding_is_the_next_ones(change, target):
    form = replace(Form(64, 56, 8, 1, 1, staged=1, halo=8), **change)
    assert not faults(sparse24.ENGINE, masked(sparse24.ENGINE, "deep"), target, form.knobs)


HELD = {"stages": 4, "pixels": 56, "staged": 1, "halo": 8}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"split": 2},
        {"split": 4},
        {"cluster": 2},
        {"staged": 1},
        {"staged": 1, "split": 2},
        {"staged": 2},
        HELD,
        {**HELD, "staged": 2},
        {**HELD, "split": 4},
    ],
)
def test_sparse24_gives_the_same_bits_while_the_next_launch_begins(change, target):
    problem = masked(sparse24.ENGINE, "deep")
    form = replace(Form(64, 64, 4, 2, 1, blocks=2), **change)
    executable = sparse24.ENGINE.build(problem, form.knobs, target)
    data = make_data(problem, 3, "normal", "cuda")
    packed = executable.pack(tuple(constant * 0.02 for constant in data.constants))
    check_chain(executable, data, packed)


WAYS = {
    "first guess": lambda engine, problem, target: engine.space(problem, target)[0],
    "own stores": lambda *_: Form(64, 48, 4, 2, 1).knobs,
    "staged": lambda *_: Form(64, 48, 4, 2, 1, staged=1).knobs,
    "halo": lambda *_: Form(64, 64, 4, 2, 1, staged=1, halo=16).knobs,
}


@pytest.mark.parametrize(
    ("engine", "way"), [(blocks.ENGINE, "first guess"), *((sparse24.ENGINE, way) for way in WAYS)],
    ids=lambda value: getattr(value, "id", value),
)  # fmt: skip
def test_tensor_cores_write_a_slice_in_a_graph(engine, way, target):
    problem = masked(engine, "3x3")
    executable = engine.build(problem, WAYS[way](engine, problem, target), target)
    data = make_data(problem, 3, "integer", "cuda")
    n, k, p, q = problem.y_spec.shape
    whole = torch.full((n, p, q, k + 32), math.nan, device="cuda", dtype=torch.float16).permute(0, 3, 1, 2)
    y = whole.narrow(1, 16, k)
    assert executable.accept_slice(0, k + 32, 16)
    buffers = Buffers(data.args, [y], executable.pack(data.constants))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        executable.launch(buffers, None)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        executable.launch(buffers, None)
    whole.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y.double(), oracle(problem, data)[0])
    assert int(whole.isnan().sum()) == n * p * q * 32


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_channels_are_exact_with_every_inner_engine(layout, dtype, target):
    problem = typed(LAYER, dtype).with_layout(layout)
    nonzero = np.ones(problem.weight_spec.shape, bool)
    nonzero[1::2] = nonzero[:, 5:40] = False
    problem = problem.with_mask(mask_of(nonzero))
    for knobs in channels_gpu.ENGINE.space(problem, target):
        assert not faults(channels_gpu.ENGINE, problem, target, knobs)
