"""inductor: subgraphs (pooling, concatenation, pointwise work, norms) fused and compiled by torch._inductor.

The subgraph is traced at its sizes and memory format, results included, and compiled by `torch._inductor.standalone_compile`
(PyTorch 2.11 to 2.13): C++ by the host's compiler on a CPU, Triton on a GPU. Inductor keeps its results in its own cache on
disk, so that another process loads one in about ten milliseconds. The cost of compiling is in docs/kernels/cpu.md.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, cast

import torch

from convoy.engines import nondeterminism
from convoy.engines.base import Buffers, Engine, Executable, Knobs, Packed
from convoy.engines.interpret import compile_graph
from convoy.engines.library.inductor_defects import wrong_in_inductor
from convoy.engines.subgraph import SubgraphResults, parse_subgraph, torch_format, torch_support
from convoy.engines.torch_operators import DTYPES
from convoy.errors import CompileError
from convoy.graph.ir import LAYERS, Graph, Node
from convoy.graph.randomness import draws_random
from convoy.problem import Problem, SubgraphProblem, TensorSpec, kind_in_words
from convoy.regions.casts import is_cast
from convoy.support import Support
from convoy.target import Target
from convoy.tuning_lock import with_dynamo

LEAST_CAPABILITY: Final = 70
"""Triton compiles for GPUs of compute capability 7.0 and up (its README)."""

_WORTHWHILE_ALONE: Final = ("pool", "upsample", "norm", "softmax")
"""Parts of the names of operators that Inductor may do better than ATen by themselves. Any other single operator is one pass
over memory in ATen too, and not worth a compiler's second: relu and cat came out equal (docs/kernels/cpu.md)."""

MOST_NODES: Final = 500
"""Nodes of the largest subgraph. Inductor's time grows with their square: 50 s for the 1,500 of an LSTM with 40 time steps, on
two cores. The nodes between two layers of a net are fewer than 100."""

COMMON_OPTIONS: Final = {
    "freezing": False,
    "max_autotune": False,
    "coordinate_descent_tuning": False,
    "triton.cudagraphs": False,
}
"""Options that Inductor enables for whole nets. The process that measures a subgraph does not know the net, so they are set here
too: otherwise the net would run code that was neither measured nor cached."""

COMPILING: Final = threading.Lock()
"""Inductor's configuration and caches are process-wide."""


class _Compiled(Executable):
    """A compiled subgraph. Its results are new tensors."""

    allocates_results = True

    def __init__(self, problem: SubgraphProblem, function: Callable[..., Any], *, deterministic: bool) -> None:
        self._function = function
        self._results = SubgraphResults(problem)
        self.deterministic = deterministic

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The constants without their history."""
        return tuple(tensor.detach() for tensor in constants)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        del workspace
        tensors = (*buffers.args, *buffers.constants)
        with torch.no_grad():
            made = self._function(*tensors)
        self._results.store(made, tensors, buffers.results)


class InductorEngine(Engine):
    """PyTorch's compiler, for the subgraphs between convolutions."""

    id = "inductor"
    family = "compiler"
    fuses_subgraphs = True
    trusted = False
    builds_on_device = True
    starts_quickly = False

    def supports(self, problem: Problem, target: Target) -> Support:
        """Subgraphs without convolutions, of several operators or one that gains by compiling, if there is a compiler."""
        if not isinstance(problem, SubgraphProblem):
            return Support.no(f"compiles subgraphs, got {kind_in_words(problem)}")
        support = torch_support(problem)
        if not support:
            return support
        support = compiler_here(target)
        return _worthwhile(parse_subgraph(problem.text), target) if support else support

    def nondeterminism_reason(self, problem: Problem, knobs: Knobs, target: Target) -> str:
        """Subgraphs with operators that the compiler turns into atomic operations, or leaves to a nondeterministic ATen."""
        del knobs
        assert isinstance(problem, SubgraphProblem)
        return nondeterminism.describe(nondeterminism.in_inductor(parse_subgraph(problem.text), target.device))

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Trace and compile; raises CompileError with the compiler's message."""
        assert isinstance(problem, SubgraphProblem)
        try:
            function = _compile(problem, target)
        except Exception as error:  # Inductor and its compilers raise many types; the message goes into the log
            words = str(error).strip() or type(error).__name__
            raise CompileError(self.id, words.splitlines()[0], words) from error
        return _Compiled(problem, function, deterministic=not self.nondeterminism_reason(problem, knobs, target))


def compiler_here(target: Target) -> Support:
    """Whether the compiler is there that Inductor needs."""
    if target.device == "cpu":
        return (
            Support.yes() if target.version("cxx") else Support.no("needs a C++ compiler: g++ or clang++ on the PATH")
        )
    if not target.version("triton"):
        return Support.no("needs triton: pip install 'convoy-cnn[gpu]'")
    if target.capability < LEAST_CAPABILITY:
        return Support.no(f"needs compute capability 7.0 or more, got {target.capability / 10}")
    return Support.yes()


