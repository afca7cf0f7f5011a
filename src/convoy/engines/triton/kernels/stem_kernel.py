"""The first layer's input made fit for TMA: few channels padded to a vector, and the border's zeros written out."""

from __future__ import annotations

import triton
import triton.language as tl

from convoy.engines.triton.kernels.tile_begin import follow


@triton.jit
def pad_image(
    x, padded, h, width, rows, row_elements, pad_h, pad_w,
    C: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """padded[image, rows, row_elements / VECTOR, VECTOR] = x[image, h, width, C] amid zeros; one program a row and block."""
    follow(WAIT, WAIT)
    line = tl.program_id(0)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = line % rows - pad_h
    column = index // VECTOR - pad_w
    channel = index % VECTOR
    inside = (row >= 0) & (row < h) & (column >= 0) & (column < width) & (channel < C)
    value = tl.load(x + ((line // rows * h + row) * width + column) * C + channel, mask=inside, other=0.0)
    tl.store(padded + line.to(tl.int64) * row_elements + index, value, mask=index < row_elements)
