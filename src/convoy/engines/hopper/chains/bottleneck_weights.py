"""Weights of a residual block in the order in which `bottleneck.cu` copies them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from convoy.engines.hopper.chains.bottleneck_tile_config import CHANNELS

_VECTORS: Final = 8
"""Vectors of 16 bytes in a row of a block."""


def _swizzled(blocks: torch.Tensor) -> torch.Tensor:
    """Rows of 64 half values [..., rows, 64] in the 128-byte swizzle: vector p of row r lies at p xor (r mod 8)."""
    vectors = blocks.reshape(*blocks.shape[:-1], _VECTORS, CHANNELS // _VECTORS)
    row = torch.arange(blocks.shape[-2], device=blocks.device)[:, None]
    place = torch.arange(_VECTORS, device=blocks.device)[None, :] ^ (row % 8)
    return vectors.gather(-2, place[..., None].expand_as(vectors)).reshape(blocks.shape)


def _in_blocks(rows: torch.Tensor) -> torch.Tensor:
    """A matrix [rows, c] as [blocks of 64 channels, rows, 64], each block in the swizzle."""
    return _swizzled(rows.reshape(rows.shape[0], -1, CHANNELS).transpose(0, 1))


def pack_weights(first: torch.Tensor, second: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """All chunks of weights, one after the other.

    A chunk is a block of channels of the first convolution, a tap and a block of channels of the second, or a block of filters of
    the last.

    Args:
        first: [mid, c, 1, 1].
        second: [mid, mid, 3, 3].
        last: [k, mid, 1, 1].

    Returns:
        A flat tensor; a chunk has mid · 64 values.
    """
    taps = second.permute(2, 3, 0, 1).reshape(9, second.shape[0], second.shape[1])
    by_filters = last.flatten(1).reshape(-1, CHANNELS, last.shape[1])
    parts = [
        _in_blocks(first.flatten(1)),
        *(_in_blocks(tap) for tap in taps),
        *(_in_blocks(part) for part in by_filters),
    ]
    return torch.cat([part.reshape(-1) for part in parts]).contiguous()


def pack_biases(biases: Sequence[torch.Tensor | None], filters: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """The biases in fp32, one after the other; zeros where a convolution has none."""
    return torch.cat(
        [
            torch.zeros(count, dtype=torch.float32, device=like.device) if bias is None else bias.detach().float()
            for bias, count in zip(biases, filters, strict=True)
        ]
    ).contiguous()
