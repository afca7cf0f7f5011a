"""The transforms of Winograd's minimal filtering F(m x m, 3x3), as sums of whole slices.

Y = A^T [ (G g G^T) * (B^T d B) ] A for every tile d of (m + 2) x (m + 2) pixels (Winograd 1980; Lavin and Gray,
arXiv 1509.09308). Each function applies one matrix along one side of all tiles at once: it adds tensors, not numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

Slices = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class WinogradTile:
    """The transforms of one F(m x m, 3x3).

    Attributes:
        m: outputs of a tile, along each side.
        weight: G, (m + 2) x 3.
        read: B^T: reads m + 2 slices and writes m + 2, with scratch slices.
        write: A^T: reads m + 2 slices and writes m, with scratch slices.
        read_rooms: scratch slices that `read` needs.
        write_rooms: scratch slices that `write` needs.
        accesses: times that an element is read or written, by the transforms along one side and the products.
        calls: torch operations of the transforms along both sides.
    """

    m: int
    weight: tuple[tuple[float, ...], ...]
    read: Callable[[Slices, Slices, Slices], None]
    write: Callable[[Slices, Slices, Slices], None]
    read_rooms: int
    write_rooms: int
    accesses: int
    calls: int

    @property
    def side(self) -> int:
        """Pixels of an input tile, along each side."""
        return self.m + 2


def _read_2(d: Slices, out: Slices, room: Slices) -> None:
    del room
    torch.sub(d[0], d[2], out=out[0])
    torch.add(d[1], d[2], out=out[1])
    torch.sub(d[2], d[1], out=out[2])
    torch.sub(d[1], d[3], out=out[3])


def _write_2(t: Slices, out: Slices, room: Slices) -> None:
    torch.add(t[1], t[2], out=room[0])
    torch.add(room[0], t[0], out=out[0])
    torch.sub(t[1], t[2], out=room[0])
    torch.sub(room[0], t[3], out=out[1])


def _read_4(d: Slices, out: Slices, room: Slices) -> None:
    even, odd = room[0], room[1]
    torch.sub(d[4], d[2], alpha=5, out=even)
    torch.add(even, d[0], alpha=4, out=out[0])
    torch.sub(d[4], d[2], alpha=4, out=even)
    torch.sub(d[3], d[1], alpha=4, out=odd)
    torch.add(even, odd, out=out[1])
    torch.sub(even, odd, out=out[2])
    torch.sub(d[4], d[2], out=even)
    torch.sub(d[3], d[1], out=odd)
    torch.add(even, odd, alpha=2, out=out[3])
    torch.sub(even, odd, alpha=2, out=out[4])
    torch.sub(d[5], d[3], alpha=5, out=odd)
    torch.add(odd, d[1], alpha=4, out=out[5])


def _write_4(t: Slices, out: Slices, room: Slices) -> None:
    sum_1, difference_1, sum_2, difference_2 = room[:4]
    torch.add(t[1], t[2], out=sum_1)
    torch.sub(t[1], t[2], out=difference_1)
    torch.add(t[3], t[4], out=sum_2)
    torch.sub(t[3], t[4], out=difference_2)
    torch.add(difference_1, difference_2, alpha=2, out=out[1])
    torch.add(sum_1, sum_2, alpha=4, out=out[2])
    torch.add(difference_1, difference_2, alpha=8, out=difference_1)
    torch.add(difference_1, t[5], out=out[3])
    torch.add(sum_1, sum_2, out=sum_1)
    torch.add(sum_1, t[0], out=out[0])


F2: Final = WinogradTile(2, ((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1)), _read_2, _write_2, 0, 1, 5, 16)
F4: Final = WinogradTile(
    4,
    (
        (1 / 4, 0, 0),
        (-1 / 6, -1 / 6, -1 / 6),
        (-1 / 6, 1 / 6, -1 / 6),
        (1 / 24, 1 / 12, 1 / 6),
        (1 / 24, -1 / 12, 1 / 6),
        (0, 0, 1),
    ),
    _read_4,
    _write_4,
    2,
    4,
    8,
    44,
)
