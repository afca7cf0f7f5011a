"""convoy explain: a plan in words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.output.lines import say


def explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, as `convoy optimize --plan` wrote it.")],
    layer: Annotated[
        str | None,
        typer.Argument(
            metavar="LAYER",
            help="A layer as `convoy optimize` prints it (`conv1+relu`), or a part of it: every candidate with its time or the "
            "reason why it has none, and PyTorch's time.",
        ),
    ] = None,
    compare: Annotated[Path | None, typer.Option("--compare", help="Another plan: print the differences.")] = None,
) -> None:
    """Print PLAN in words: each step's engine, layout and time, and PyTorch's time. `~` marks predicted times."""
    from convoy import plan as plans

    found = plans.load(plan)
    if compare is not None:
        lines = plans.compare(found, plans.load(compare))
        say("\n".join(lines) or "the plans run the same")
        return
    say(plans.explain(found, layer))
