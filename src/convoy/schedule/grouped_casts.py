"""What a plan's steps do together, for whoever cuts a graph as it was cut when the plan was made."""

from __future__ import annotations

from collections.abc import Sequence

from convoy.plan.plan import Step


def cast_groups(steps: Sequence[Step]) -> list[tuple[str, ...]]:
    """By step of the pattern `casts`, the names of the values that it makes."""
    return [tuple(name.partition("@")[0] for name in step.results) for step in steps if step.pattern == "casts"]
