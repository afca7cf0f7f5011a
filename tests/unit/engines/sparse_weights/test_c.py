"""pruned.c: every pattern of zeros on every shape, bit for bit; refusals; values as data; threads."""

import json
import math
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from convoy.engines.base import Buffers
from convoy.engines.compilers import host_compiler
from convoy.engines.manifest import MANIFEST, load_engine
from convoy.engines.sparse_weights.codegen.cpu_blocking import REGISTERS
from convoy.engines.sparse_weights.codegen.emit_x86 import SETS, fits
from convoy.engines.sparse_weights.codegen.kernel_ir import Group, MaskKernel, Segment
from convoy.engines.sparse_weights.pruned_c import ENGINE, FLAGS, MOST_NONZEROS
from convoy.errors import InputError
from convoy.functional import conv2d
from convoy.measurement.accuracy import judge, make_data
from convoy.measurement.device.detect import detect_target
from convoy.measurement.device.peaks import Peaks, floor_us
from convoy.measurement.in_process import InProcessRunner
from convoy.measurement.processes.worker import problem_fields
from convoy.perfdb.row import Measurement, Status
from convoy.pipeline.net import capture_net
from convoy.problem import ConvProblem, EngineConfig, Epilogue, Knobs, parse_problem
from convoy.settings import Settings
from convoy.target import Target
from convoy.tune.predict import TimePredictor
from convoy.tune.search import search
from convoy.tune.search_space import SearchSpace
from convoy.tune.tuning_task import TuningTask
from tests.unit.engines.conv_cases import EPILOGUES, SHAPES
from tests.unit.engines.pruned_cases import PATTERNS, SMALL, mask_of, pattern, pruned

CPU = detect_target("cpu")
H100 = Target("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132, 80 << 30, 50 << 20)

needs_compiler = pytest.mark.skipif(not host_compiler.compiler(), reason="no C compiler")


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        made = tmp_path_factory.mktemp("compiled")
        patch.setattr(host_compiler, "compiled_folder", lambda: made)
        yield made


def faults(problem, knobs, kinds=("integer", "normal"), target=CPU):
    executable = ENGINE.build(problem, knobs, target)
    if executable.workspace_bytes != ENGINE.workspace_bytes(problem, knobs):
        return [f"{problem} [{knobs}]: workspace"]
    verdicts = [judge(executable, ENGINE.family, problem, make_data(problem, 1, kind), kind) for kind in kinds]
    return [f"{problem} [{knobs}]: {verdict.reason}" for verdict in verdicts if not verdict.ok]


@needs_compiler
@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.n])
def test_every_shape_is_exact(name, monkeypatch):
    monkeypatch.setattr(
        "convoy.engines.sparse_weights.pruned_c.FLAGS", tuple("-O1" if f == "-O3" else f for f in FLAGS)
    )
    turn = list(SHAPES).index(name)
    problem = pruned(SHAPES[name], PATTERNS[turn % len(PATTERNS)])
    problem = replace(problem, epilogue=EPILOGUES[turn % len(EPILOGUES)])
    assert ENGINE.supports(problem, CPU)
    space = ENGINE.space(problem, CPU)
    assert not faults(problem, space[turn % len(space)])


@needs_compiler
@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_is_exact(name):
    problem = pruned(SMALL, name)
    assert not faults(problem, ENGINE.space(problem, CPU)[0])


@needs_compiler
@pytest.mark.parametrize(
    ("arch", "sizes"),
    [
        ("generic", {"filters": 3, "vectors": 1, "channels": 1, "lanes": 4, "threads": 1}),
        ("generic", {"filters": 8, "vectors": 2, "channels": 6, "lanes": 16, "threads": 2}),
        ("avx2", {"filters": 5, "vectors": 1, "channels": 2, "lanes": 8, "threads": 3}),
        ("avx2", {"filters": 6, "vectors": 2, "channels": 6, "lanes": 8, "threads": 1}),
        ("avx512", {"filters": 8, "vectors": 1, "channels": 2, "lanes": 16, "threads": 2}),
        ("avx512", {"filters": 6, "vectors": 4, "channels": 6, "lanes": 16, "threads": 2}),
    ],
)
def test_small_pieces_and_every_instruction_set_are_exact(arch, sizes):
    problem = pruned(SMALL, "half", seed=2)
    if SETS.get(arch) and not {"avx512": ("avx512",), "avx2": ("avx512", "avx2")}[arch].count(CPU.arch):
        pytest.skip(f"this CPU has no {arch}")
    assert not faults(problem, Knobs.of(**sizes), target=replace(CPU, arch=arch))


