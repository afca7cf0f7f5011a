"""How a convolution in bf16 is cut into work for threads (direct_bf16.c), and its weights into tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from convoy.problem import ConvProblem

PANEL = 32
"""Rows of a panel, as in direct_bf16.c."""

STEP = 32
"""Values of the reduction in a step."""

TILE = 16
"""Output channels of a tile."""

PANELS = ("gathered", "in_place", "padded")
"""Where a panel's rows lie, numbered as in direct_bf16.c: gathered for each pixel, in the input itself, or in a copy of the image
with its padding."""

SUMS_BYTES = PANEL * 64 * 4
"""A block's sums, at the head of a thread's slot."""

BAND_BYTES = 1 << 20
"""Panels of a band: half the second cache of a Xeon with AMX. More panels read the weights less often."""

UNITS_A_THREAD = 2
"""With fewer bands than this for each thread, threads share the tiles instead, so that each weight is read once."""


@dataclass(frozen=True, slots=True)
class Bf16Partition:
    """How a problem is cut.

    Attributes:
        bands: of the panels of an image; with padded panels of its rows of pixels.
        splits: groups of tiles of output channels, done apart.
        slot_bytes: workspace of a thread: sums, and a band's left operand.
        panel_step: values from row to row of a panel; a step more than they hold, so that rows fall into different sets.
    """

    bands: int
    splits: int
    slot_bytes: int
    panel_step: int

    @staticmethod
    def of(problem: ConvProblem, threads: int, channels: int, panels: str) -> Bf16Partition:
        """Bands where there are enough of them for all threads; else threads share the blocks of output channels.

        Args:
            problem: the convolution.
            threads: those that share it.
            channels: output channels of a block, 32 or 64.
            panels: of `PANELS`.
        """
        padded, own = panels == "padded", problem.c // problem.groups
        step = (own if padded else -(-problem.r * problem.s * own // STEP) * STEP) + STEP
        items, item_bytes, shared = -(-problem.p * problem.q // PANEL), PANEL * step * 2, 0
        if padded:
            items, item_bytes = problem.p, (problem.w + 2 * problem.pad_w) * step * 2
            shared = (problem.r - 1) * problem.dilation_h
        blocks, images = -(-problem.k // problem.groups // channels), max(1, problem.n) * problem.groups
        bands, splits = -(-items // max(1, BAND_BYTES // item_bytes - shared)), 1
        if images == 1 and bands > 1:
            bands = min(items, -(-bands // threads) * threads)
        if images * bands < UNITS_A_THREAD * threads and threads > 1:
            if problem.p * problem.q >= 2 * UNITS_A_THREAD * threads * PANEL:
                bands = min(items, UNITS_A_THREAD * threads)
            else:
                splits = min(blocks, threads)
                bands = min(items, max(bands, -(-threads // (images * splits))))
        held = (-(-items // bands) + shared) * item_bytes + (PANEL * step * 2 if padded else 0)
        return Bf16Partition(bands, splits, SUMS_BYTES + (item_bytes if panels == "in_place" else held), step)


def in_one_image(problem: ConvProblem) -> ConvProblem:
    """A 1x1 convolution at stride 1, whose images are then one row of pixels; any other problem as it is."""
    plain = problem.r * problem.s * problem.stride_h * problem.stride_w == 1 and problem.pad_h == problem.pad_w == 0
    if not plain or not problem.n:
        return problem
    return replace(problem, n=1, h=1, w=problem.n * problem.h * problem.w, dilation_h=1, dilation_w=1)


def panels_of(problem: ConvProblem) -> tuple[str, ...]:
    """The kinds of `PANELS` that a problem can have, the default first: each but gathered ones needs channels in whole steps."""
    one = in_one_image(problem)
    whole = problem.c // problem.groups % STEP == 0 and problem.stride_h == problem.stride_w == 1
    plain = one.h == 1 and one.r * one.s == 1 and not one.pad_h and not one.pad_w
    if whole and plain and problem.x_dtype == "bf16":
        return "in_place", "gathered"
    return ("padded", "gathered") if whole and problem.r * problem.s > 1 else ("gathered",)


def in_bf16_tiles(problem: ConvProblem, constants: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight in bf16 as [groups, tiles, steps, 16, 16, 2], padded with zeros, and the bias in fp32 as [groups, tiles * 16].

    Args:
        problem: the convolution.
        constants: the weight [k, c / groups, r, s] (of a linear layer [k, c]), and the bias [k] where it has one.
    """
    groups, outputs = problem.groups, problem.k // problem.groups
    length = problem.r * problem.s * problem.c // groups
    tiles, steps = -(-outputs // TILE), -(-length // STEP)
    weight = constants[0].detach().view(problem.k, -1, problem.r, problem.s).to(torch.bfloat16)
    padded = weight.new_zeros(groups, tiles * TILE, steps * STEP)
    padded[:, :outputs, :length] = weight.permute(0, 2, 3, 1).reshape(groups, outputs, length)
    bias = torch.zeros(groups, tiles * TILE)
    if problem.epilogue.bias:
        bias[:, :outputs] = constants[1].detach().view(groups, outputs).float()
    pairs = padded.view(groups, tiles, TILE, steps, STEP // 2, 2)
    return pairs.permute(0, 1, 3, 4, 2, 5).contiguous(), bias
