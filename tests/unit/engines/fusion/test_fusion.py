"""cuda.fusion: every kernel right on the CPU, compiled for an absent GPU; subgraphs that it is not for."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from convoy.engines.fusion.emitter import Emitter
from convoy.engines.fusion.fusion import ENGINE
from convoy.engines.fusion.index_math import Var, number, variable
from convoy.engines.fusion.kernel_code import code_of, workspace_of
from convoy.engines.hopper.nvrtc_kernel import absence
from convoy.measurement.accuracy import check, make_data, oracle
from convoy.measurement.data import in_layout, result_specs
from convoy.perfdb import Database
from convoy.perfdb.shipped import shipped_folder
from convoy.problem import Knobs, LinearProblem
from convoy.settings import Settings
from convoy.target import Target
from convoy.tune.search import search
from tests.unit.engines.fusion.cases import CASES, chain, gate, layer_norm, mean, pool, pools, softmax
from tests.unit.engines.fusion.emulated import code_for, judged, library, run
from tests.unit.engines.spills import assert_no_spills

H100 = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20, (("torch", "2.13.0"),))
SEEDS = range(45)
NAMES = list(CASES)

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")
pytestmark = pytest.mark.xdist_group("fusion kernels")


@pytest.fixture(autouse=True)
def _bindings_are_there(monkeypatch):
    monkeypatch.setattr("convoy.engines.fusion.fusion.absence", lambda: "")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """All kernels in one library: first the named ones, then the random ones."""
    problems = [*CASES.values(), *map(chain, SEEDS)]
    return problems, library(tmp_path_factory.mktemp("fusion") / "all", [code_for(problem) for problem in problems])


@needs_compiler
@pytest.mark.parametrize("name", NAMES)
def test_a_named_subgraph_is_right(kernels, name):
    verdict = judged(kernels[1], CASES[name], NAMES.index(name))
    assert verdict.ok, f"{verdict.reason}\n{CASES[name].text}{code_for(CASES[name]).text}"


@needs_compiler
@pytest.mark.parametrize("factor", [0.001, 300])
@pytest.mark.parametrize("name", ["activations", "activations, fp32"])
def test_small_and_large_numbers_are_right(kernels, name, factor):
    verdict = judged(kernels[1], CASES[name], NAMES.index(name), factor)
    assert verdict.ok, verdict.reason


@needs_compiler
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_subgraph_is_right(kernels, seed):
    problem = kernels[0][len(CASES) + seed]
    verdict = judged(kernels[1], problem, len(CASES) + seed)
    assert verdict.ok, f"{verdict.reason}\n{problem.text}{code_for(problem).text}"


@pytest.mark.parametrize("name", NAMES)
def test_the_workspace_is_that_of_the_code(name):
    problem = CASES[name]
    assert workspace_of(problem.text, problem.layout) == code_of(problem.text, problem.layout).workspace_bytes


@pytest.mark.parametrize("name", ["cat, norm", "gate, nchw", "max pooling"])
def test_a_subgraph_that_is_asked_about_needs_no_code(monkeypatch, name):
    """Of a net's subgraphs most are built by other engines, or belong to a layer."""
    monkeypatch.setattr("convoy.engines.fusion.kernel_code.code_of", None)
    problem = CASES[name]
    workspace_of.cache_clear()
    assert ENGINE.accepts(problem, H100)
    assert ENGINE.workspace_bytes(problem, Knobs()) == 0


@needs_compiler
@pytest.mark.parametrize("name", ["bilinear", "max pooling", "padding", "layer norm, odd"])
def test_a_result_may_be_channels_of_a_larger_tensor(tmp_path, name):
    problem = CASES[name]
    place = len(result_specs(problem)) - 1
    n, c, h, w = result_specs(problem)[place].shape
    code = code_of(problem.text, problem.layout, (place, c + 24))
    data = make_data(problem, 1, "normal")
    whole = torch.full((n, h, w, c + 24), 7.0, dtype=data.args[0].dtype).permute(0, 3, 1, 2)
    results = [in_layout(torch.zeros(spec.shape, dtype=whole.dtype), "nhwc") for spec in result_specs(problem)]
    results[place] = whole[:, 8 : 8 + c]
    run(library(tmp_path / "slice", [code]).run_0, problem, data, code, results)
    assert check(problem, "direct", results, oracle(problem, data), "normal", data=data).ok
    assert torch.equal(whole[:, :8], torch.full_like(whole[:, :8], 7))
    assert torch.equal(whole[:, 8 + c :], torch.full_like(whole[:, 8 + c :], 7))


