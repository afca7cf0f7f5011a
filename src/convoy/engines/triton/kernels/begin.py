"""How a kernel begins: the wait of a dependent launch, and where its tile lies."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def follow(WAIT: tl.constexpr, TRIGGER: tl.constexpr):
    """Programmatic dependent launch: wait for what the kernel before writes, and let the next one be launched."""
    if WAIT:
        tl.extra.cuda.gdc_wait()
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def box_origin(
    box, tiles_h, tiles_w, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr
):  # fmt: skip
    """The first image, row and column of a box of pixels; boxes go along the columns first, then the rows, then the images."""
    q0 = (box % tiles_w) * BLOCK_W
    line = box // tiles_w
    p0 = (line % tiles_h) * BLOCK_H
    n0 = (line // tiles_h) * BLOCK_N
    return n0, p0, q0
