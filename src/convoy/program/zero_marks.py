"""Marks of zeros: the kernel that makes a value also writes which parts of it are zero, for a reader that skips zeros.

A reader that accepts marks (`Executable.accept_marks`) gets one more argument, and the maker one more result. The marks are a
value with a slot of its own, so memory, streams and graphs treat them like any other value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from convoy.problem import TensorSpec
from convoy.program.bound_plan import BoundStep


def with_zero_marks(
    steps: Sequence[BoundStep], slot_names: Sequence[str]
) -> tuple[tuple[BoundStep, ...], tuple[str, ...]]:
    """The steps in which makers mark the first argument of readers that use the marks, both in NHWC.

    Args:
        steps: in launch order.
        slot_names: value of each slot.

    Returns:
        The steps, and the slot names with one more for each value that is marked.
    """
    made, names = list(steps), list(slot_names)
    makers = {bound.results[0]: at for at, bound in enumerate(steps) if len(bound.results) == 1}
    marked: dict[int, tuple[int, TensorSpec]] = {}
    for at, bound in enumerate(steps):
        slot = bound.args[0] if bound.args else -1
        if slot not in makers:
            continue
        maker = made[makers[slot]]
        if maker.slices or {maker.step.layout, bound.step.layout} != {"nhwc"}:
            continue
        spec = marked[slot][1] if slot in marked else maker.executable.marks_written()
        if spec is None or not bound.executable.accept_marks(spec):
            continue
        if slot not in marked:
            marked[slot] = len(names), spec
            names.append(f"{names[slot]}.marks")
            made[makers[slot]] = replace(maker, results=(*maker.results, len(names) - 1), specs=(*maker.specs, spec))
        made[at] = replace(made[at], args=(*made[at].args, marked[slot][0]))
    return tuple(made), tuple(names)