@pytest.mark.parametrize("arch", ["avx512", "avx2"])
def test_sums_that_do_not_fit_the_registers_are_left_to_the_compiler(arch):
    lanes = SETS[arch].lanes
    for filters, vectors, fit in ((8, 1, True), (8, 4, False), (6, 4, arch == "avx512"), (2, 4, True)):
        groups = tuple(Group(tuple(range(g, g + filters)), (Segment(True, ()),)) for g in range(0, 24, filters))
        kernel = MaskKernel(lanes, vectors, lanes * vectors, 64, 1, 64, 0, groups)
        assert fits(kernel, arch) is fit
        assert not fits(replace(kernel, lanes=4), arch)
    assert not fits(kernel, "generic")


@pytest.mark.parametrize("arch", ["avx512", "avx2", "neon", "generic"])
@pytest.mark.parametrize("k", [1, 3, 7, 8, 14, 28, 64])
def test_what_is_offered_fits_the_registers(arch, k):
    problem = ConvProblem(1, 40, 9, 9, k, 3, 3)
    target = replace(CPU, arch=arch)
    space = ENGINE.space(problem.with_mask(mask_of(pattern("tenth", problem.weight_spec.shape))), target)
    assert len(set(space)) == len(space) >= 1
    for knobs in space:
        assert (knobs.integer("filters") + 1) * knobs.integer("vectors") + 1 <= REGISTERS[arch]


@needs_compiler
def test_blocks_of_rows_and_of_images_are_exact(monkeypatch):
    monkeypatch.setattr("convoy.engines.sparse_weights.codegen.cpu_blocking.BLOCK_BYTES", 3000)
    monkeypatch.setattr("convoy.engines.sparse_weights.codegen.emit_c.SUMS_BYTES", 1500)
    for problem in (
        ConvProblem(2, 4, 30, 11, 5, 3, 3, 1, 1),
        ConvProblem(5, 4, 6, 7, 5, 3, 3, 1, 1),
        ConvProblem(3, 2, 23, 20, 4, 5, 3, 2, 1, 2, 2),
    ):
        masked = pruned(problem, "half")
        knobs = dict(ENGINE.space(masked, CPU)[0])
        for threads in (1, 3):
            assert not faults(masked, Knobs.of(**{**knobs, "threads": threads}))


def launch(executable, problem, x, packed, threads):
    y = torch.full(problem.y_spec.shape, math.nan)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        executable.launch(Buffers((x,), [y], packed), torch.full((executable.workspace_bytes,), 255, dtype=torch.uint8))
    finally:
        torch.set_num_threads(before)
    return y


@needs_compiler
def test_any_number_of_threads_gives_the_same_bits(monkeypatch):
    monkeypatch.setattr("convoy.engines.sparse_weights.pruned_c.SMALL_COST", 1)
    problem = pruned(ConvProblem(3, 8, 15, 14, 40, 3, 3, 1, 1), "half")
    executable = ENGINE.build(problem, Knobs.of(filters=12, vectors=1, channels=3, lanes=8, threads=5), CPU)
    data = make_data(problem, 1)
    packed = executable.pack(data.constants)
    wanted = launch(executable, problem, data.args[0], packed, 1)
    assert not wanted.isnan().any()
    for threads in (2, 3, 5, 7):
        assert torch.equal(launch(executable, problem, data.args[0], packed, threads), wanted)


