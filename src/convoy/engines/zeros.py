"""What an engine that skips zeros is measured on: the share of zeros in its input, as a knob of its configs.

The time of such an engine depends on its input, so a time without a share of zeros says nothing. The tuner adds the knob
`zeros` (percent, one of `SHARES`) to the engine's own and times the config on data of that share; the database and plans then
say for which share a time and a choice hold, and nothing about other engines changes. Builds do not read it.
"""

from __future__ import annotations

from typing import Final

from convoy.problem import Knobs

KNOB: Final = "zeros"

SHARES: Final = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99)
"""Percent. A share between two is taken for the lower one: a choice then holds for inputs with more zeros too."""

CURVE: Final = (0, 50, 75, 90)
"""Percent: where a report's curve of time over zeros has points beside the layers' own."""


def quantise(share: float) -> int:
    """The largest of `SHARES` that is not above a share of zeros in 0..1."""
    return max(level for level in SHARES if level <= 100 * share + 1e-9)


def expecting(knobs: Knobs, zeros: int) -> Knobs:
    """The same knobs, for an input of which so many percent are zeros."""
    return Knobs.of(**{**knobs, KNOB: zeros})


def expected(knobs: Knobs) -> int | None:
    """The percentage of zeros that a config is for; None where it makes no difference."""
    return knobs.integer(KNOB) if KNOB in knobs else None
