"""Advice of an options search: whether an option gains enough to be kept, and one line of summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from convoy.compare.options.torch_options import OPTIONS
from convoy.compare.runs.rows import Figure

LEAST_GAIN: Final = 1.03
"""An option is kept where it gains this and more than the spread; less is within what two runs of one program differ by."""


def gains(before: Figure, after: Figure) -> bool:
    """Whether the second is faster by more than the larger spread and by `LEAST_GAIN`."""
    return after.p50 + max(before.spread, after.spread) < before.p50 and before.p50 / after.p50 >= LEAST_GAIN


def advice(gain: float, kept: Sequence[str], tried: Mapping[str, float], error: float | None = None) -> str:
    """One line: what the options came to, which were worth nothing there, and which could stand in the place of others.

    Args:
        gain: of the best setting over the defaults.
        kept: its options, the one of most worth first.
        tried: what each option that could be timed gave, alone or, where it was kept, in the best setting.
        error: relative L2 error of the best setting, which is said where an option of it computes in fewer bits.
    """
    if not kept or gain < LEAST_GAIN:
        words = "PyTorch's defaults are the best setting here: no option helps by more than the noise"
        return words + (f"; no more from {', '.join(tried)}" if tried else "")
    rest = [name for name in tried if name not in kept]
    rivals = [name for name in rest if tried[name] >= LEAST_GAIN and _stands_for(name, kept)]
    rest = [name for name in rest if name not in rivals]
    words = f"{gain:.1f}x from options alone: {', '.join(kept)}"
    if error is not None and any(OPTIONS[name].rougher for name in kept):
        words += f" (error {error:.1e})"
    words += f"; no more from {', '.join(rest)}" if rest else ""
    alone = ", ".join(f"{name} ({tried[name]:.1f}x alone)" for name in rivals)
    return words + (f"; alternatives to what was kept: {alone}" if rivals else "")


def _stands_for(name: str, kept: Sequence[str]) -> bool:
    """Whether an option is an alternative to a kept one, and not an addition to it."""
    group = OPTIONS[name].group
    return bool(group) and any(OPTIONS[other].group == group for other in kept)