@needs_compiler
def test_new_values_under_one_mask_use_the_same_code_and_nan_is_a_value(folder):
    nonzero = pattern("tenth", (8, 6, 3, 3))
    problem = ConvProblem(1, 6, 9, 7, 8, 3, 3, 1, 1).with_mask(mask_of(nonzero))
    knobs = ENGINE.space(problem, CPU)[0]
    first = ENGINE.build(problem, knobs, CPU)
    libraries = sorted(folder.iterdir())
    second = ENGINE.build(problem, knobs, CPU)
    assert sorted(folder.iterdir()) == libraries, "nothing was compiled anew"
    code = first.resident_bytes((torch.zeros(3),)) - 12
    assert code in {path.stat().st_size for path in libraries}, "code costs memory"
    x = torch.randn(1, 6, 9, 7)
    weight = torch.from_numpy(np.where(nonzero, 2.0, 0.0)).float()
    weight[tuple(np.argwhere(nonzero)[0])] = math.nan
    for executable, has_nan in ((first, True), (second, False)):
        y = launch(executable, problem, x, executable.pack((weight,)), 1)
        torch.testing.assert_close(y, torch.conv2d(x, weight, padding=1), equal_nan=True)
        assert bool(y.isnan().any()) is has_nan
        weight = weight.nan_to_num(3.0)
    zeros = torch.zeros_like(weight)
    assert not launch(first, problem, x, first.pack((zeros,)), 1).any(), "zeros under the mask are values too"


@needs_compiler
def test_a_value_where_the_mask_has_none_is_refused():
    problem = pruned(SMALL, "tenth")
    executable = ENGINE.build(problem, ENGINE.space(problem, CPU)[0], CPU)
    _, bias = make_data(problem, 1).constants
    weight = torch.zeros(problem.weight_spec.shape)
    executable.pack((weight, bias))
    empty = tuple(np.argwhere(~pattern("tenth", tuple(weight.shape)))[3])
    for stray in (1e-30, math.nan):
        weight[empty] = stray
        with pytest.raises(InputError, match="mask"):
            executable.pack((weight, bias))


@needs_compiler
def test_infinite_inputs_meet_no_zero_weight():
    problem = pruned(ConvProblem(1, 2, 5, 5, 2, 3, 3, 1, 1), "single")
    executable = ENGINE.build(problem, ENGINE.space(problem, CPU)[0], CPU)
    x = torch.full((1, 2, 5, 5), math.inf)
    weight = torch.from_numpy(pattern("single", (2, 2, 3, 3))).float()
    assert not launch(executable, problem, x, executable.pack((weight,)), 1).isnan().any()


@pytest.mark.parametrize(
    ("problem", "target", "words"),
    [
        (SMALL, CPU, "without a mask"),
        (pruned(SMALL, "tenth"), H100, "needs a CPU"),
        (parse_problem(pruned(SMALL, "tenth").key), CPU, "digest alone"),
        (pruned(SMALL, "tenth").with_layout("nhwc"), CPU, "layout nchw"),
        (pruned(replace(SMALL, x_dtype="fp16", weight_dtype="fp16", y_dtype="fp16"), "tenth"), CPU, "needs fp32"),
        (pruned(replace(SMALL, n=0), "tenth"), CPU, "batch"),
        (pruned(replace(SMALL, direction="dgrad", epilogue=Epilogue()), "tenth"), CPU, "fprop"),
        (pruned(ConvProblem(1, 512, 7, 7, 512, 3, 3, 1, 1), "half"), CPU, f"at most {MOST_NONZEROS}"),
    ],
)
def test_refusals_say_why(problem, target, words):
    support = ENGINE.accepts(problem, target)
    assert not support
    assert words in support.reason


def test_dense_engines_leave_masked_problems_to_others():
    problem = pruned(SMALL, "tenth")
    engines = [load_engine(name) for name in MANIFEST]
    assert ENGINE in [engine for engine in engines if engine.reads_mask]
    for engine in engines:
        assert engine.competes(problem) is engine.reads_mask is engine.id.startswith("pruned.")
        assert engine.competes(SMALL)
        support = engine.accepts(problem, CPU)
        assert engine.reads_mask or (not support and "mask" in support.reason)


def test_without_a_compiler_it_says_so(monkeypatch):
    monkeypatch.setattr(host_compiler, "compiler", lambda: "")
    assert "C compiler" in ENGINE.supports(pruned(SMALL, "tenth"), CPU).reason