def test_slices_that_vectors_cannot_reach_are_not_taken(monkeypatch):
    monkeypatch.setattr("convoy.engines.hopper.nvrtc_kernel.cached", lambda *_: bytes(4))
    executable = ENGINE.build(CASES["bilinear"], Knobs(), H100)
    assert executable.accept_slice(0, 64, 16)
    assert not executable.accept_slice(0, 60, 16)
    assert not executable.accept_slice(0, 64, 4)
    assert not executable.accept_slice(0, 1 << 27, 0)
    assert not ENGINE.build(CASES["mean"], Knobs(), H100).accept_slice(0, 64, 16)


@needs_compiler
def test_planted_faults_are_seen(tmp_path):
    faults = {
        "mean, odd": ("distance *= 2", "distance *= 4"),
        "layer norm": ("return v * v; }", "return v; }"),
        "max pooling": (" < 9u", " < 8u"),
        "cat, norm": ("from_float<T>(v[lane])", "from_float<T>(v[0])"),
    }
    for place, (name, change) in enumerate(faults.items()):
        found = library(tmp_path / str(place), [code_for(CASES[name])], [change])
        assert not judged(found, CASES[name], 0).ok, name


def test_the_text_does_not_depend_on_the_order_of_a_set():
    names = ["row", "e", "i", "lane", "block"]
    total = number(7)
    for factor, name in enumerate(names, 2):
        total = total + variable(Var(name, 9)) * factor
    assert Emitter(1).index(total) == "block * 6u + e * 3u + i * 4u + lane * 5u + row * 2u + 7u"


@pytest.mark.parametrize(
    ("problem", "widths"),
    [
        (gate((2, 32, 9, 7)), (8,)),
        (gate((2, 32, 9, 7), "fp32"), (4,)),
        (gate((2, 36, 9, 7)), (4,)),
        (gate((2, 32, 8, 4), "fp16", "nchw"), (8,)),
        (mean((1, 512, 7, 7)), (8,)),
        (layer_norm((1, 96, 7, 5)), (8, 8)),
        (CASES["cat, norm"], (8,)),
        (CASES["upsampling"], (8,)),
        (CASES["max pooling"], (8,)),
    ],
)
def test_memory_is_read_in_vectors(problem, widths):
    (kernel,) = code_for(problem).kernels
    assert (kernel.widths, kernel.by_lane) == (widths, 0)
    assert kernel.text.count("load(") >= 1


def test_rows_fill_the_device():
    def blocks(problem):
        return [kernel.blocks for kernel in code_for(problem).kernels]

    assert blocks(mean((1, 512, 7, 7))) == [32]
    assert blocks(mean((64, 512, 7, 7)))[0] >= 132
    assert blocks(layer_norm((1, 96, 56, 56), add=False))[0] >= 132
    assert blocks(mean((1, 32, 112, 112)))[0] >= 32  # parts of the pixels, in a kernel of their own


@pytest.mark.parametrize(
    ("name", "kernels", "written"),
    [
        ("mean", 1, 0),
        ("layer norm", 1, 0),
        ("poolings", 2, 1),
        ("head", 2, 1),
        ("response norm", 3, 2),
        ("mean in parts", 2, 1),
    ],
)
def test_a_subgraph_has_as_many_kernels_as_it_needs(name, kernels, written):
    code = code_for(CASES[name])
    assert (len(code.kernels), len(code.offsets)) == (kernels, written)
    assert (code.workspace_bytes > 0) == (written > 0)
    assert ENGINE.workspace_bytes(CASES[name], Knobs()) == code.workspace_bytes


@pytest.mark.skipif(bool(absence()), reason="needs NVRTC")
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_it_compiles_for_a_gpu_that_is_not_there(capability):
    target = replace(H100, arch=f"sm_{capability}")
    for problem in (*ENGINE.samples(), layer_norm((1, 96, 7, 5), "bf16")):
        assert ENGINE.supports(problem, target)
        executable = ENGINE.build(problem, Knobs(), target)
        assert_no_spills(executable.log)
        assert executable.deterministic


def test_kernels_have_wide_loads_and_no_atomics():
    nvrtc_kernel = pytest.importorskip("convoy.engines.hopper.nvrtc_kernel")
    if absence():
        pytest.skip("needs NVRTC")
    ptx, _ = nvrtc_kernel.compile_source(ENGINE.id, code_for(gate((2, 32, 9, 7))).source, "compute_90", ())
    assert b"ld.global.v4" in ptx
    assert b"st.global.v4" in ptx
    assert b"atom." not in ptx


DROPOUT = "%y: fp16[1,8,4,4] = aten.dropout.default(%x, 0.5, True)"


