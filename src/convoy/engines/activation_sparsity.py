"""Sparsity of activations as a knob: engines that skip zeros are measured for a share of zeros in their input.

The time of such an engine depends on its input, so a time holds only for one share of zeros. Engines skip different things:
single values, channels that are zero in a whole image, tiles, or blocks. An engine names what it skips (`Engine.zeros_kind`, a
field of `SparsityShares`). The tuner adds a knob of that name to the engine's own knobs (a percentage, one of `BUCKETS`) and
times the config on data with that share. Rows and plans thus record for which share a time and a choice hold; other engines
are not affected. `Engine.build` does not read the knob.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from convoy.problem import Knobs

TILE: Final = 8
"""Pixels along each side of a tile: 64 pixels are the smallest operand that one tensor-core instruction takes."""

BLOCK: Final = 32
"""Channels of a block: the depth of such an instruction in fp32, and half its depth in fp16 and bf16."""


@dataclass(frozen=True, slots=True)
class SparsityShares:
    """Shares of a convolution's input that an engine could skip, each in 0..1.

    Attributes:
        zeros: zero values.
        dead_channels: channels that are zero in a whole image.
        dead_tiles: tiles of 8x8 pixels of one channel that are zero.
        dead_blocks: blocks of 8x8 pixels and 32 channels that are zero.
    """

    zeros: float = 0.0
    dead_channels: float = 0.0
    dead_tiles: float = 0.0
    dead_blocks: float = 0.0


KINDS: Final = tuple(field.name for field in fields(SparsityShares))
"""The kinds of zeros that an engine may skip: fields of `SparsityShares`, and the knobs' names."""

_KINDS: Final = frozenset(KINDS)

BUCKETS: Final = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99)
"""Percentages that times are measured for. A share between two counts as the lower one, so that a choice also holds for inputs
with more zeros."""

CURVE: Final = (0, 50, 75, 90)
"""Percentages at which a report's curve of time over zeros has points, beside the layers' own shares."""

MARGIN: Final = 0.03
"""A config that depends on zeros is offered only if it is faster than the fastest other config by this share of that config's
time: the user's next input may have fewer zeros, and a gain within the noise is not worth that risk."""


@dataclass(frozen=True, slots=True, order=True)
class SparsityBucket:
    """Shares in percent, each rounded down to one of `BUCKETS`."""

    zeros: int = 0
    dead_channels: int = 0
    dead_tiles: int = 0
    dead_blocks: int = 0

    @staticmethod
    def of(shares: SparsityShares) -> SparsityBucket:
        """Round every share down to a bucket."""
        return SparsityBucket(*(bucket_of(getattr(shares, kind)) for kind in KINDS))

    def at(self, kind: str) -> int:
        """The percentage of one kind of zeros."""
        return int(getattr(self, kind))


def bucket_of(share: float) -> int:
    """The largest of `BUCKETS`, in percent, that is not above a share in 0..1."""
    return max(percent for percent in BUCKETS if percent <= 100 * share + 1e-9)


def with_sparsity(knobs: Knobs, percent: int, kind: str = "zeros") -> Knobs:
    """The same knobs for an input in which `percent` of the given kind are zero."""
    return Knobs.of(**{**knobs, kind: percent})


def sparsity_kind(knobs: Knobs) -> str | None:
    """The kind of zeros that a config's time depends on; None if it depends on none."""
    return next((name for name in knobs if name in _KINDS), None)


def sparsity_percent(knobs: Knobs) -> int | None:
    """The percentage of zeros that a config was measured for; None if its time does not depend on zeros."""
    kind = sparsity_kind(knobs)
    return None if kind is None else knobs.integer(kind)


def matches_bucket(knobs: Knobs, bucket: SparsityBucket) -> bool:
    """Whether a config's time holds for inputs of this bucket."""
    kind = sparsity_kind(knobs)
    return kind is None or knobs.integer(kind) == bucket.at(kind)
