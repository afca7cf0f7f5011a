"""Data of a convolution with a given share of zeros in its input."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from convoy.engines.activation_sparsity import BLOCK, TILE
from convoy.measurement.data import Data, dense


def with_zeros(data: Data, percent: float, seed: int, kind: str = "zeros") -> Data:
    """The same data with a percentage of zeros in the first arg, in random places, and no other zeros in it.

    Args:
        data: a convolution's data.
        percent: 0 to 100.
        seed: the same seed gives the same places on the same kind of device.
        kind: which parts of each image are zero or not as a whole: single values (`zeros`), channels, tiles or blocks
            (`convoy.engines.activation_sparsity.SparsityShares`).
    """
    x = dense(data.args[0])
    generator = torch.Generator(x.device).manual_seed(seed)
    kept = _kept_places(x.shape, percent, generator, kind)
    # Values that are zero already (rectified) become nonzero; integers stay integers, whose sums are exact.
    usual = torch.rand(x.shape, generator=generator, device=x.device).to(x.dtype) + 0.5
    filled = torch.where(x == 0, usual.ceil() if torch.equal(x, x.round()) else usual, x)
    return Data((torch.where(kept, filled, 0.0).contiguous(memory_format=_format(x)), *data.args[1:]), data.constants)


def _kept_places(shape: torch.Size, percent: float, generator: torch.Generator, kind: str) -> torch.Tensor:
    """Booleans of a shape, False for values that become zero."""

    def drawn(shape: Sequence[int]) -> torch.Tensor:
        return torch.rand(tuple(shape), generator=generator, device=generator.device)

    if kind == "zeros":
        return drawn(shape) >= percent / 100
    n, c, h, w = shape
    if (
        kind == "dead_channels"
    ):  # exactly this many channels of every image: random choices would be off for few channels
        order = drawn((n, c)).argsort(1).argsort(1)
        return (order >= round(c * percent / 100))[:, :, None, None].expand(shape)
    channels = BLOCK if kind == "dead_blocks" else 1
    sides = (channels, TILE, TILE)
    kept = drawn((n, *(-(-size // side) for size, side in zip((c, h, w), sides, strict=True)))) >= percent / 100
    for dim, side in enumerate(sides, 1):
        kept = kept.repeat_interleave(side, dim)
    return kept[:, :c, :h, :w]


def _format(tensor: torch.Tensor) -> torch.memory_format:
    channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if channels_last else torch.contiguous_format
