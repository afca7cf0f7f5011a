"""pruned.direct without a GPU: its kernel run by threads of the CPU, compiled for sm_90a, refused."""

import ctypes
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from convoy.engines.base import Buffers
from convoy.engines.sparse_weights import direct_sparse_cost, direct_sparse_tile, pruned_direct
from convoy.engines.sparse_weights.codegen.lower_mask import positions
from convoy.engines.sparse_weights.direct_sparse_cost import estimate_us, most_entries, tile_configs
from convoy.engines.sparse_weights.direct_sparse_entries import entries_of
from convoy.engines.sparse_weights.direct_sparse_tile import (
    FLAT,
    FOURS,
    ONE_BY_ONE,
    DirectGeometry,
    DirectTile,
    tile_config_of,
)
from convoy.engines.sparse_weights.pruned_direct import ENGINE
from convoy.errors import InputError, LaunchError
from convoy.measurement.accuracy import make_data, oracle
from convoy.problem import ConvProblem, Epilogue, parse_problem
from convoy.target import Target
from tests.unit.engines.conv_cases import EPILOGUES, SHAPES
from tests.unit.engines.emulated_cuda import address, kernel_libraries
from tests.unit.engines.pruned_cases import PATTERNS, SMALL, mask_of, pattern, pruned
from tests.unit.engines.spills import assert_no_spills

