"""The groups of casts in a plan's steps, from which a graph is cut in the same way again."""

from __future__ import annotations

from collections.abc import Sequence

from convoy.plan.plan import Step


def cast_groups(steps: Sequence[Step]) -> list[tuple[str, ...]]:
    """For each step of the pattern `casts`, the names of the values that it makes."""
    return [tuple(name.partition("@")[0] for name in step.results) for step in steps if step.pattern == "casts"]
