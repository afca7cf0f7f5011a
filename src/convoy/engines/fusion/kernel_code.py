"""The CUDA C of one subgraph: sections of blocks, one after another in one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Final

from convoy.engines.fusion.emitter import CPP_TYPE
from convoy.engines.fusion.lowering import LoweredSubgraph, lower
from convoy.engines.fusion.row_sections import row_section
from convoy.engines.fusion.sections import KernelSection, loop_sections, results_of
from convoy.engines.fusion.tensors import NotFusibleError, Reduced, Tensor, Windowed, reachable
from convoy.engines.hopper.nvrtc_source import CudaSource
from convoy.engines.subgraph import parse_subgraph

KERNEL: Final = "fusion"
"""Name of every kernel."""

HEADERS: Final = ("fusion_device.cuh", "fusion_operators.cuh")

_THREADS: Final = 128
"""Threads of a block without reductions."""

MOST_VALUES: Final = 2000
"""Values of a subgraph: a kernel of more would take long to compile."""


@dataclass(frozen=True, slots=True)
class KernelCode:
    """One kernel.

    Attributes:
        text: of the kernel alone, without headers.
        threads: of a block.
        blocks: of the grid.
        widths: elements of a vector, by section.
        by_lane: values that are computed element by element in vectors.
    """

    text: str
    threads: int
    blocks: int
    widths: tuple[int, ...]
    by_lane: int

    @property
    def source(self) -> CudaSource:
        """For NVRTC."""
        includes = "".join(f"#include <{name}>\n" for name in HEADERS)
        headers = tuple((name, header_text(name)) for name in HEADERS)
        return CudaSource(f"{KERNEL}.cu", includes + self.text, headers)


def header_text(name: str) -> str:
    """A header of this folder."""
    return (files("convoy.engines.fusion") / name).read_text(encoding="utf-8")


@lru_cache(maxsize=1024)
def kernel_of(text: str, layout: str, units: int) -> KernelCode | str:
    """The kernel of a subgraph, or why there is none.

    Args:
        text: the subgraph, as text.
        layout: the memory format of its arguments and results.
        units: multiprocessors of the device.
    """
    try:
        return generate(lower(parse_subgraph(text), layout), units)
    except NotFusibleError as error:
        return str(error)


def generate(lowered: LoweredSubgraph, units: int) -> KernelCode:
    """The kernel of a subgraph.

    Raises:
        NotFusibleError: it needs more than one kernel.
    """
    results = results_of(lowered)
    _check_size([result.tensor for result in results])
    reducing = [r for r in results if any(isinstance(each, Reduced) for each in reachable([r.tensor]))]
    others = [result for result in results if result not in reducing]
    sections: list[KernelSection] = []
    threads = _THREADS
    if reducing:
        section, threads = row_section(reducing, units)
        sections.append(section)
    sections += loop_sections(others, threads)
    lines = _head(lowered, threads)
    begin = 0
    for place, section in enumerate(sections):
        last = place == len(sections) - 1
        opening = "{" if last else f"if (block_index() < {begin + section.blocks}u) {{"
        lines.append(f"  {'else ' if place else ''}{opening}")
        lines.append(f"    const unsigned block = block_index() - {begin}u;")
        lines += [f"  {line}" for line in section.lines]
        lines.append("  }")
        begin += section.blocks
    lines.append("}")
    by_lane = sum(section.by_lane for section in sections)
    return KernelCode("\n".join(lines) + "\n", threads, begin, tuple(s.width for s in sections), by_lane)


def _head(lowered: LoweredSubgraph, threads: int) -> list[str]:
    """The kernel's name and parameters, and its first line."""
    read = [f"const {CPP_TYPE[tensor.dtype]}* RESTRICT {tensor.parameter}" for tensor in lowered.inputs]
    written = [f"{CPP_TYPE[spec.dtype]}* RESTRICT y{place}" for place, spec in enumerate(lowered.result_specs)]
    return [f"KERNEL({threads}) {KERNEL}({', '.join([*read, *written])}) {{", "  begin_kernel();"]


def _check_size(results: list[Tensor]) -> None:
    values = reachable(results)
    if len(values) > MOST_VALUES:
        raise NotFusibleError(f"computes up to {MOST_VALUES} values in a kernel, got {len(values)}")
    for each in values:
        if isinstance(each, Windowed) and any(isinstance(inner, Windowed) for inner in reachable([each.of])):
            raise NotFusibleError("computes one pooling in a kernel, not one of another's results")
