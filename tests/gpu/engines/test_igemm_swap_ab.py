"""Kernels on tensor cores whose rows are filters, on the GPU: dense weights, 2:4 ones and blocks of zeros, every kind of tile."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from convoy.engines.base import Buffers
from convoy.engines.hopper import igemm_dgrad, igemm_dynamic_weight, igemm_swap_ab
from convoy.engines.hopper.igemm_swap_ab_limits import SHARED_BYTES
from convoy.engines.hopper.igemm_swap_ab_tile_config import SwapAbTile as Form
from convoy.engines.hopper.igemm_swap_ab_tile_config import iterations
from convoy.engines.sparse_weights import block_sparse, sparse24
from convoy.measurement.accuracy import make_data, oracle
from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem, Epilogue
from tests.gpu.engines.exactness import check_chain, faults
from tests.unit.engines.pruned_cases import mask_of

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def target():
    return detect_target("cuda")


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


ENGINES = {igemm_swap_ab.ENGINE: None, sparse24.ENGINE: two_of_four, block_sparse.ENGINE: in_blocks}
UNPACKED = [igemm_dynamic_weight.ENGINE, igemm_dgrad.ENGINE]
FORMED = [igemm_swap_ab.ENGINE, sparse24.ENGINE]
"""Engines of one kernel, `igemm_swap_ab.cu`."""

formed = pytest.mark.parametrize("engine", FORMED, ids=lambda engine: engine.id)


def layer(engine, name):
    """A problem that the engine takes."""
    problem, zeros = TENSOR_CORE[name], ENGINES[engine]
    return problem.with_mask(mask_of(zeros(problem.weight_spec.shape))) if zeros else problem


def own_form(engine, form):
    """The form as the engine's own, with as many of its stages as there is room for."""
    own = engine.tile_config(**{field.name: getattr(form, field.name) for field in fields(form)})
    while own.shared_bytes > SHARED_BYTES[own.blocks] and own.stages > 2:
        own = replace(own, stages=own.stages - 1)
    return own


def knobs_of(engine, form):
    """Its knobs."""
    return own_form(engine, form).knobs


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.id)
@pytest.mark.parametrize("name", TENSOR_CORE)
def test_tensor_cores_are_exact(engine, name, target):
    assert not faults(engine, layer(engine, name), target)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.id)
@pytest.mark.parametrize("name", ["3x3", "many filters", "deep"])
def test_tensor_cores_are_exact_in_every_setting(engine, name, target):
    problem = layer(engine, name)
    found = [faults(engine, problem, target, knobs) for knobs in engine.space(problem, target)]
    assert not [fault for each in found for fault in each]


def unpacked(engine, name):
    """A problem of training: a fresh weight, or a gradient where there can be one."""
    problem = TENSOR_CORE[name]
    if engine is igemm_dynamic_weight.ENGINE:
        return replace(problem, dynamic_weight=True)
    return replace(problem, direction="dgrad", epilogue=Epilogue(), stride_h=1, stride_w=1)


@pytest.mark.parametrize("engine", UNPACKED, ids=lambda engine: engine.id)
@pytest.mark.parametrize("name", TENSOR_CORE)
def test_weights_as_they_lie_are_exact_in_every_setting(engine, name, target):
    problem = unpacked(engine, name)
    found = [faults(engine, problem, target, knobs) for knobs in engine.space(problem, target)]
    assert not [fault for each in found for fault in each]


@formed
@pytest.mark.parametrize("cluster", [1, 2, 4])
@pytest.mark.parametrize(("rows", "consumers"), [(64, 1), (64, 2), (64, 3), (128, 1), (128, 2)])
def test_filters_as_rows_are_exact_in_every_kind_of_tile(engine, rows, consumers, cluster, target):
    form = Form(rows, 96, 3, consumers, cluster)
    assert not faults(engine, layer(engine, "many filters"), target, knobs_of(engine, form))


@formed
@pytest.mark.parametrize(
    ("stages", "change"), [(12, {}), (11, {}), (12, {"cluster": 2}), (12, {"split": 2}), (12, {"blocks": 2})]
)
@pytest.mark.parametrize("name", ["deep", "wide"])
def test_filters_as_rows_are_exact_in_deep_rings(engine, name, stages, change, target):
    form = replace(Form(64, 32, stages, 1, 1), **change)
    assert not faults(engine, layer(engine, name), target, knobs_of(engine, form))


SPLIT_SHAPES = [(64, 40, 3, 1, 1), (64, 56, 3, 2, 1), (128, 72, 3, 1, 1), (128, 48, 3, 2, 1), (64, 56, 3, 1, 1, 2)]
"""(rows, pixels, stages, consumers, cluster, depth)."""


@formed
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("split", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["odd blocks", "deep"])
def test_filters_as_rows_are_exact_in_every_split(engine, name, split, blocks, target):
    problem = layer(engine, name)
    forms = [own_form(engine, Form(*shape, split=split, blocks=blocks)) for shape in SPLIT_SHAPES]
    fit = [
        form
        for form in forms
        if form.shared_bytes <= SHARED_BYTES[blocks] and (split - 1) * form.each(problem) < form.steps(problem)
    ]
    turn = (split + 2 * blocks + len(name)) % len(fit)
    found = [faults(engine, problem, target, form.knobs) for form in (fit[turn], fit[turn - 2])]
    assert not [fault for each in found for fault in each]


