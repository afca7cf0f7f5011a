"""The CUDA C of one subgraph: kernels of sections of blocks, mostly a single kernel of one section."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Final

from convoy.engines.fusion.emitter import CPP_TYPE
from convoy.engines.fusion.lowering import INDEX_LIMIT, LoweredSubgraph, in_slice, lower
from convoy.engines.fusion.row_sections import row_section, rows_of
from convoy.engines.fusion.sections import KernelSection, Result, loop_sections, results_of
from convoy.engines.fusion.stages import (
    UNITS,
    WorkspaceCut,
    is_reducing,
    pooling_cut,
    reduction_cut,
    split_cut,
    substituted,
)
from convoy.engines.fusion.tensors import Input, NotFusibleError, reachable
from convoy.engines.hopper.nvrtc_source import CudaSource
from convoy.engines.subgraph import parse_subgraph

HEADERS: Final = ("fusion_device.cuh", "fusion_operators.cuh")

_THREADS: Final = 128
"""Threads of a block without reductions."""

MOST_VALUES: Final = 2000
"""Values of a subgraph: a kernel of more would take long to compile."""

MOST_KERNELS: Final = 4

MOST_POINTERS: Final = 256
"""A kernel's parameters: 4 KB hold twice as many, with values in the workspace."""

_ALIGNMENT: Final = 256
"""Bytes to which values in the workspace are aligned."""


@dataclass(frozen=True, slots=True)
class KernelCode:
    """One kernel.

    Attributes:
        name: of the function.
        text: of the function.
        parameters: what its pointers are: `x0` an argument, `c0` a constant, `y0` a result, `w0` a value in the workspace.
        threads: of a block.
        blocks: of the grid.
        widths: elements of a vector, by section.
        by_lane: values that are computed element by element in vectors.
        row_blocks: blocks of the section with reductions; 0 where there is none.
    """

    name: str
    text: str
    parameters: tuple[str, ...]
    threads: int
    blocks: int
    widths: tuple[int, ...]
    by_lane: int
    row_blocks: int


@dataclass(frozen=True, slots=True)
class FusionCode:
    """The kernels of a subgraph, in order.

    Attributes:
        kernels: the kernels.
        offsets: where the values `w0`, `w1`, ... begin in the workspace, bytes.
        workspace_bytes: of the workspace.
    """

    kernels: tuple[KernelCode, ...]
    offsets: tuple[int, ...] = ()
    workspace_bytes: int = 0

    @property
    def source(self) -> CudaSource:
        """For NVRTC."""
        includes = "".join(f"#include <{name}>\n" for name in HEADERS)
        headers = tuple((name, header_text(name)) for name in HEADERS)
        return CudaSource("fusion.cu", includes + "\n".join(kernel.text for kernel in self.kernels), headers)


def header_text(name: str) -> str:
    """A header of this folder."""
    return (files("convoy.engines.fusion") / name).read_text(encoding="utf-8")


@lru_cache(maxsize=4096)
def code_of(text: str, layout: str, part: tuple[int, int] | None = None) -> FusionCode | str:
    """The kernels of a subgraph, or why there are none.

    Args:
        text: the subgraph, as text.
        layout: the memory format of its arguments and results.
        part: a result that is some channels of a larger NHWC tensor: its number, and the channels of that tensor.
    """
    try:
        lowered = lower(parse_subgraph(text), layout)
        return generate(lowered if part is None else in_slice(lowered, *part))
    except NotFusibleError as error:
        return str(error)


@lru_cache(maxsize=4096)
def workspace_of(text: str, layout: str) -> int | str:
    """Bytes of the workspace of a subgraph's kernels, or why there are none.

    Code is generated only where that can fail or takes a workspace: of a net's subgraphs, few win and are built.

    Args:
        text: the subgraph, as text.
        layout: the memory format of its arguments and results.
    """
    try:
        results = _checked_results(lower(parse_subgraph(text), layout))
    except NotFusibleError as error:
        return str(error)
    reducing = any(is_reducing(result.tensor) for result in results)
    if not reducing and pooling_cut(results, layout, 0) is None:
        return 0
    code = code_of(text, layout)
    return code if isinstance(code, str) else code.workspace_bytes


