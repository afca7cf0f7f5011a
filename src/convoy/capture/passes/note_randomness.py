"""Random numbers in a captured model: the user should know of them."""

from __future__ import annotations

from convoy.capture.draft import Draft
from convoy.graph.randomness import draws_random

_SHOWN = 3
"""Names listed in the note."""


def note_randomness(draft: Draft) -> None:
    """Tell the user of nodes that draw random numbers (dropout that is left on, say)."""
    names = [node.name for node in draft.nodes if draws_random(node)]
    if names:
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        draft.notes.append(
            f"the model draws random numbers in evaluation mode ({shown}): its results differ from call to call"
        )
