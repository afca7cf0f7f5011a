"""cpu.layout: a copy between nchw and nhwc by all threads, in C (layout.c; docs/kernels/cpu.md)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

import torch

from convoy.engines.base import Engine, Executable, Packed
from convoy.engines.compilers.host_compiler import compiler_support
from convoy.engines.cost_model import KernelWork, estimate_us
from convoy.engines.cpu.native_launch import PARALLEL_H, KernelSource, Native, NativeExecutable
from convoy.problem import Knobs, LayoutProblem, Problem, kind_in_words
from convoy.support import Support
from convoy.target import Target

SOURCE: Final = Path(__file__).with_name("layout.c")
FLAGS: Final = ("-std=gnu11", "-O3", "-march=native")
SIZES: Final = (1, 2, 4, 8)
"""Bytes of a value, as in layout.c."""


def kernel(value_bytes: int) -> KernelSource:
    """The kernel for values of a size of `SIZES`: one for all of them takes gcc three times as long."""
    function = f"convoy_layout{value_bytes}"
    flags = (*FLAGS, f"-DBYTES={value_bytes}", f"-DLAYOUT={function}")
    return KernelSource((PARALLEL_H, SOURCE), flags, CpuLayout.id, function)


class _LayoutCopy(NativeExecutable):
    def __init__(self, problem: LayoutProblem) -> None:
        n, c, h, w = problem.spec.shape
        self._empty = not problem.spec.elements
        to_nhwc = int(problem.layout == "nhwc")
        settings = n, c, h * w, to_nhwc, _value_bytes(problem), torch.get_num_threads()
        self._settings = (ctypes.c_int64 * len(settings))(*settings)
        self.use(kernel(_value_bytes(problem) if not self._empty else SIZES[0]))

    def native(self, constants: Packed) -> Native | None:
        """Copy."""
        del constants
        return None if self._empty else Native(self._settings, (("arg", 0), ("result", 0)))


class CpuLayout(Engine):
    """Copies of any dtype."""

    id = "cpu.layout"
    family = "direct"
    devices = ("cpu",)
    native = True
    builds_in_threads = True
    trusted = False

    def supports(self, problem: Problem, target: Target) -> Support:
        """Copies between nchw and nhwc on a CPU with a C compiler."""
        if not isinstance(problem, LayoutProblem):
            return Support.no(f"copies between memory formats, got {kind_in_words(problem)}")
        if target.device != "cpu":
            return Support.no(f"runs on CPUs, got {target.device}")
        if {problem.source, problem.layout} != {"nchw", "nhwc"}:
            return Support.no(f"copies between nchw and nhwc, got {problem.source} to {problem.layout}")
        if problem.spec.elements and _value_bytes(problem) not in SIZES:
            return Support.no(f"copies values of {', '.join(map(str, SIZES))} bytes, got {problem.spec.dtype}")
        return compiler_support()

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float | None:
        """A pass over memory."""
        del knobs
        return estimate_us(KernelWork(0.0, problem.bytes_min, 1), target)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """The library is compiled once for all problems."""
        del knobs, target
        assert isinstance(problem, LayoutProblem)
        return _LayoutCopy(problem)


def _value_bytes(problem: LayoutProblem) -> int:
    return problem.spec.size_bytes // max(1, problem.spec.elements)


ENGINE = CpuLayout()
