"""Weights of a block in the order in which `inverted_residual.cu` and `expand_depthwise.cu` copy them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from convoy.engines.hopper.chains.inverted_residual_block import InvertedResidual
from convoy.engines.hopper.chains.inverted_residual_tile_config import InvertedTile, row_bytes, tap_words


def pack_slices(
    weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], block: InvertedResidual, tile: InvertedTile
) -> torch.Tensor:
    """Pack the weights and biases that a block of threads copies for each slice of the channels inside.

    Without a last layer, each 16 channels lie in the order that `expand_depthwise.cu` describes.

    Args:
        weights: [mid, c, 1, 1], [mid, 1, taps, taps] and [k, mid, 1, 1]; the last one only where the block has it.
        biases: of the first and the second convolution, [mid]; None where one has none.
        block: the block.
        tile: the configuration.

    Returns:
        Bytes [parts, slices, stage_bytes]: rows of the first weight, rows of a part of the last one, taps of pairs of channels,
        and both biases in fp32.
    """
    parts, slices, size = tile.parts(block), tile.slices(block), tile.slice_k
    more = slices * size - block.mid
    first, taps, *last = (weight.detach() for weight in weights)
    rows = _padded(_places(pad(first.flatten(1), (0, 0, 0, more)), block), row_bytes(block.c) // 2).reshape(slices, -1)
    ends = [_last_rows(weight, block, tile) for weight in last]
    pairs = _places(pad(taps.flatten(1), (0, tap_words(block) - block.taps * block.taps, 0, more)), block)
    pairs = pairs.reshape(slices, size // 2, 2, -1).transpose(2, 3).reshape(slices, -1)
    added = [torch.zeros(block.mid, device=first.device) if bias is None else bias.detach().float() for bias in biases]
    both = torch.cat([_places(pad(bias, (0, more)), block).reshape(slices, size) for bias in added], 1).contiguous()
    middle = [_bytes(each).expand(parts, -1, -1) for each in (rows, pairs, both)]
    packed = torch.cat([middle[0], *ends, *middle[1:]], 2).contiguous()
    assert packed.shape == (parts, slices, tile.stage_bytes(block))
    return packed


def _last_rows(last: torch.Tensor, block: InvertedResidual, tile: InvertedTile) -> torch.Tensor:
    """Bytes [parts, slices, .]: rows of the last weight."""
    parts, slices, size = tile.parts(block), tile.slices(block), tile.slice_k
    filters = pad(last.flatten(1), (0, slices * size - block.mid, 0, parts * tile.block_n - block.k))
    filters = filters.reshape(parts, tile.block_n, slices, size).transpose(1, 2)
    return _bytes(_padded(filters, row_bytes(size) // 2).reshape(parts, slices, -1))


def _places(channels: torch.Tensor, block: InvertedResidual) -> torch.Tensor:
    """Channels, along the first dimension, as they lie in the window: in their order if a last layer reads them."""
    if block.projects:
        return channels
    return channels.reshape(-1, 4, 2, 2, *channels.shape[1:]).transpose(1, 2).reshape(channels.shape)


def pack_last_bias(bias: torch.Tensor | None, block: InvertedResidual, like: torch.Tensor) -> torch.Tensor:
    """The last convolution's bias in fp32, zeros where it has none."""
    if bias is None:
        return torch.zeros(block.k, dtype=torch.float32, device=like.device)
    return bias.detach().float().contiguous()


def _padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    return pad(rows, (0, length - rows.shape[-1]))


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)