def test_test_data_keeps_the_mask_and_wants_its_positions():
    problem = pruned(SMALL, "tenth")
    nonzero = torch.from_numpy(pattern("tenth", problem.weight_spec.shape))
    for kind in ("integer", "normal", "cancelling"):
        weight = make_data(problem, 4, kind).constants[0]
        assert not weight[~nonzero].any()
        assert weight[nonzero].all()
    with pytest.raises(InputError, match="only the mask's digest"):
        make_data(parse_problem(problem.key), 4)


def test_a_mask_goes_to_another_process_with_its_problem():
    problem = pruned(SMALL, "tenth")
    fields = json.loads(json.dumps(problem_fields(problem)))
    there = parse_problem(fields["problem"], fields["text"])
    assert (there, there.mask) == (problem, problem.mask)


@needs_compiler
def test_a_pruned_layer_of_a_net_is_measured_and_runs():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    prune.random_unstructured(model[0], "weight", 0.8)
    x = torch.randn(1, 4, 10, 10)
    settings = Settings(isolate=False, layout="nchw", only_engines=("pruned.c",), deny_engines=(), engines=())
    net = capture_net("net", model, (x,), {}, settings, CPU)
    (region,) = [r for r in net.regions if r.id.startswith("conv(") and len(r.nodes) == 2]
    dense, masked = region.problems
    rows = {}

    class Rows:
        lookup = measured = staticmethod(lambda *_: [])
        targets = staticmethod(dict)

        @staticmethod
        def put(found, *_, **__):
            for row in found:
                rows.setdefault(row.problem, {})[row.config.engine] = row

    with closing(InProcessRunner(CPU)) as runner:
        found = search(
            [dense, masked],
            engine_ids=["aten", "pruned.c"],
            target=CPU,
            settings=settings,
            database=Rows(),
            runner=runner,
        )
    assert {key: set(by_engine) for key, by_engine in rows.items()} == {dense.key: {"aten"}, masked.key: {"pruned.c"}}
    assert all(row.ok for by_engine in rows.values() for row in by_engine.values())
    assert found.refusals[masked.key] == {}, "dense engines compete on the other problem"
    assert "without a mask" in found.refusals[dense.key]["pruned.c"]


def test_times_on_pruned_weights_are_not_predicted():
    plain = ConvProblem(1, 4, 9, 9, 8, 3, 3)
    rows = [Measurement(plain.key, EngineConfig("aten"), "0" * 16, "p", Status.OK, samples=9, median_us=5.0)]
    task = TuningTask(SearchSpace(pruned(plain, "tenth"), [ENGINE], CPU))
    task.predict(TimePredictor.from_rows(rows), "p")
    assert (task.rows, task.predicted) == ({}, set())


def test_the_roofline_of_pruned_weights_counts_the_non_zeros():
    peaks = Peaks(bytes_per_s=1e10, flops={"fp32": 1e9}, cache_bytes=0, cache_bytes_per_s=0.0)
    plain = ConvProblem(1, 64, 28, 28, 64, 3, 3, 1, 1)
    half = plain.with_mask(mask_of(np.arange(64 * 64 * 9).reshape(64, 64, 3, 3) % 2 == 0))
    assert floor_us(half, peaks) == pytest.approx(floor_us(plain, peaks) / 2)
    assert floor_us(plain.with_mask(mask_of(pattern("none", (64, 64, 3, 3)))), peaks) > 0


@needs_compiler
def test_conv2d_by_this_engine_takes_the_zeros_of_its_weight():
    torch.manual_seed(5)
    x = torch.randn(2, 3, 9, 8, requires_grad=True)
    weight = (torch.randn(5, 3, 3, 3) * (torch.rand(5, 3, 3, 3) < 0.3)).requires_grad_()
    y = conv2d(x, weight, padding=1, engine="pruned.c")
    y.sum().backward()
    gradients = x.grad, weight.grad
    x.grad = weight.grad = None
    wanted = torch.conv2d(x, weight, padding=1)
    wanted.sum().backward()
    torch.testing.assert_close((y, *gradients), (wanted, x.grad, weight.grad))
