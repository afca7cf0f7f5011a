"""Patterns of pruned weights: single weights, N of every M input channels, blocks, whole filters."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import torch

from convoy.errors import InputError

KINDS: Final = ("unstructured", "nm", "block", "channel")

_NM = re.compile(r"(\d{1,3}):(\d{1,3})", re.ASCII)
_BLOCK = re.compile(r"block:(\d{1,4})x(\d{1,4})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern of zeros.

    Attributes:
        kind: `unstructured` (any weight), `nm` (`first` of every `second` consecutive input channels are kept, for each filter
            and tap), `block` (blocks of `first` filters by `second` columns of the matrix [k, c * r * s]) or `channel` (filters).
        first: N, or the rows of a block.
        second: M, or the columns of a block.
    """

    kind: str
    first: int = 1
    second: int = 1

    @property
    def fixed_sparsity(self) -> float | None:
        """The sparsity that the pattern implies; None if it implies none."""
        return 1 - self.first / self.second if self.kind == "nm" else None

    def __str__(self) -> str:
        if self.kind == "nm":
            return f"{self.first}:{self.second}"
        return f"block:{self.first}x{self.second}" if self.kind == "block" else self.kind


def parse_pattern(text: str) -> Pattern:
    """Read `unstructured`, `channel`, `2:4` or `block:1x8`; raises InputError for anything else."""
    if text in ("unstructured", "channel"):
        return Pattern(text)
    if (found := _NM.fullmatch(text)) and 0 < int(found[1]) < int(found[2]):
        return Pattern("nm", int(found[1]), int(found[2]))
    if (found := _BLOCK.fullmatch(text)) and int(found[1]) and int(found[2]):
        return Pattern("block", int(found[1]), int(found[2]))
    expected = "unstructured, channel, N:M with 0 < N < M (2:4), or block:RxC (block:1x8)"
    raise InputError("pattern", text, expected)


def parse_sparsity(pattern: Pattern, sparsity: float | None) -> float:
    """The sparsity to reach; raises InputError if it is missing, not between 0 and 1, or unequal to what the pattern implies."""
    fixed = pattern.fixed_sparsity
    if fixed is not None:
        if sparsity is not None and abs(sparsity - fixed) > 1e-6:
            todo = "Leave it out: the pattern implies it."
            raise InputError("sparsity", sparsity, f"{fixed:g} with pattern {pattern}", todo)
        return fixed
    if sparsity is None or not 0 < sparsity < 1:
        raise InputError("sparsity", sparsity, "a share of zeros between 0 and 1, such as 0.9")
    return sparsity


def as_filters(weight: torch.Tensor) -> torch.Tensor:
    """A layer's weight as [k, c / groups, r, s]; a linear layer's matrix [k, c] becomes [k, c, 1, 1]."""
    return weight if weight.dim() == 4 else weight[:, :, None, None]


def misfit(pattern: Pattern, weight: torch.Tensor) -> str:
    """Why a pattern cannot be applied to a weight [k, c / groups, r, s]; empty if it can."""
    channels = weight.shape[1]
    if pattern.kind == "nm" and channels % pattern.second:
        return f"its {channels} input channels a group are no multiple of {pattern.second}"
    return ""


def group_ids(pattern: Pattern, weight: torch.Tensor, groups: int) -> torch.Tensor:
    """The group that each weight belongs to. All weights of a group become zero, or none.

    Blocks do not cross the convolution's groups, whose filters share no input. At the right and lower edges they may be
    smaller.

    Args:
        pattern: any except `nm`, which ranks each weight among its M neighbours only.
        weight: [k, c / groups, r, s].
        groups: of the convolution.

    Returns:
        int64, of weight's shape; ids are 0, 1, 2, ... without gaps.
    """
    k, columns = weight.shape[0], weight[0].numel()
    if pattern.kind == "unstructured":
        return torch.arange(weight.numel(), device=weight.device).view(weight.shape)
    filters = torch.arange(k, device=weight.device)
    if pattern.kind == "channel":
        return filters.view(-1, 1, 1, 1).expand(weight.shape)
    each = k // groups
    bands = -(-each // pattern.first)
    row = filters // each * bands + filters % each // pattern.first
    column = torch.arange(columns, device=weight.device) // pattern.second
    return (row[:, None] * -(-columns // pattern.second) + column[None, :]).view(weight.shape)


def group_scores(weight: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Root mean square (float64) and size (int64) of each group.

    It is a mean, so that smaller blocks at the edges, and layers of different sizes, are compared fairly.
    """
    flat = ids.reshape(-1)
    sizes = torch.bincount(flat)
    squares = torch.zeros(len(sizes), dtype=torch.float64, device=weight.device)
    squares.index_add_(0, flat, weight.detach().reshape(-1).double().square())
    return (squares / sizes).sqrt(), sizes


def nm_mask(pattern: Pattern, weight: torch.Tensor) -> torch.Tensor:
    """True at the N largest of every M consecutive input channels of a filter's tap; of equals, the first is kept.

    Args:
        pattern: of kind `nm`.
        weight: [k, c / groups, r, s], c / groups a multiple of M.
    """
    windows = weight.detach().abs().permute(0, 2, 3, 1).reshape(-1, pattern.second)
    best = windows.argsort(dim=1, descending=True, stable=True)[:, : pattern.first]
    kept = torch.zeros_like(windows, dtype=torch.bool).scatter_(1, best, True)
    k, c, r, s = weight.shape
    return kept.view(k, r, s, c).permute(0, 3, 1, 2).contiguous()