def text_of(*lines, shape="fp16[1,8,4,4]"):
    return gate((1, 8, 4, 4)).__class__(f"graph 1\ninput %x: {shape}\n" + "\n".join(lines) + "\n", "nhwc", 100)


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        (LinearProblem(1, 8, 8), "computes subgraphs, got a linear layer"),
        (text_of("%y: fp16[1,8,4,4] = aten.relu.default(%x)", "return %y"), "no faster than ATen for a single aten.relu"),
        (text_of("%y: fp16[1,4,4,8] = aten.permute.default(%x, (0, 2, 3, 1))", "return %y"), "no faster than ATen"),
        (pools((1, 8, 9, 9), count=5), "needs more than 4 kernels"),
        (softmax((1, 1 << 19), 1), "too few to be fast"),
        (pool("avg_pool3d", (1, 8, 4, 5, 6), 2, 2, 0, False, True, 3, layout="ndhwc"), "does not know this form"),
        (pool("max_pool3d", (1, 8, 5, 5, 5), 2, 1, 0, 2, layout="ndhwc"), "does not know this form of aten.max_pool3d"),
        (pool("adaptive_avg_pool3d", (1, 8, 4, 4, 4), (2, 2, 2), layout="ndhwc"), "does not know this form"),
        (mean((0, 8, 4, 4)), "needs tensors of 1 to"),
        (
            text_of("%y: bf16[64,32] = aten._to_copy.default(%x, dtype=dtype.bf16)", "%t: bf16[32,64] = aten.t.default(%y)",
                    "return %y, %t", shape="fp32[64,32]"),
            "would write a copy of t, a transposed matrix",
        ),
        (replace(gate((1, 8, 4, 4)), text=gate((1, 8, 4, 4)).text.replace("fp16", "fp64")), "got fp64"),
        (replace(gate((1, 8, 4, 4)), layout="blocked"), "blocked"),
        (
            text_of(DROPOUT, "%z: fp16[1,8,4,4] = aten.relu.default(%y)", "return %z"),
            "draws no random numbers",
        ),
        (
            text_of("%y: fp16[1,8,4,4] = aten.cumsum.default(%x, 1)", "%z: fp16[1,8,4,4] = aten.relu.default(%y)", "return %z"),
            "does not compute aten.cumsum.default",
        ),
    ],
)  # fmt: skip
def test_refusals_say_why(problem, says):
    assert says in ENGINE.supports(problem, H100).reason


def test_old_and_other_devices_are_refused():
    assert "capability 8.0" in ENGINE.supports(mean((1, 8, 4, 4)), replace(H100, arch="sm_75")).reason
    assert ENGINE.supports(mean((1, 8, 4, 4)), replace(H100, arch="sm_120"))


def test_a_first_answer_waits_for_no_compiler(tmp_path):
    target = shipped_target("NVIDIA H100 80GB HBM3")
    problems = [
        gate((1, 32, 56, 56)),
        mean((1, 512, 7, 7), before="relu.default"),
        pool("max_pool2d", (1, 64, 112, 112), (3, 3)),
    ]
    found = search(
        problems,
        engine_ids=("aten", "inductor", ENGINE.id),
        target=target,
        settings=Settings(effort="none", db=tmp_path / "perf.db"),
        database=Database(tmp_path / "perf.db", shipped=shipped_folder()),
        runner=None,
    )
    for problem in problems:
        times = {row.config.engine: row.median_us for row in found.rows[problem.key] if row.ok}
        assert min(times, key=times.__getitem__) == ENGINE.id, times
        assert len(times) == 3


def shipped_target(name):
    """A device of which rows ship."""
    described = [
        json.loads(file.read_text()) for file in shipped_folder().iterdir() if file.name.endswith(".target.json")
    ]
    fields = next(each for each in described if each["name"] == name)
    numbers = [fields[each] for each in ("units", "memory_bytes", "cache_bytes")]
    return Target(fields["device"], name, fields["arch"], *numbers, tuple(sorted(fields["versions"].items())))


def test_an_estimate_is_a_launch_and_a_pass_over_memory():
    small, large = (
        pool("max_pool2d", (1, 8, 9, 9), (3, 3)),
        replace(gate((64, 256, 56, 56)), bytes_min=2 * 64 * 256 * 3136 * 2),
    )
    assert ENGINE.estimate_us(small, Knobs(), H100) < 3
    assert 40 < ENGINE.estimate_us(large, Knobs(), H100) < 100


def test_generated_code_is_the_same_in_every_process() -> None:
    program = (
        "from convoy.engines.fusion.kernel_code import code_of\n"
        "from tests.unit.engines.fusion.cases import CASES\n"
        "for name, problem in sorted(CASES.items()):\n"
        "    found = code_of(problem.text, problem.layout, None)\n"
        "    print(name, found if isinstance(found, str) else [kernel.text for kernel in found.kernels])\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parents[4],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]  # compiled kernels are kept by their text
    assert "KERNEL" in said[0]
