"""The order of a plan's steps: each reads what has been made, and random numbers are drawn in the graph's order."""

from __future__ import annotations

from collections.abc import Sequence

from convoy.errors import PlanError
from convoy.graph.ir import Graph
from convoy.plan.plan import Step
from convoy.schedule import finished_before
from convoy.settings import MAX_STREAMS


def check_order(steps: Sequence[Step]) -> None:
    """Check that no step can read a value before it is made.

    Raises:
        PlanError: with the name of the step that can.
    """
    known = _finished(steps)
    made: dict[str, int] = {}
    for at, step in enumerate(steps):
        for name in step.args:
            if name in made and made[name] > known[at][steps[made[name]].stream]:
                raise PlanError(f"steps[{at}].waits", step.waits, f"a wait for {name!r}, made on another stream")
        made.update(dict.fromkeys(step.results, at))


def _finished(steps: Sequence[Step]) -> list[list[int]]:
    """For each step and stream, the last step of the stream that has finished when the step starts."""
    for at, step in enumerate(steps):
        if not 0 <= step.stream < MAX_STREAMS:
            raise PlanError(f"steps[{at}].stream", step.stream, f"streams under {MAX_STREAMS}")
        if any(not 0 <= before < at for before in step.waits) or len(set(step.waits)) < len(step.waits):
            raise PlanError(f"steps[{at}].waits", step.waits, "indices of earlier steps, each once")
    return finished_before([(step.stream, step.waits) for step in steps], MAX_STREAMS)


def check_draws(steps: Sequence[Step], graph: Graph) -> None:
    """Check that random numbers are drawn in the graph's order: another order gives other numbers for the same seed."""
    position = {node.name: at for at, node in enumerate(graph.nodes)}
    known = _finished(steps)
    last = -1
    for at, step in enumerate(steps):
        if step.pattern != "draw":
            continue
        if last >= 0:
            ordered = position[steps[last].nodes[0]] < position[step.nodes[0]]
            if not ordered or last > known[at][steps[last].stream]:
                raise PlanError(
                    f"steps[{at}].waits",
                    step.waits,
                    "random numbers drawn in the graph's order",
                    "Tune the model again.",
                )
        last = at
