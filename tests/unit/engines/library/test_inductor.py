"""inductor: what it takes and why not, right results that are their own, compilers that fail, threads, its cache on disk."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from convoy.engines.base import Buffers, Executable
from convoy.engines.library import inductor
from convoy.engines.library.inductor import ENGINE
from convoy.engines.subgraph import torch_format
from convoy.errors import CompileError
from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem, Knobs, SubgraphProblem
from convoy.target import Target

CPU = detect_target("cpu")
needs_compiler = pytest.mark.skipif(not CPU.version("cxx"), reason="needs a C++ compiler")

GLUE = """\
graph 1
input %a: fp32[2,4,6,5]
input %b: fp32[2,3,6,5]
constant %shift: fp32[1,7,1,1]
constant %scale: fp32[1,7,1,1]
%c: fp32[2,7,6,5] = aten.cat.default((%a, %b), 1)
%d: fp32[2,7,6,5] = aten.addcmul.default(%shift, %c, %scale)
%e: fp32[2,7,6,5] = aten.relu.default(%d)
return %e
"""
MAX_POOL = """\
graph 1
input %x: fp32[2,3,9,8]
%y: fp32[2,3,5,4] = aten.max_pool2d.default(%x, (3, 3), (2, 2), (1, 1))
return %y
"""
AVG_POOL = """\
graph 1
input %x: fp32[1,5,8,6]
%y: fp32[1,5,4,3] = aten.avg_pool2d.default(%x, (2, 2), (2, 2))
return %y
"""
HEAD = """\
graph 1
input %x: fp32[2,6,7,7]
%p: fp32[2,6,1,1] = aten.adaptive_avg_pool2d.default(%x, (1, 1))
%f: fp32[2,6] = aten.view.default(%p, (2, 6))
return %f
"""
SOFTMAX = """\
graph 1
input %x: fp32[3,50]
%y: fp32[3,50] = aten._softmax.default(%x, 1, False)
return %y
"""
VIEWS = """\
graph 1
input %x: fp32[2,3,4,4]
constant %k: fp32[2,3,4,4]
%y: fp32[2,3,2,2] = aten.max_pool2d.default(%x, (2, 2), (2, 2))
%v: fp32[2,48] = aten.view.default(%x, (2, 48))
return %y, %v, %x, %k
"""


def batch_norm(saved: str) -> SubgraphProblem:
    """A batch norm in training whose mean and deviation are saved in a dtype, and an activation."""
    return SubgraphProblem(f"""\
graph 1
input %x: bf16[2,3,4,4]
input %w: fp32[3]
%y: bf16[2,3,4,4], %m: {saved}[3], %d: {saved}[3] = aten._native_batch_norm_legit.no_stats(%x, %w, %w, True, 0.1, 1e-05)
%r: bf16[2,3,4,4] = aten.relu.default(%y)
return %r, %m, %d
""")


def test_a_batch_norm_that_saves_other_dtypes_than_pytorchs_is_not_taken_on_a_cpu() -> None:
    """PyTorch's kernel saves fp32 beside fp32 parameters, and its backward pass takes nothing else."""
    x, w = torch.randn(2, 3, 4, 4).bfloat16(), torch.ones(3)
    saved = torch.ops.aten._native_batch_norm_legit.no_stats(x, w, w, True, 0.1, 1e-5)[1]
    assert saved.dtype is torch.float32
    support = ENGINE.supports(batch_norm("fp32"), CPU)
    assert "statistics" in support.reason
    assert "statistics" not in ENGINE.supports(batch_norm("bf16"), CPU).reason


def lone(node: str, made: str = "fp32[2,3,4,4]") -> SubgraphProblem:
    """A piece of one operator on x [2, 3, 4, 4]."""
    return SubgraphProblem(f"graph 1\ninput %x: fp32[2,3,4,4]\n%y: {made} = {node}\nreturn %y\n")


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def launched(built: Executable, args: list[torch.Tensor], constants: list[torch.Tensor], count: int = 1):
    """The results of one launch."""
    buffers = Buffers(tuple(args), [None] * count, built.pack(constants))
    built.launch(buffers, None)
    return [result for result in buffers.results if result is not None]


def gpu(arch: str = "sm_90", triton: str = "3.6.0") -> Target:
    return Target("cuda", "GPU", arch, 132, 80 << 30, 50 << 20, (("triton", triton),) if triton else ())


def cpu(*versions: tuple[str, str]) -> Target:
    return Target("cpu", "CPU", "avx2", 1, 1 << 30, 1 << 20, versions)


def chain(nodes: int) -> SubgraphProblem:
    """That many additions, one behind the other."""
    lines = [f"%v{index + 1}: fp32[2,3,4,4] = aten.add.Tensor(%v{index}, 1.0)\n" for index in range(nodes)]
    return SubgraphProblem(f"graph 1\ninput %v0: fp32[2,3,4,4]\n{''.join(lines)}return %v{nodes}\n")


