"""docs/adding-an-engine.md, followed word by word."""

import ctypes
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import convoy
from convoy.engines.hopper.nvrtc_kernel import absence
from convoy.engines.hopper.nvrtc_source import defines
from convoy.engines.manifest import load_engine
from convoy.engines.triton.triton_build import installed
from convoy.measurement.accuracy import judge, make_data
from convoy.measurement.device.detect import detect_target
from convoy.pipeline.net import capture_net
from convoy.problem import ConvProblem, Epilogue, SubgraphProblem
from tests.unit.engines.conv_cases import SHAPES, variants

PAGE = Path(__file__).parents[3] / "docs" / "adding-an-engine.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
ENTRY = "shifted=my_engine:Shifted"


MODULES = {"my_engine": 0, "my_fusion": 3, "my_kernel": 5}
"""Which block each of the page's engines is."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder on sys.path that holds the page's engines."""
    path = tmp_path_factory.mktemp("newcomer")
    for module, index in MODULES.items():
        (path / f"{module}.py").write_text(BLOCKS[index])
    sys.path.insert(0, str(path))
    importlib.invalidate_caches()
    yield path
    sys.path.remove(str(path))
    for module in MODULES:
        sys.modules.pop(module, None)
    load_engine.cache_clear()


def run(index, names):
    """Run a block of the page."""
    exec(compile(BLOCKS[index], f"{PAGE.name}, block {index}", "exec"), names)  # the page's own code
    return names


def test_the_page_holds_three_engines_and_their_uses():
    assert len(BLOCKS) == 7
    assert [re.findall(r"ENGINE = (\w+)\(\)", BLOCKS[index]) for index in MODULES.values()] == [
        ["Shifted"],
        ["Joined"],
        ["Threads"],
    ]


def test_the_cpu_engines_snippets_run(folder, monkeypatch):
    monkeypatch.setenv("CONVOY_DB", str(folder / "perf.db"))
    names = run(1, {})
    assert torch.allclose(names["y"], torch.conv2d(names["x"], names["weight"], padding=1), atol=1e-4)
    run(2, {})


def test_the_fused_region_is_right_and_in_the_net(folder):
    run(4, {})
    model = nn.Sequential(nn.Linear(24, 32, bias=False), nn.Linear(32, 8)).eval()
    settings = convoy.Settings(engines=("joined=my_fusion:Joined",))
    net = capture_net("pair", model, (torch.randn(5, 24),), {}, settings, detect_target("cpu"))
    (region,) = [region for region in net.regions if region.pattern == "fused"]
    assert load_engine("joined", settings.engines).accepts(region.problems[0], net.target)
    assert len(region.nodes) == 2


def test_refusals_of_the_fused_region_say_why(folder):
    engine, target = load_engine("joined", ("joined=my_fusion:Joined",)), detect_target("cpu")
    text = (
        "graph 1\ninput %x: fp32[5,4]\nconstant %w: fp32[4,4]\nconstant %v: fp32[4,4]\n"
        "%h: fp32[5,4] = linear(%x, %w, None)\n%y: fp32[5,4] = linear(%h, %v, None)\nreturn %y\n"
    )
    assert engine.supports(SubgraphProblem(text), target)
    assert all(engine.supports(problem, target) for problem in engine.samples())
    for old, new, reason in (
        ("%w, None", "%w, %b", "without a bias"),
        ("constant %v", "input %v", "constants"),
        ("fp32", "fp16", "2-D fp32"),
        ("linear(%h, %v, None)", "aten.relu.default(%h)", "two linear layers"),
    ):
        changed = text.replace(old, new)
        changed = changed.replace("constant %v:", "constant %b: fp32[4]\nconstant %v:") if "%b" in new else changed
        assert reason in engine.supports(SubgraphProblem(changed), target).reason


def test_the_cuda_kernel_compiles_for_hopper(folder):
    if absence() or not installed():
        pytest.skip("NVRTC or Triton is not installed")
    run(6, {})


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_the_cuda_kernels_text_is_right(folder, tmp_path):
    """Compiled for this CPU, one thread after another."""
    kernel = importlib.import_module("my_kernel")
    epilogue = Epilogue(bias=True, residual=True, activation="relu")
    problem = ConvProblem(2, 3, 7, 6, 5, 3, 2, 1, 0, 2, 1, layout="nhwc", numerics="as_torch", epilogue=epilogue)
    sizes = {name.upper(): getattr(problem, name) for name in kernel.SIZES}
    host = "#define __global__\nstruct Dim { int x; } blockIdx, blockDim = {1}, threadIdx = {0};\n"
    run_all = 'extern "C" int& thread() { return blockIdx.x; }\n'
    (tmp_path / "kernel.cpp").write_text(host + defines(sizes | {"RELU": 1}) + kernel.SOURCE + run_all)
    command = ["g++", "-shared", "-fPIC", "-O1", "-o", str(tmp_path / "kernel.so"), str(tmp_path / "kernel.cpp")]
    subprocess.run(command, check=True, capture_output=True)
    library = ctypes.CDLL(str(tmp_path / "kernel.so"))
    library.thread.restype = ctypes.POINTER(ctypes.c_int)
    x, weight, bias = torch.randn(problem.x_spec.shape), torch.randn(problem.weight_spec.shape), torch.randn(problem.k)
    residual = torch.randn(problem.y_spec.shape)
    rows = [x.permute(0, 2, 3, 1).contiguous(), weight.permute(0, 2, 3, 1).contiguous(), bias]
    rows += [residual.permute(0, 2, 3, 1).contiguous(), torch.full(residual.permute(0, 2, 3, 1).shape, float("nan"))]
    for place in range(problem.y_spec.elements):
        library.thread()[0] = place
        library.direct(*(ctypes.c_void_p(t.data_ptr()) for t in rows))
    expected = torch.conv2d(x, weight, bias, stride=(2, 1), padding=(1, 0)) + residual
    torch.testing.assert_close(rows[-1].permute(0, 3, 1, 2), expected.relu(), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_the_cuda_kernel_is_right(folder):
    engine, target = load_engine("threads", ("threads=my_kernel:Threads",)), detect_target("cuda")
    problem = run(6, {})["problem"]
    for knobs in engine.space(problem, target):
        executable = engine.build(problem, knobs, target)
        for kind in ("integer", "normal"):
            verdict = judge(executable, engine.family, problem, make_data(problem, 1, kind, "cuda"), kind)
            assert verdict.ok, verdict.reason


def test_the_pages_engine_keeps_the_promise(folder):
    engine, target = load_engine("shifted", (ENTRY,)), detect_target("cpu")
    problems = [p for shape in SHAPES.values() for p in variants(shape) if engine.supports(p, target)]
    assert len(problems) > 200
    for problem in problems:
        executable = engine.build(problem, engine.space(problem, target)[0], target)
        assert executable.workspace_bytes == engine.workspace_bytes(problem, convoy.engines()[0].config().knobs)
        for kind in ("integer", "normal"):
            verdict = judge(executable, engine.family, problem, make_data(problem, 1, kind), kind)
            assert verdict.ok, f"{problem} on {kind} data: {verdict.reason}"


def test_the_command_line_finds_it_by_the_environment(folder):
    (command,) = re.findall(r"\$ (convoy engines --problem \S+)", PAGE.read_text())
    environment = {**os.environ, "CONVOY_ENGINES": ENTRY, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", "convoy", *command.split()[1:]],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = [line for line in done.stdout.splitlines() if "shifted" in line]
    assert "yes" in line