HERE = Path(__file__).parent
H100 = Target("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132, 80 << 30, 50 << 20)
A100 = Target("cuda", "NVIDIA A100", "sm_80", 108, 80 << 30, 40 << 20)
CPU = Target("cpu", "a CPU", "avx2", 2, 8 << 30, 1 << 20)
HALF = {"x_dtype": "fp16", "weight_dtype": "fp16", "y_dtype": "fp16", "numerics": "half"}
LAUNCH = """
extern "C" int run(const Value* x, const uint4* lists, const int* begins, const float* bias, const Value* residual, Value* y,
                   int grid, int room, size_t x_bytes, size_t list_bytes) {
  readable = {{(const char*)x, x_bytes}, {(const char*)lists, list_bytes}};
  return launch(grid, SLICES, THREADS, room, [=] { direct(x, lists, begins, bias, residual, y); });
}
"""
SEEDS = 3
FULL = Epilogue(bias=True, residual=True, activation="relu")


@pytest.fixture(autouse=True)
def _bindings_are_there(monkeypatch):
    monkeypatch.setattr(pruned_direct, "absence", lambda: "")


@pytest.fixture
def _four_lanes(monkeypatch):
    """A thread of the host is dear: a warp has four."""
    monkeypatch.setattr(direct_sparse_tile, "LANES", 4)
    monkeypatch.setattr(direct_sparse_cost, "LANES", 4)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    build = kernel_libraries(tmp_path_factory.mktemp("direct"), HERE / "device")

    def kernel(geometry, changes=()):
        return build("direct", geometry.parameters(), LAUNCH, changes=changes)

    return kernel


def run(library, problem, form, *, changes=(), data=None):
    """The kernel's y, the oracle's, and faults; on integers where nothing is given."""
    data = data or make_data(problem, 1, "integer")
    geometry = DirectGeometry(problem, form)
    entries = entries_of(positions(problem.mask), geometry)
    assert entries.most <= most_entries(problem, form)
    words = torch.from_numpy(entries.words)
    words[torch.from_numpy(entries.values)] = data.constants[0].reshape(-1)[entries.places].float().view(torch.int32)
    bias = data.constants[1].float() if problem.epilogue.bias else None
    residual = data.args[1] if problem.epilogue.residual else None
    x, y = data.args[0], torch.full(problem.y_spec.shape, float("nan"), dtype=data.args[0].dtype)
    aligned = torch.empty(words.numel() + 4, dtype=torch.int32)
    lists = aligned[-(aligned.data_ptr() // 4) % 4 :][: words.numel()]
    lists.copy_(words)
    begins = torch.from_numpy(entries.begins)
    faults = library(geometry, changes).run(
        address(x), address(lists), address(begins), address(bias), address(residual), address(y),
        geometry.grid, geometry.shared_bytes_for(entries.most), ctypes.c_size_t(x.nbytes), ctypes.c_size_t(lists.nbytes),
    )  # fmt: skip
    return y.double(), oracle(problem, data)[0], faults


CASES = {
    "a slice alone": (pruned(SMALL, "half"), DirectTile(2, 4, 1, 1, 1), ONE_BY_ONE),
    "two slices": (pruned(SMALL, "half"), DirectTile(2, 4, 2, 1, 1), ONE_BY_ONE),
    "slices, parts, filters of a warp": (pruned(SMALL, "half"), DirectTile(3, 4, 2, 2, 4), ONE_BY_ONE),
    "parts alone": (pruned(SMALL, "tenth"), DirectTile(1, 2, 1, 4, 2), ONE_BY_ONE),
    "more slices than channels fill": (pruned(SMALL, "half"), DirectTile(2, 4, 4, 1, 2), ONE_BY_ONE),
    "one run": (pruned(ConvProblem(1, 16, 5, 7, 8, 1, 1, epilogue=FULL), "half"), DirectTile(10, 4, 2, 1, 1), FLAT),
    "fours": (pruned(ConvProblem(2, 6, 4, 7, 8, 1, 1, epilogue=FULL), "half"), DirectTile(3, 4, 2, 1, 1), FOURS),
    "phases of a stride": (pruned(SHAPES["11x11 stride 4"], "tenth"), DirectTile(5, 4, 1, 1, 1), ONE_BY_ONE),
    "grouped, dilated": (pruned(SHAPES["dilated, strided, grouped"], "full"), DirectTile(3, 2, 2, 1, 1), ONE_BY_ONE),
    "depthwise": (pruned(SHAPES["depthwise, two filters a channel"], "half"), DirectTile(2, 2, 1, 2, 1), ONE_BY_ONE),
    "empty and full filters": (pruned(SMALL, "empty and full filters"), DirectTile(2, 8, 2, 2, 4), ONE_BY_ONE),
    "nothing": (pruned(SMALL, "none"), DirectTile(2, 4, 2, 1, 1), ONE_BY_ONE),
    "half": (replace(pruned(SMALL, "half"), **HALF), DirectTile(2, 4, 2, 1, 2), ONE_BY_ONE),
}

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")
four_lanes = pytest.mark.usefixtures("_four_lanes")


@needs_compiler
@four_lanes
@pytest.mark.parametrize("name", CASES)
def test_exact_on_integers(library, name):
    problem, form, copy = CASES[name]
    assert DirectGeometry(problem, form).copy == copy
    y, expected, faults = run(library, problem, form)
    assert not faults
    assert torch.equal(y, expected)


def drawn(rng):
    """A problem and a form, from any corner."""
    shapes = [shape for shape in SHAPES.values() if shape.n and shape.p * shape.q < 200]
    shape = replace(rng.choice(shapes), epilogue=rng.choice(EPILOGUES[:6]))
    problem = pruned(shape, rng.choice(PATTERNS), rng.randrange(100))
    slices = rng.choice([count for count in (1, 2, 4) if count <= shape.c // shape.groups])
    each = rng.choice([1, 2])
    filters = slices * each * rng.choice([1, 2])
    return problem, DirectTile(rng.randint(1, 9), filters, slices, rng.choice([1, 2]), each)


@needs_compiler
@four_lanes
@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_form_of_any_problem_is_exact(library, seed):
    problem, form = drawn(random.Random(seed))
    y, expected, faults = run(library, problem, form)
    assert not faults, (problem, form)
    assert torch.equal(y, expected), (problem, form)


HARMS = {
    "sums are taken before they have come": ("mbarrier_wait(bar); else", "; else"),
    "positions are a float off": ("input[v * LANES]", "input[v * LANES + 1]"),
    "all input is inside": ("inside = source[round] >= 0;\n          got", "inside = true;\n          got"),
    "planes behind the last are read": ("inside && p < channels", "inside"),
    "a block takes its neighbour's list": ("begins[block * SLICES + rank],", "begins[block * SLICES + (rank ^ 1)],"),
}


@needs_compiler
@four_lanes
@pytest.mark.parametrize("name", HARMS)
def test_a_planted_fault_is_noticed(library, name):
    problem, form, _ = CASES["two slices"]
    whole, harmed = HARMS[name]

    changes = [(whole, harmed)]
    if "mbarrier_wait" in whole:  # and the blocks of higher rank come late
        changes.append(("if (!e) cluster_wait();", "if (!e) {cluster_wait(); usleep(20000 * rank);}"))
    y, expected, faults = run(library, problem, form, changes=changes)
    assert faults or not torch.equal(y, expected)


@needs_compiler
@four_lanes
def test_what_lies_at_zeros_is_not_read(library):
    """Neither by entries that fill a four: an infinity times zero is not a number."""
    nonzero = np.zeros(SMALL.weight_spec.shape, bool)
    nonzero[:, 0, 1, 1] = True
    problem = replace(SMALL, epilogue=Epilogue()).with_mask(mask_of(nonzero))
    data = make_data(problem, 1, "integer")
    x = data.args[0].clone()
    x[:, 1:] = float("nan")
    y, expected, faults = run(library, problem, DirectTile(2, 4, 2, 1, 1), data=replace(data, args=(x,)))
    assert not faults
    assert torch.equal(y, oracle(problem, data)[0])
    assert expected.isnan().any()


def test_entries_lie_inside_their_block():
    for name in ("dilated, strided, grouped", "3x3 over-padded", "4x2", "grouped 5x5", "11x11 stride 4", "1x1"):
        problem = pruned(SHAPES[name], "full")
        for form in tile_configs(problem, H100):
            geometry = DirectGeometry(problem, form)
            entries = entries_of(positions(problem.mask), geometry)
            offsets = entries.words[entries.values - 1]
            assert offsets.min() >= 0
            assert offsets.max() + 4 * form.tile <= geometry.received_bytes
            assert not (offsets % 4).any()
            assert len(set(entries.values.tolist())) == problem.mask.nonzeros == len(entries.places)
            assert sorted(entries.places.tolist()) == list(range(problem.mask.positions))
            assert (
                geometry.shared_bytes_for(entries.most)
                <= geometry.shared_bytes_for(most_entries(problem, form))
                <= 227 << 10
            )
            assert form.threads % geometry.along == 0
            assert tile_config_of(form.knobs) == form


RESNET = {
    "1x1, 7x7": ConvProblem(1, 2048, 7, 7, 512, 1, 1, epilogue=Epilogue(bias=True, activation="relu")),
    "1x1, 14x14": ConvProblem(1, 256, 14, 14, 1024, 1, 1, epilogue=FULL),
    "1x1 stride 2": ConvProblem(1, 1024, 14, 14, 2048, 1, 1, 0, 0, 2, 2, epilogue=Epilogue(bias=True)),
    "3x3, 7x7": ConvProblem(1, 512, 7, 7, 512, 3, 3, 1, 1, epilogue=Epilogue(bias=True, activation="relu")),
    "3x3 stride 2": ConvProblem(1, 512, 14, 14, 512, 3, 3, 1, 1, 2, 2, epilogue=Epilogue(bias=True, activation="relu")),
    "3x3, 28x28": ConvProblem(1, 128, 28, 28, 128, 3, 3, 1, 1, epilogue=Epilogue(bias=True, activation="relu")),
}


def built(problem, form, target=H100):
    """An executable, or a skip where there is no NVRTC."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(str(error))
    return ENGINE.build(problem, form.knobs, target)


@pytest.mark.parametrize("name", RESNET)
def test_it_compiles_for_hopper_without_spills(name):
    problem = pruned(RESNET[name], "tenth")
    found = tile_configs(problem, H100)
    assert len({form.slices for form in found}) > 1
    for form in (found[0], next(form for form in found if form.slices != found[0].slices)):
        log = built(problem, form).log
        assert_no_spills(log)
        assert int(re.search(r"(\d+) registers", log)[1]) * form.threads <= 65536


def test_one_kernel_serves_all_masks_of_a_shape(monkeypatch):
    made = set()
    monkeypatch.setattr(pruned_direct, "compile_cubin", lambda engine, content, *_: (made.add(content) or b"", ""))
    for name in PATTERNS:
        ENGINE.build(pruned(SMALL, name), DirectTile(2, 4, 2, 1, 1).knobs, H100)
    assert len(made) == 1


def test_a_multiprocessor_has_room_for_one_block():
    """Else a launch that starts early is put two and three blocks deep on some multiprocessors, and others have none."""
    geometry = DirectGeometry(pruned(SMALL, "tenth"), DirectTile(2, 4, 2, 1, 1))
    assert geometry.asked(8, 227 << 10) * 2 > 227 << 10
    assert geometry.shared_bytes_for(8) < 227 << 9
    assert geometry.asked(20000, 227 << 10) == geometry.shared_bytes_for(20000)


def test_older_devices_have_no_clusters():
    problem = pruned(SMALL, "tenth")
    assert ENGINE.accepts(problem, A100)
    assert {form.slices for form in tile_configs(problem, A100)} == {1}
    assert_no_spills(built(replace(problem, **HALF), tile_configs(problem, A100)[0], A100).log)


def test_values_are_data_and_strays_are_refused():
    nonzero = pattern("tenth", SMALL.weight_spec.shape)
    problem = SMALL.with_mask(mask_of(nonzero))
    executable = built(problem, tile_configs(problem, H100)[0])
    weight = torch.from_numpy(np.where(nonzero, np.nan, 0.0)).float()
    words, begins, bias = executable.pack((weight, torch.zeros(problem.k)))
    assert int(words.view(torch.float32).isnan().sum()) == nonzero.sum()
    assert begins[-1] * 4 == len(words)
    ones, *_ = executable.pack((torch.from_numpy(nonzero).float(), bias))
    assert int((ones == 0x3F800000).sum()) == nonzero.sum()
    with pytest.raises(InputError, match="weight"):
        executable.pack((torch.ones_like(weight), bias))


class Launch:
    """In a kernel's place: what it was launched with."""

    def __init__(self, engine, cubin, name, shared_bytes):
        self.made = []

    def launch(self, *arguments, **how):
        self.made.append((arguments, how))


def test_launches(monkeypatch):
    monkeypatch.setattr(pruned_direct, "compile_cubin", lambda *_: (b"", ""))
    monkeypatch.setattr(pruned_direct, "Function", Launch)
    problem, form, _ = CASES["one run"]
    form = replace(form, vectors=2)
    data = make_data(problem, 1, "integer")
    for target, dependent in ((H100, True), (A100, False)):
        executable = ENGINE.build(problem, form.knobs, target)
        assert executable.workspace_bytes == ENGINE.workspace_bytes(problem, form.knobs) == 0
        packed = executable.pack(data.constants)
        room = torch.empty(data.args[0].numel() + 8)
        aligned = room[-(room.data_ptr() // 4) % 4 :]
        x = aligned[: data.args[0].numel()].view(data.args[0].shape)
        executable.launch(Buffers((x, data.args[1]), [torch.empty(problem.y_spec.shape)], packed), None)
        (arguments, how), *_ = executable.function.made
        assert arguments[1:3] == (executable.geometry.grid, form.threads)
        assert how == {"cluster": 2, "dependent": dependent}
        moved = aligned[1 : 1 + x.numel()].view(x.shape)
        with pytest.raises(LaunchError, match="16 bytes"):
            executable.launch(Buffers((moved, data.args[1]), [torch.empty(problem.y_spec.shape)], packed), None)


@pytest.mark.parametrize(
    ("problem", "target", "words"),
    [
        (pruned(SMALL, "tenth"), CPU, "capability 8.0"),
        (SMALL, H100, "without a mask"),
        (parse_problem(pruned(SMALL, "tenth").key), H100, "digest alone"),
        (pruned(SMALL, "tenth").with_layout("nhwc"), H100, "layout nchw"),
        (pruned(replace(SMALL, x_dtype="bf16", weight_dtype="bf16", y_dtype="bf16"), "tenth"), H100, "fp32 or fp16"),
        (pruned(replace(SMALL, n=0), "tenth"), H100, "batch"),
        (pruned(replace(SMALL, n=10**7), "tenth"), H100, "2^30"),
        (pruned(replace(SMALL, direction="dgrad", epilogue=Epilogue()), "tenth"), H100, "fprop"),
        (pruned(ConvProblem(1, 4096, 4, 4, 2, 1, 1), "tenth"), A100, "shared memory"),
        (pruned(ConvProblem(1, 1, 40, 40, 2, 9, 9, 0, 0, 9, 9), "tenth"), H100, "at most 7 phases"),
    ],
)
def test_refusals_say_why(problem, target, words):
    support = ENGINE.accepts(problem, target)
    assert not support
    assert words in support.reason


def test_forms_are_ordered_by_the_model():
    for problem in (pruned(RESNET["3x3, 7x7"], "tenth"), pruned(SMALL, "none"), pruned(SHAPES["depthwise"], "half")):
        found = ENGINE.space(problem, H100)
        times = [estimate_us(problem, tile_config_of(knobs), H100) for knobs in found]
        assert times == sorted(times)
        assert 0 < len(found) <= direct_sparse_cost.MOST_FORMS
        assert ENGINE.estimate_us(problem, found[0], H100) == times[0] > 0.8


def test_whatever_is_supported_has_a_form():
    for shape in SHAPES.values():
        for target in (H100, A100):
            problem = pruned(shape, "half")
            assert bool(ENGINE.accepts(problem, target)) == bool(shape.n and tile_configs(problem, target))
