"""cpu.concat: a concatenation along channels, each byte copied once by all threads, in C (concat.c; docs/kernels/cpu.md)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

import torch

from convoy.engines.base import Executable, Packed
from convoy.engines.cpu.native_launch import PARALLEL_H, KernelSource, Native, NativeExecutable, Operand
from convoy.engines.cpu_subgraph import CpuSubgraphEngine
from convoy.engines.subgraph import parse_subgraph
from convoy.problem import Knobs, Problem, SubgraphProblem, TensorSpec
from convoy.regions.concat import concat_inputs
from convoy.target import Target

SOURCE: Final = Path(__file__).with_name("concat.c")
FLAGS: Final = ("-std=gnu11", "-O3", "-march=native")


def concatenation_of(problem: SubgraphProblem) -> tuple[list[TensorSpec], list[int]] | None:
    """The values that a subgraph concatenates along channels, and the argument that holds each; None for any other subgraph."""
    graph = parse_subgraph(problem.text)
    if len(graph.nodes) != 1 or graph.constants() or len(graph.outputs) != 1:
        return None
    names = concat_inputs(graph, graph.nodes[0])
    if not names:
        return None
    return [graph.values[name].spec for name in names], [graph.inputs.index(name) for name in names]


class _Concatenation(NativeExecutable):
    def __init__(self, specs: list[TensorSpec], order: list[int], layout: str) -> None:
        n, _, h, w = specs[0].shape
        rows = n * h * w if layout == "nhwc" else n
        settings = (rows, len(specs), torch.get_num_threads(), *(spec.size_bytes // max(1, rows) for spec in specs))
        self._order = order
        self._settings = (ctypes.c_int64 * len(settings))(*settings)
        self._empty = not any(spec.elements for spec in specs)
        self.use(KernelSource((PARALLEL_H, SOURCE), FLAGS, ConcatCpu.id, "convoy_concat"))

    def native(self, constants: Packed) -> Native | None:
        """Copy."""
        del constants
        tensors: tuple[Operand, ...] = (*(("arg", index) for index in self._order), ("result", 0))
        return None if self._empty else Native(self._settings, tensors)


class ConcatCpu(CpuSubgraphEngine):
    """Copies of any dtype."""

    id = "cpu.concat"
    devices = ("cpu",)
    native = True
    builds_in_threads = True
    does = "computes concatenations"
    layouts = ("nhwc", "nchw")

    def refusal(self, problem: SubgraphProblem) -> str:
        """It concatenates 4-D values along channels."""
        if concatenation_of(problem) is None:
            return "computes a single concatenation along channels, got another subgraph"
        return ""

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """The library is compiled once for all problems."""
        del knobs, target
        assert isinstance(problem, SubgraphProblem)
        found = concatenation_of(problem)
        assert found is not None
        return _Concatenation(*found, problem.layout)


ENGINE = ConcatCpu()
