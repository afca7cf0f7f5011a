"""Marks of values: the kernel that makes a value also writes what a reader that skips zeros would have to look for.

A reader that accepts them (`Executable.accept_marks`) is given one more argument, the maker one more result: a value like any
other, with a slot of its own. So memory, streams and graphs treat it as they treat all values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from convoy.problem import TensorSpec

if TYPE_CHECKING:
    from convoy.program.bind import BoundStep


def with_zero_marks(steps: Sequence[BoundStep], slot_names: list[str]) -> int:
    """Let makers mark the first argument of readers that make use of it, both in NHWC.

    Args:
        steps: in order; their slots are added to.
        slot_names: what each slot holds; added to.

    Returns:
        The number of readers that are given marks.
    """
    makers = {bound.results[0]: bound for bound in steps if len(bound.results) == 1}
    marked: dict[int, tuple[int, TensorSpec]] = {}
    linked = 0
    for bound in steps:
        slot = bound.args[0] if bound.args else -1
        maker = makers.get(slot)
        if maker is None or maker.places or {maker.step.layout, bound.step.layout} != {"nhwc"}:
            continue
        spec = marked[slot][1] if slot in marked else maker.executable.marks_written()
        if spec is None or not bound.executable.accept_marks(spec):
            continue
        if slot not in marked:
            marked[slot] = len(slot_names), spec
            slot_names.append(f"{slot_names[slot]}.marks")
            maker.results = (*maker.results, marked[slot][0])
            maker.specs = (*maker.specs, spec)
        bound.args = (*bound.args, marked[slot][0])
        linked += 1
    return linked
