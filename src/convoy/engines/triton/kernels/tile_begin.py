"""How a kernel begins: the wait of a dependent launch, and where its tile lies."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def follow(WAIT: tl.constexpr, TRIGGER: tl.constexpr):
    """Programmatic dependent launch: wait for the previous kernel's writes, and let the next kernel be launched."""
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


@triton.jit
def pixel_tile(pixels, h, width, c, pad_h, pad_w, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """A tile of pixels by channels of NHWC images: which pixels and channels it has, and which of its elements there are.

    Of each pixel also the image, the place in it (row · width + column), and row and column in the padded image.
    """
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    pixel = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    image = pixel // (h * width)
    place = pixel % (h * width)
    row = place // width + pad_h
    column = place % width + pad_w
    here = (pixel < pixels)[:, None] & (channel < c)[None, :]
    return pixel, channel, image, place, row, column, here
