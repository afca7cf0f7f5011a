"""What an engine that skips zeros is measured on: a share of its input that is zero, as a knob of its configs.

The time of such an engine depends on its input, so a time without a share of zeros says nothing. What counts differs: one leaves
out single values, another the channels that are zero all over an image, a third tiles or blocks. An engine names what it leaves
out (`Engine.zeros_kind`, a field of `Shares`); the tuner adds a knob of that name to the engine's own (percent, one of `LEVELS`)
and times the config on data with that share; the database and plans then say for which share a time and a choice hold, and
nothing about other engines changes. Builds do not read it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from convoy.problem import Knobs

TILE: Final = 8
"""Pixels along the sides of a tile: 64 of them are the least that a tensor core's instruction takes with all its filters."""

BLOCK: Final = 32
"""Channels of a block: what such an instruction sums over in fp32 or, twice, in half types."""


@dataclass(frozen=True, slots=True)
class Shares:
    """What a convolution's input could spare, each a share in 0..1.

    Attributes:
        zeros: values that are zero.
        dead_channels: channels that are zero in the whole image.
        dead_tiles: of all tiles of 8x8 pixels of one channel, those that are zero.
        dead_blocks: of all blocks of 8x8 pixels and 32 channels, those that are zero.
    """

    zeros: float = 0.0
    dead_channels: float = 0.0
    dead_tiles: float = 0.0
    dead_blocks: float = 0.0


KINDS: Final = tuple(field.name for field in fields(Shares))
"""What an engine may leave out: fields of `Shares`, and knobs."""

_KINDS: Final = frozenset(KINDS)

LEVELS: Final = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99)
"""Percent. A share between two is taken for the lower one: a choice then holds for inputs with more zeros too."""

CURVE: Final = (0, 50, 75, 90)
"""Percent: where a report's curve of time over zeros has points beside the layers' own."""

MARGIN: Final = 0.03
"""By how much of the fastest other time a config that holds for a share of zeros must be faster to be offered: the user's next
input may have fewer, and a difference in the clock's noise is not worth that."""


@dataclass(frozen=True, slots=True, order=True)
class Levels:
    """Shares in percent, each taken down to one of `LEVELS`."""

    zeros: int = 0
    dead_channels: int = 0
    dead_tiles: int = 0
    dead_blocks: int = 0

    @staticmethod
    def of(shares: Shares) -> Levels:
        """Of every share the largest level that is not above it."""
        return Levels(*(quantise(getattr(shares, kind)) for kind in KINDS))

    def at(self, kind: str) -> int:
        """The percentage of one kind."""
        return int(getattr(self, kind))


def quantise(share: float) -> int:
    """The largest of `LEVELS` that is not above a share in 0..1."""
    return max(level for level in LEVELS if level <= 100 * share + 1e-9)


def expecting(knobs: Knobs, percent: int, kind: str = "zeros") -> Knobs:
    """The same knobs, for an input of which so many percent of a kind are zero."""
    return Knobs.of(**{**knobs, kind: percent})


def kind_of(knobs: Knobs) -> str | None:
    """What a config is for a share of; None where zeros make no difference to it."""
    return next((name for name in knobs if name in _KINDS), None)


def expected(knobs: Knobs) -> int | None:
    """The percentage that a config is for, of whatever kind; None where it makes no difference."""
    kind = kind_of(knobs)
    return None if kind is None else knobs.integer(kind)


def holds(knobs: Knobs, levels: Levels) -> bool:
    """Whether a config's time is one for an input of these levels."""
    kind = kind_of(knobs)
    return kind is None or knobs.integer(kind) == levels.at(kind)
