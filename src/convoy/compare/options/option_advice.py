"""Advice of an options search: whether an option gains enough to be kept, and one line of summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from convoy.compare.options.torch_options import OPTIONS, arithmetic_of
from convoy.compare.runs.rows import Figure, Row

LEAST_GAIN: Final = 1.03
"""An option is kept where it gains this and more than the spread; less is within what two runs of one program differ by."""


def gains(before: Figure, after: Figure) -> bool:
    """Whether the second is faster by more than the larger spread and by `LEAST_GAIN`."""
    return after.p50 + max(before.spread, after.spread) < before.p50 and before.p50 / after.p50 >= LEAST_GAIN


@dataclass(frozen=True, slots=True)
class Headline:
    """The result of a search in one line; its factor is that of the two latencies, which were measured in the same rounds.

    Attributes:
        defaults_ms: latency of PyTorch's defaults.
        best_ms: latency of the best setting.
        dtype: the type that the best setting computes in.
    """

    defaults_ms: float
    best_ms: float
    dtype: str

    @staticmethod
    def of(defaults: Row, best: Row) -> Headline | None:
        """The headline of two rows of a run; None if one has no latency."""
        before, after = defaults.figure("latency_ms"), best.figure("latency_ms")
        if before is None or after is None or not after.p50:
            return None
        return Headline(before.p50, after.p50, arithmetic_of(best.detail.get("options", ()), best.dtype))

    @property
    def gain(self) -> float:
        """Of the best setting over the defaults."""
        return self.defaults_ms / self.best_ms

    @property
    def factor(self) -> str:
        """The gain as text."""
        return f"{self.gain:.2f}x"

    @property
    def words(self) -> str:
        """What the factor is made of, and the type."""
        return f"from options alone, in {self.dtype} ({self.defaults_ms:.3f} to {self.best_ms:.3f} ms)"


def advice(headline: Headline, kept: Sequence[str], tried: Mapping[str, float], error: float | None = None) -> str:
    """One line: what the options came to, which were worth nothing there, and which could stand in the place of others.

    Args:
        headline: the latencies of the defaults and of the best setting.
        kept: its options, the one of most worth first.
        tried: what each option that could be timed gave, alone or, where it was kept, in the best setting.
        error: relative L2 error of the best setting, which is said where an option of it computes in fewer bits.
    """
    if not kept or headline.gain < LEAST_GAIN:
        words = "PyTorch's defaults are the best setting here: no option helps by more than the noise"
        return words + (f"; no more from {', '.join(tried)}" if tried else "")
    rest = [name for name in tried if name not in kept]
    rivals = [name for name in rest if tried[name] >= LEAST_GAIN and _stands_for(name, kept)]
    rest = [name for name in rest if name not in rivals]
    words = f"{headline.factor} {headline.words}: {', '.join(kept)}"
    if error is not None and any(OPTIONS[name].rougher for name in kept):
        words += f" (error {error:.1e})"
    words += f"; no more from {', '.join(rest)}" if rest else ""
    alone = ", ".join(f"{name} ({tried[name]:.1f}x alone)" for name in rivals)
    return words + (f"; alternatives to what was kept: {alone}" if rivals else "")


def _stands_for(name: str, kept: Sequence[str]) -> bool:
    """Whether an option is an alternative to a kept one, and not an addition to it."""
    group = OPTIONS[name].group
    return bool(group) and any(OPTIONS[other].group == group for other in kept)