STAGED = [
    Form(64, 48, 12, 1, 1, staged=1), Form(64, 72, 4, 2, 1, staged=1), Form(128, 96, 5, 1, 1, staged=1),
    Form(128, 64, 3, 2, 1, depth=2, staged=1), Form(64, 96, 4, 3, 1, staged=1), Form(128, 32, 4, 2, 2, staged=1),
    Form(64, 56, 4, 1, 1, split=3, blocks=2, staged=1), Form(128, 80, 4, 1, 1, split=2, staged=1),
    Form(64, 48, 9, 1, 1, blocks=2, staged=2), Form(128, 96, 5, 1, 1, blocks=2, staged=2), Form(64, 72, 4, 2, 1, staged=2),
    Form(128, 64, 4, 2, 2, staged=2), Form(128, 56, 5, 1, 1, split=4, blocks=2, staged=2),
]  # fmt: skip


@formed
@pytest.mark.parametrize("form", STAGED, ids=lambda form: str(form.knobs))
@pytest.mark.parametrize("name", ["3x3 bf16", "odd blocks", "stride and dilation", "wide"])
def test_filters_as_rows_are_exact_with_results_through_shared_memory(engine, name, form, target):
    problem = layer(engine, name)
    if iterations(problem) % form.depth:
        form = replace(form, depth=1)
    if (form.split - 1) * form.each(problem) >= form.steps(problem):
        form = replace(form, split=3)
    assert not faults(engine, problem, target, knobs_of(engine, form))


HALOS = [
    Form(64, 64, 12, 1, 1), Form(64, 64, 4, 1, 1, depth=3, blocks=2), Form(128, 112, 8, 1, 1), Form(64, 224, 4, 1, 1),
    Form(64, 32, 6, 2, 1, depth=3), Form(128, 48, 4, 2, 1), Form(64, 64, 6, 1, 1, split=2),
    Form(128, 32, 4, 1, 1, depth=3, split=2), Form(64, 64, 4, 1, 1, depth=3, blocks=2, staged=2),
    Form(64, 96, 5, 1, 1, split=4, blocks=2),
]  # fmt: skip
"""Of tiles of 16 columns a row: of 14 by 14, or of 9 by 11 pixels."""


@formed
@pytest.mark.parametrize("form", HALOS, ids=lambda form: str(form.knobs))
@pytest.mark.parametrize("name", ["3x3 bf16", "odd blocks", "wide"])
def test_filters_as_rows_are_exact_with_pixels_that_all_taps_share(engine, name, form, target):
    problem = layer(engine, name)
    form = replace(form, staged=max(form.staged, 1), halo=16)
    if (form.split - 1) * form.each(problem) >= form.steps(problem):
        form = replace(form, split=2)
    assert not faults(engine, problem, target, knobs_of(engine, form))


ODD_ROWS = [
    Form(64, 112, 8, 1, 1, staged=1), Form(64, 216, 4, 1, 1, staged=1), Form(64, 48, 4, 2, 1, split=2),
    Form(128, 64, 4, 1, 1, depth=3, staged=1), Form(64, 112, 4, 2, 1, staged=2), Form(64, 80, 5, 1, 1, split=4, blocks=2),
]  # fmt: skip
"""Of tiles of 15 columns a row."""


@formed
@pytest.mark.parametrize("form", ODD_ROWS, ids=lambda form: str(form.knobs))
@pytest.mark.parametrize("name", ["3x3", "3x3 bf16", "wide"])
def test_filters_as_rows_are_exact_with_rows_of_odd_columns(engine, name, form, target):
    problem, form = layer(engine, name), replace(form, halo=15)
    if form.split > 2 and (form.split - 1) * form.each(problem) >= form.steps(problem):
        form = replace(form, split=2)
    assert not faults(engine, problem, target, knobs_of(engine, form))


@formed
@pytest.mark.parametrize(
    "change",
    [{}, {"rows": 128}, {"depth": 3, "stages": 4}, {"split": 2}, {"split": 8}, {"consumers": 2}, {"pixels": 16}],
)
def test_filters_as_rows_are_exact_with_rows_whose_padding_is_the_next_ones(engine, change, target):
    form = replace(Form(64, 56, 8, 1, 1, staged=1, halo=8), **change)
    assert not faults(engine, layer(engine, "deep"), target, knobs_of(engine, form))


HELD = {"stages": 4, "pixels": 56, "staged": 1, "halo": 8}


@formed
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
def test_filters_as_rows_give_the_same_bits_while_the_next_launch_begins(engine, change, target):
    problem = layer(engine, "deep")
    form = replace(Form(64, 64, 4, 2, 1, blocks=2), **change)
    executable = engine.build(problem, knobs_of(engine, form), target)
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
    ("engine", "way"), [(block_sparse.ENGINE, "first guess"), *((engine, way) for engine in FORMED for way in WAYS)],
    ids=lambda value: getattr(value, "id", value),
)  # fmt: skip
def test_tensor_cores_write_a_slice_in_a_graph(engine, way, target):
    problem = layer(engine, "3x3")
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
