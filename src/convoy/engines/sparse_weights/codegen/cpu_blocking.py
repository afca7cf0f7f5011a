"""How a CPU's work is cut: blocks of pixels for its second cache, filters for its registers. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from convoy.engines.sparse_weights.codegen.emit_c import sums_pitch
from convoy.engines.sparse_weights.codegen.kernel_ir import MaskKernel, verify
from convoy.engines.sparse_weights.codegen.lower_mask import Cut, partition, used_channels, used_taps, walk
from convoy.engines.sparse_weights.codegen.plane_layout import PlaneLayout, lay_out
from convoy.problem import ConvProblem, Knobs

LANES: Final = {"avx512": 16, "avx2": 8, "neon": 4, "generic": 4}
"""Floats of a vector register, by `Target.arch`."""

REGISTERS: Final = {"avx512": 32, "avx2": 16, "neon": 32, "generic": 16}
"""Vector registers."""

BLOCK_BYTES: Final = 512 << 10
"""Padded input of a block: half a second cache of 1 MB. Blocks of 256 KB pad more rows twice (10 % at 64 channels of 224x224,
on an EPYC of 2022); larger ones bring nothing."""

LEAST_POSITIONS: Final = 160
"""Least pixels of a block: for fewer, threads share the block's filters instead of getting smaller blocks."""

CODE_BYTES: Final = 24 << 10
"""Of a first instruction cache of 32 KB."""


@dataclass(frozen=True, slots=True)
class CpuBlocking:
    """The blocking of a problem, known before any code is written.

    Attributes:
        layout: the layout of the padded input.
        cut: how the code is partitioned.
        lanes: floats of a vector.
        filters: filters of the largest group.
    """

    layout: PlaneLayout
    cut: Cut
    lanes: int
    filters: int

    @property
    def thread_bytes(self) -> int:
        """Scratch of each thread: the padded input of a block, and the sums of a group."""
        floats = (
            self.layout.plane * self.layout.planes
            + sums_pitch(self.filters, self.layout.tile, self.layout.positions) * self.filters
        )
        return -(-4 * floats // 256) * 256


def plan(problem: ConvProblem, mask: NDArray[np.bool_], knobs: Knobs) -> CpuBlocking:
    """Layout and partition for a CPU.

    Args:
        problem: a forward convolution.
        mask: booleans [k, c / groups, r, s].
        knobs: `filters` whose sums are in registers, `vectors` of `lanes` pixels, `channels` of a segment, `threads` that share
            the work.
    """
    lanes = knobs.integer("lanes")
    cut = Cut(knobs.integer("filters"), knobs.integer("channels"), CODE_BYTES)
    channels = used_channels(mask, problem.groups)
    taps = used_taps(mask)
    tile = lanes * knobs.integer("vectors")
    whole = lay_out(problem, taps, channels, tile=tile, images=1, rows=problem.p)
    images, rows = _block(whole, knobs.integer("threads"))
    layout = lay_out(problem, taps, channels, tile=tile, images=images, rows=rows)
    largest = max(map(len, partition(mask, cut.filters)), default=0)
    return CpuBlocking(layout, cut, lanes, largest)


def _block(whole: PlaneLayout, threads: int) -> tuple[int, int]:
    """Images and rows of a block: as large as the cache allows, as many as there are threads where that costs little."""
    problem = whole.problem
    row_bytes = max(4 * whole.planes * whole.pitch, 1)
    image_bytes = row_bytes * (problem.p + whole.reach_h)
    if image_bytes > BLOCK_BYTES:
        fit = max(1, BLOCK_BYTES // row_bytes - whole.reach_h)
        blocks = -(-problem.p // fit)
        return 1, -(-problem.p // blocks)
    if problem.n > 1:
        return max(1, min(BLOCK_BYTES // image_bytes, -(-problem.n // threads))), problem.p
    blocks = max(1, min(threads, problem.p * whole.pitch // LEAST_POSITIONS))
    return 1, -(-problem.p // blocks)


def write(problem: ConvProblem, mask: NDArray[np.bool_], made: CpuBlocking) -> tuple[MaskKernel, NDArray[np.int64]]:
    """The verified kernel of a plan, and the place in the weight of each of its values."""
    kernel, places = walk(mask, made.layout, made.lanes, made.cut)
    verify(kernel, problem.k)
    return kernel, places