def _worthwhile(graph: Graph, target: Target) -> Support:
    """Whether compiling can gain anything: time, or the same bits in every run where ATen has other ones."""
    layers = [node.op for node in graph.nodes if node.op in LAYERS]
    if layers:
        return Support.no(f"compiles subgraphs without convolutions and linear layers, got {layers[0]}")
    if len(graph.nodes) > MOST_NODES:
        return Support.no(f"takes minutes for more than {MOST_NODES} nodes, got {len(graph.nodes)}")
    if all(map(is_cast, graph.nodes)):
        return Support.no("is no faster than one multi-tensor copy for a subgraph of casts")
    first = next((node.op for node in graph.nodes), "nothing")
    halves = [node.op for node in graph.nodes if target.device == "cpu" and _halves_statistics(graph, node)]
    if halves:
        return Support.no(f"saves a batch norm's statistics in the input's precision, PyTorch in fp32: {halves[0]}")
    if reason := wrong_in_inductor(graph):
        return Support.no(reason)
    random = [node.op for node in graph.nodes if draws_random(node)]
    if random:
        return Support.no(f"draws different random numbers than PyTorch for the same seed, got {random[0]}")
    if any(value.spec.elements == 0 for value in graph.values.values()):
        return Support.no("needs tensors with elements, got an empty one")
    if len(graph.nodes) > 1 or any(part in first for part in _WORTHWHILE_ALONE):
        return Support.yes()
    if nondeterminism.in_aten(graph, target.device) and not nondeterminism.in_inductor(graph, target.device):
        return Support.yes()
    return Support.no(f"is no faster than ATen for a single {first}")


def _halves_statistics(graph: Graph, node: Node) -> bool:
    """Whether it is a batch norm whose saved mean and deviation have another dtype than its input (PyTorch 2.11 to 2.13).

    Inductor's code for a CPU saves them in the input's dtype, and PyTorch's backward pass refuses such.
    """
    if "native_batch_norm" not in node.op or "backward" in node.op:
        return False
    saved = {graph.values[name].spec.dtype for name in node.outputs[1:3] if name in graph.values}
    return bool(saved - {graph.values[next(iter(node.refs()))].spec.dtype})


def _compile(problem: SubgraphProblem, target: Target) -> Callable[..., Any]:
    """A function of args and constants, in order, that gives the results in the problem's memory format."""
    # Importing these takes about a second, which only those pay who build.
    import torch._inductor.config as settings
    from torch._inductor import standalone_compile
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = parse_subgraph(problem.text)
    run = compile_graph(graph)
    inputs = len(graph.inputs)
    layouts = [torch_format(problem.layout, len(graph.values[name].spec.shape)) for name in graph.outputs]

    def piece(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = run(tensors[:inputs], tensors[inputs:])
        return tuple(t.contiguous(memory_format=layout) for t, layout in zip(made, layouts, strict=True))

    specs = [graph.values[name].spec for name in graph.inputs] + [value.spec for value in graph.constants()]
    with COMPILING, torch.no_grad(), FakeTensorMode() as mode:
        # Constants come as torch made them, contiguous; args in the problem's memory format.
        examples = [
            example(spec, problem.layout if index < inputs else "nchw", target.device)
            for index, spec in enumerate(specs)
        ]
        traced = make_fx(piece)(*examples)
        del mode
    # The number of threads is compiled in: with it in the options, Inductor's cache keeps code of processes with other thread
    # counts apart. On a GPU a subgraph has one or two kernels: compiling them in Inductor's own processes took 20 of the 46 s
    # in which DenseNet-121's 62 subgraphs were loaded from the cache (batch 32, H200).
    options = {"cpp.threads": target.units} if target.device == "cpu" else {"compile_threads": 1}
    if target.device == "cuda":
        keep_triton_cache()
    patch: Callable[..., AbstractContextManager[object]] = cast("Any", settings).patch
    with with_dynamo(), COMPILING, torch.no_grad(), patch({**COMMON_OPTIONS, **options}):
        return standalone_compile(traced, [*examples], dynamic_shapes="from_graph")


def keep_triton_cache() -> None:
    """Keep the location of Triton's cache.

    Inductor's first kernel would move it for the whole process (`torch._inductor.runtime.triton_heuristics`), and Convoy's
    kernels that another process had compiled would be compiled again: on an H100 more than half of the time of tuning
    GoogLeNet's training step.
    """
    from triton import knobs

    os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)


def example(spec: TensorSpec, layout: str, device: str) -> torch.Tensor:
    """A tensor to trace with."""
    memory_format = torch_format(layout, len(spec.shape))
    return torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device=device, memory_format=memory_format)


ENGINE = InductorEngine()