CONVOLVED = (
    "graph 1\ninput %x: fp32[1,2,4,4]\nconstant %w: fp32[2,2,1,1]\n"
    "%c: fp32[1,2,4,4] = conv2d(%x, %w, None, (1, 1), (0, 0), (1, 1), 1)\n"
    "%y: fp32[1,2,4,4] = aten.relu.default(%c)\nreturn %y\n"
)


@pytest.mark.parametrize(
    ("problem", "target", "reason"),
    [
        (ConvProblem(1, 4, 6, 6, 4, 3, 3), cpu(("cxx", "13")), "compiles subgraphs, got a convolution"),
        (SubgraphProblem(MAX_POOL, "blocked"), cpu(("cxx", "13")), "nchw and nhwc tensors, got blocked"),
        (lone("aten.no_such_pool.default(%x)"), cpu(("cxx", "13")), "no_such_pool"),
        (SubgraphProblem(MAX_POOL), cpu(), r"needs a C\+\+ compiler: g\+\+ or clang\+\+ on the PATH"),
        (SubgraphProblem(MAX_POOL), gpu(triton=""), r"needs triton: pip install 'convoy-cnn\[gpu\]'"),
        (SubgraphProblem(MAX_POOL), gpu("sm_61"), r"compute capability 7\.0 or more, got 6\.1"),
        (SubgraphProblem(CONVOLVED), cpu(("cxx", "13")), "without convolutions and linear layers, got conv2d"),
        (SubgraphProblem(GLUE.replace("[2,", "[0,")), cpu(("cxx", "13")), "needs tensors with elements"),
        (chain(501), cpu(("cxx", "13")), "takes minutes for more than 500 nodes, got 501"),
        (lone("aten.relu.default(%x)"), cpu(("cxx", "13")), "is no faster than ATen for a single aten.relu.default"),
    ],
)
def test_a_no_says_why(problem, target: Target, reason: str) -> None:
    support = ENGINE.supports(problem, target)
    assert not support
    assert re.search(reason, support.reason), support.reason


@pytest.mark.parametrize("target", [cpu(("cxx", "13")), gpu(), gpu("sm_70")], ids=["cpu", "hopper", "volta"])
@pytest.mark.parametrize("text", [GLUE, MAX_POOL, AVG_POOL, HEAD, SOFTMAX, VIEWS])
def test_pieces_and_operators_that_are_worth_it_are_taken(text: str, target: Target) -> None:
    assert ENGINE.supports(SubgraphProblem(text), target)
    assert list(ENGINE.space(SubgraphProblem(text), target)) == [Knobs()]
    assert ENGINE.workspace_bytes(SubgraphProblem(text), Knobs()) == 0


CASES = {
    "glue": (GLUE, [(2, 4, 6, 5), (2, 3, 6, 5)], [(1, 7, 1, 1), (1, 7, 1, 1)]),
    "max_pool": (MAX_POOL, [(2, 3, 9, 8)], []),
    "avg_pool": (AVG_POOL, [(1, 5, 8, 6)], []),
    "head": (HEAD, [(2, 6, 7, 7)], []),
    "softmax": (SOFTMAX, [(3, 50)], []),
}
BY_HAND = {
    "glue": lambda a, b, shift, scale: (shift + torch.cat([a, b], 1) * scale).clamp(min=0),
    "max_pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "avg_pool": lambda x: x.unflatten(2, (4, 2)).unflatten(4, (3, 2)).mean((3, 5)),
    "head": lambda x: x.mean((2, 3)),
    "softmax": lambda x: x.exp() / x.exp().sum(1, keepdim=True),
}


@needs_compiler
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("glue", "nchw"),
        ("glue", "nhwc"),
        ("max_pool", "nchw"),
        ("max_pool", "nhwc"),
        ("avg_pool", "nhwc"),
        ("head", "nhwc"),
        ("softmax", "nchw"),
    ],
)
def test_results_are_those_of_float64_in_the_memory_format_asked_for(name: str, layout: str) -> None:
    text, arg_shapes, constant_shapes = CASES[name]
    wanted = torch_format(layout, 4)
    args = [normal(*shape, seed=3 + i) for i, shape in enumerate(arg_shapes)]
    args = [t.contiguous(memory_format=wanted) if t.dim() == 4 else t for t in args]
    constants = [normal(*shape, seed=9 + i) for i, shape in enumerate(constant_shapes)]
    built = ENGINE.build(SubgraphProblem(text, layout), Knobs(), CPU)
    (found,) = launched(built, args, constants)
    exact = BY_HAND[name](*(t.double() for t in (*args, *constants)))
    assert found.dtype == torch.float32
    assert found.shape == exact.shape
    assert float((found.double() - exact).norm() / exact.norm()) < 1e-6
    assert found.is_contiguous(memory_format=wanted if found.dim() == 4 else torch.contiguous_format)


