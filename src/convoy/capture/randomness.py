"""Which nodes draw random numbers: they cannot be computed once, and the user should know of them."""

from __future__ import annotations

import torch

from convoy.capture.draft import Draft
from convoy.graph.ir import Node

_SHOWN = 3
"""Names listed in the note."""


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers. Attention does so only with a dropout probability."""
    parts = node.op.split(".")
    if len(parts) != 3:
        return False
    overload = getattr(getattr(torch.ops.aten, parts[1]), parts[2])
    if torch.Tag.nondeterministic_seeded not in overload.tags:
        return False
    names = [argument.name for argument in overload._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return given.get("dropout_p", 0.0 if "dropout_p" in names else None) != 0.0


def note_randomness(draft: Draft) -> None:
    """Tell the user of nodes that draw random numbers (dropout that is left on, say)."""
    names = [node.name for node in draft.nodes if is_random(node)]
    if names:
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        draft.notes.append(
            f"the model draws random numbers in evaluation mode ({shown}): its results differ from call to call"
        )
