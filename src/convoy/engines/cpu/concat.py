"""cpu.concat: a concatenation along channels, each byte copied once by all threads, in C (concat.c; docs/engines/cpu.md)."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Final

import torch

from convoy.engines.base import Buffers, Engine, Executable
from convoy.engines.host_compiler import compile_shared, compiler_support, load_shared, threads_flag
from convoy.engines.piece import read, runnable
from convoy.engines.roofline import Work, estimate_us
from convoy.problem import Knobs, Problem, SubgraphProblem, TensorSpec
from convoy.regions.concat import pieces
from convoy.support import Support
from convoy.target import Target

SOURCE: Final = Path(__file__).with_name("concat.c")
FLAGS: Final = ("-std=gnu11", "-O3", "-march=native")


def concatenation_of(problem: SubgraphProblem) -> tuple[list[TensorSpec], list[int]] | None:
    """What a piece concatenates along channels, and which arg each of these is; None for any other piece."""
    graph = read(problem.text)
    if len(graph.nodes) != 1 or graph.constants() or len(graph.outputs) != 1:
        return None
    names = pieces(graph, graph.nodes[0])
    if not names:
        return None
    return [graph.values[name].spec for name in names], [graph.inputs.index(name) for name in names]


@cache
def library() -> ctypes.CDLL:
    """The compiled kernel; raises CompileError where it cannot be had."""
    return load_shared(compile_shared(SOURCE.read_text(encoding="utf-8"), [*FLAGS, *threads_flag()], ConcatCpu.id))


class _Concatenation(Executable):
    def __init__(self, specs: list[TensorSpec], order: list[int], layout: str) -> None:
        n, _, h, w = specs[0].shape
        self._order = order
        self._rows = n * h * w if layout == "nhwc" else n
        count = len(specs)
        self._bytes = (ctypes.c_int64 * count)(*(spec.size_bytes // max(1, self._rows) for spec in specs))
        self._from = ctypes.c_void_p * count
        self._empty = not any(spec.elements for spec in specs)
        self._threads = torch.get_num_threads()
        self._run = library().convoy_concat
        self._run.argtypes = [
            ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64,
        ]  # fmt: skip
        self._run.restype = None

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One call."""
        del workspace
        (y,) = buffers.results
        assert y is not None
        if not self._empty:
            given = self._from(*(buffers.args[index].data_ptr() for index in self._order))
            self._run(self._rows, len(self._order), self._bytes, given, y.data_ptr(), self._threads)


class ConcatCpu(Engine):
    """Copies of any dtype."""

    id = "cpu.concat"
    family = "direct"
    trusted = False

    def supports(self, problem: Problem, target: Target) -> Support:
        """A piece that is one concatenation of 4-D values along channels, in nhwc or nchw, on a CPU with a C compiler."""
        if not isinstance(problem, SubgraphProblem):
            return Support.no(f"concatenates, got {type(problem).__name__}")
        if target.device != "cpu":
            return Support.no(f"runs on CPUs, got {target.device}")
        if problem.layout not in ("nhwc", "nchw"):
            return Support.no(f"needs layout nhwc or nchw, got {problem.layout}")
        if not (found := runnable(problem)):
            return found
        if concatenation_of(problem) is None:
            return Support.no("computes a concatenation along channels by itself, got another piece")
        return compiler_support()

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float | None:
        """A pass over memory."""
        del knobs
        return estimate_us(Work(0.0, problem.bytes_min, 1), target)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """The library is compiled once for all problems."""
        del knobs, target
        assert isinstance(problem, SubgraphProblem)
        found = concatenation_of(problem)
        assert found is not None
        return _Concatenation(*found, problem.layout)


ENGINE = ConcatCpu()