def generate(lowered: LoweredSubgraph) -> FusionCode:
    """The kernels of a subgraph.

    Raises:
        NotFusibleError: it is too large, or needs too many kernels.
    """
    pending = _checked_results(lowered)
    kernels: list[KernelCode] = []
    written: list[Result] = []
    while len(kernels) < MOST_KERNELS:
        name = f"fusion{len(kernels)}"
        done = _next(name, pending, lowered.layout, len(written))
        if isinstance(done, KernelCode):
            return _with_workspace([*kernels, done], written)
        ready = [each for each in pending if not is_reducing(each.tensor) and not _reads(each, done)]
        kernels.append(_kernel(name, [*done.written, *ready]))
        written += done.written
        pending = substituted([each for each in pending if each not in ready], done.replaced)
    raise NotFusibleError(f"needs more than {MOST_KERNELS} kernels")


def _checked_results(lowered: LoweredSubgraph) -> list[Result]:
    """The results of a subgraph that is not too large.

    Raises:
        NotFusibleError: it is.
    """
    pending = results_of(lowered)
    values = reachable([result.tensor for result in pending])
    if len(values) > MOST_VALUES:
        raise NotFusibleError(f"computes up to {MOST_VALUES} values in a kernel, got {len(values)}")
    if (pointers := len(lowered.inputs) + len(pending)) > MOST_POINTERS:
        raise NotFusibleError(f"takes up to {MOST_POINTERS} arguments, constants and results, got {pointers}")
    if (largest := max(math.prod(each.shape) for each in values)) >= INDEX_LIMIT:
        raise NotFusibleError(f"indexes fewer than 2^31 elements, got {largest}")
    return pending


def _next(name: str, results: Sequence[Result], layout: str, number: int) -> KernelCode | WorkspaceCut:
    """The kernel of all results, or the cut that is needed before."""
    if (cut := pooling_cut(results, layout, number)) is not None:
        return cut
    reducing = [result for result in results if is_reducing(result.tensor)]
    if not reducing:
        return _kernel(name, results)
    try:
        found = _kernel(name, results)
        rows = rows_of([result.tensor for result in reducing])
    except NotFusibleError:
        return reduction_cut(results, number)
    return split_cut(rows, found.row_blocks, number) or found


def _reads(result: Result, cut: WorkspaceCut) -> bool:
    return any(id(each) in cut.replaced for each in reachable([result.tensor]))


def _kernel(name: str, results: Sequence[Result]) -> KernelCode:
    """One kernel: results with reductions first, then the others."""
    reducing = [result for result in results if is_reducing(result.tensor)]
    sections: list[KernelSection] = []
    threads = _THREADS
    if reducing:
        section, threads = row_section(rows_of([result.tensor for result in reducing]), reducing, UNITS)
        sections.append(section)
    sections += loop_sections([result for result in results if result not in reducing], threads)
    inputs = {each.parameter: each for each in reachable([r.tensor for r in results]) if isinstance(each, Input)}
    read = [f"{_pointer(each.dtype, each.parameter[0] == 'c')} {each.parameter}" for each in inputs.values()]
    stored = [f"{CPP_TYPE[result.dtype]}* RESTRICT {result.parameter}" for result in results]
    lines = [f"KERNEL({threads}) {name}({', '.join([*read, *stored])}) {{", "  begin_kernel();"]
    begin = 0
    for place, section in enumerate(sections):
        last = place == len(sections) - 1
        opening = "{" if last else f"if (block_index() < {begin + section.blocks}u) {{"
        lines.append(f"  {'else ' if place else ''}{opening}")
        lines.append(f"    const unsigned block = block_index() - {begin}u;")
        lines += [f"  {line}" for line in section.lines]
        lines.append("  }")
        begin += section.blocks
    text = "\n".join([*lines, "}"]) + "\n"
    parameters = (*inputs, *(result.parameter for result in results))
    widths, by_lane = tuple(section.width for section in sections), sum(section.by_lane for section in sections)
    return KernelCode(name, text, parameters, threads, begin, widths, by_lane, sections[0].blocks if reducing else 0)


def _pointer(dtype: str, constant: bool) -> str:
    """The type of a pointer to values that are read.

    Only constants may be read past the caches' coherence (`RESTRICT`): with programmatic dependent launch a kernel begins before
    the one in front of it has written its results.
    """
    return f"const {CPP_TYPE[dtype]}*{' RESTRICT' if constant else ''}"


def _with_workspace(kernels: Sequence[KernelCode], written: Sequence[Result]) -> FusionCode:
    """The kernels with the places of their values in the workspace."""
    offsets, size = [0] * len(written), 0
    for place, result in enumerate(written):
        offsets[place] = size
        size += -(-4 * math.prod(result.tensor.shape) // _ALIGNMENT) * _ALIGNMENT
    return FusionCode(tuple(kernels), tuple(offsets), size)