@needs_compiler
def test_results_lie_in_no_memory_of_the_caller() -> None:
    built = ENGINE.build(SubgraphProblem(VIEWS), Knobs(), CPU)
    x, k = normal(2, 3, 4, 4), normal(2, 3, 4, 4, seed=2)
    wanted = [F.max_pool2d(x, 2), x.reshape(2, 48).clone(), x.clone(), k.clone()]
    first, second = (launched(built, [x], [k], 4) for _ in range(2))
    places = [t.untyped_storage().data_ptr() for t in (x, k, *first, *second)]
    assert len(set(places)) == len(places)
    for tensor in (x, k, *second):
        tensor.fill_(-7.0)
    assert all(torch.equal(found, want) for found, want in zip(first, wanted, strict=True))


@needs_compiler
def test_several_threads_launch_one_executable() -> None:
    text, arg_shapes, constant_shapes = CASES["glue"]
    built = ENGINE.build(SubgraphProblem(text), Knobs(), CPU)
    constants = [normal(*shape, seed=9 + i) for i, shape in enumerate(constant_shapes)]
    inputs = [[normal(*shape, seed=20 * t + i) for i, shape in enumerate(arg_shapes)] for t in range(2)]
    alone = [launched(built, args, constants)[0] for args in inputs]
    assert not torch.equal(*alone)
    wrong: list[int] = []

    def work(index: int) -> None:
        same = [torch.equal(launched(built, inputs[index], constants)[0], alone[index]) for _ in range(200)]
        wrong.extend(index for right in same if not right)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def new_piece() -> SubgraphProblem:
    """A piece that no cache on this machine has seen."""
    return SubgraphProblem(
        "graph 1\ninput %x: fp32[2,3,4,4]\n"
        f"%y: fp32[2,3,4,4] = aten.add.Scalar(%x, {time.time_ns() % 10**9}.5)\n"
        "%z: fp32[2,3,4,4] = aten.relu.default(%y)\nreturn %z\n"
    )


FAILING = """\
import sys
from convoy.engines.library.inductor import ENGINE
from convoy.errors import CompileError
from convoy.measurement.device.detect import detect_target
from convoy.problem import Knobs, SubgraphProblem
try:
    ENGINE.build(SubgraphProblem(sys.argv[1]), Knobs(), detect_target("cpu"))
except CompileError as error:
    print(error.engine, len(error.summary.splitlines()), error.log in str(error))
    print(error.log)
"""


@needs_compiler
def test_a_compiler_that_fails_is_an_error_with_its_words(tmp_path: Path) -> None:
    """In a process of its own, since Inductor remembers what it found out about a compiler."""
    compiler = tmp_path / "g++"
    compiler.write_text(
        "#!/bin/sh\n[ \"$1\" = --version ] && echo g++ 13 && exit 0\necho 'planted: no room on this disk' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", FAILING, new_piece().text],
        env={**os.environ, "CXX": str(compiler)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.splitlines()[0] == "inductor 1 True"
    assert "planted: no room on this disk" in done.stdout


@pytest.mark.parametrize(
    ("raised", "summary", "log"),
    [
        (RuntimeError("first line\nsecond line"), "first line", "first line\nsecond line"),
        (AssertionError(), "AssertionError", "AssertionError"),
    ],
)
def test_whatever_inductor_raises_is_a_compile_error(raised, summary, log, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(problem, target):
        raise raised

    monkeypatch.setattr(inductor, "_compile", fails)
    with pytest.raises(CompileError) as caught:
        ENGINE.build(SubgraphProblem(GLUE), Knobs(), CPU)
    assert (caught.value.summary, caught.value.log) == (summary, log)
    assert caught.value.__cause__ is raised


CHILD = """\
import sys
from torch._dynamo.utils import counters
from torch._inductor import config, list_mode_options
from convoy.engines.library.inductor import ENGINE
from convoy.measurement.device.detect import detect_target
from convoy.problem import Knobs, SubgraphProblem
if sys.argv[1] == "changed":
    config.freezing = True
    config.load_config({**config.get_config_copy(), **list_mode_options("max-autotune")})
    config.coordinate_descent_tuning = True
for text in sys.argv[2:]:
    counters.clear()
    ENGINE.build(SubgraphProblem(text), Knobs(), detect_target("cpu"))
    print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


@needs_compiler
def test_another_process_takes_the_code_from_inductors_cache() -> None:
    """The measured piece runs, also where the other process changed Inductor's settings."""
    seen, unseen = new_piece(), new_piece()
    found = []
    for settings, pieces in (("plain", [seen]), ("changed", [seen, unseen])):
        command = [sys.executable, "-c", CHILD, settings, *(piece.text for piece in pieces)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        found.append(done.stdout.splitlines())
    assert found == [["0 1"], ["1 0", "0 1"]]


def test_tritons_cache_stays_where_it_is(monkeypatch):
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    before = knobs.cache.dir
    inductor.keep_triton_cache()
    assert os.environ["TRITON_CACHE_DIR"] == before
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    inductor.keep_triton_cache()
    assert os.environ["TRITON_CACHE_DIR"] == "elsewhere"
