"""IR to CUDA C: one kernel; a row of blocks a group of filters, a thread some neighbouring pixels. No torch here.

A block computes a tile for one group. It copies the tile's part of the input, with padding inside, and the group's values to
shared memory, segment after segment, the next ones while this one computes. The code then loads words of neighbouring inputs and
of four values from there, so that nearly every instruction is a multiply-add. In a kernel with splits, other warps compute
other taps of the same pixels, and their sums are added through shared memory. Each group is a function: units of some
functions are compiled in parallel, and linked.

Values are data in memory. As kernel parameters, each pair of them would cost an instruction and a wait (ULDC, seen in sm_90
code), and one launch holds at most 8000. Immediates are written if the values are known and will not change. All names and
numbers in the text come from integers and floats of checked data classes; no header is included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from convoy.engines.sparse_weights.codegen.cuda_copies import FOUR
from convoy.engines.sparse_weights.codegen.cuda_writer import CudaWriter
from convoy.engines.sparse_weights.codegen.kernel_ir import MaskKernel
from convoy.engines.sparse_weights.codegen.plane_layout import PlaneLayout
from convoy.engines.sparse_weights.codegen.staging_steps import buffers_of, steps

UNIT_FMAS: Final = 4000
"""Multiply-add instructions of a compilation unit, approximately: NVRTC 13 takes half a millisecond for each (a millisecond as
expressions), and units are compiled in parallel."""

ACTIVATIONS: Final = ("none", "relu", "relu6")


@dataclass(frozen=True, slots=True)
class GeneratedCuda:
    """The kernel of a layer.

    Attributes:
        head: CUDA C at the beginning of every unit.
        bodies: the rest of each unit.
        name: the kernel.
        blocks: tiles times groups; tiles of one group are neighbours.
        threads: threads of a block.
        shared_bytes: dynamic shared memory of a block.
        aligned: alignment of the input's address, in bytes.
        packed: for each packed float the index of its value, or -1 for padding; empty if values are immediates.
    """

    head: str
    bodies: tuple[str, ...]
    name: str
    blocks: int
    threads: int
    shared_bytes: int
    aligned: int
    packed: tuple[int, ...]


def emit(
    kernel: MaskKernel,
    layout: PlaneLayout,
    *,
    bias: bool,
    residual: bool,
    activation: str,
    shared_bytes: int,
    values: Sequence[float] | None = None,
) -> GeneratedCuda:
    """The CUDA C code of a kernel.

    Args:
        kernel: verified code, staged, of one block that holds the whole batch.
        layout: its template.
        bias: whether a bias is added.
        residual: whether a residual is added.
        activation: one of `ACTIVATIONS`.
        shared_bytes: shared memory that a block's steps may fill, about; two are there at once whatever they take.
        values: numbers to make immediates of; None: values are data.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {ACTIVATIONS}")
    if layout.blocks != (1, 1):
        raise ValueError(f"{layout.blocks} blocks: CUDA code computes one block that holds the whole batch")
    if kernel.vectors not in (1, 2, 4):
        raise ValueError(f"{kernel.vectors} pixels of a thread: words have 1, 2 or 4")
    parts = _parts(kernel)
    writer = CudaWriter(kernel, layout, steps(kernel), buffers_of(kernel, shared_bytes), values, len(parts) + 1)
    head = writer.head(bias=bias, residual=residual, activation=activation)
    bodies = ["\n".join(map(writer.function, part)) for part in parts]
    main = writer.kernel()
    bodies = [f"{bodies[0]}\n{main}"] if len(bodies) == 1 else [*bodies, main]
    held = [step for group in writer.steps for step in group] if values is None else []
    packed = [[*range(step.first, step.after), *[-1] * (step.floats - step.after + step.first)] for step in held]
    return GeneratedCuda(
        f"{head}\n", tuple(bodies), "convolve", writer.tiles * len(kernel.groups), writer.threads, writer.shared_bytes,
        4 * FOUR if writer.fours else 1, tuple(place for step in packed for place in step),
    )  # fmt: skip


def _parts(kernel: MaskKernel) -> list[list[int]]:
    """The groups of each unit."""
    parts: list[list[int]] = []
    fmas = 0
    for at, group in enumerate(kernel.groups):
        more = group.uses * kernel.vectors
        if not parts or fmas + more > UNIT_FMAS:
            parts.append([])
            fmas = 0
        parts[-1].append(at)
        fmas += more
    return parts
