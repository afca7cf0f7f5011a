"""Options of `convoy bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.command import CHECKPOINTS, MEASURING, OUTPUT

Plan = Annotated[
    list[Path] | None,
    typer.Option(
        "--plan",
        help="A plan, as `convoy optimize --plan` wrote it; repeatable, one for each batch size. A .convoy file has its own.",
        rich_help_panel=CHECKPOINTS,
    ),
]
P99 = Annotated[
    float | None,
    typer.Option(
        "--p99",
        metavar="MS",
        help="Bound on the 99th percentile of a server's latency, milliseconds; by default 3 times the largest batch's time.",
        rich_help_panel=MEASURING,
    ),
]
Seconds = Annotated[
    float,
    typer.Option("--seconds", help="Seconds that all measuring takes, in about.", rich_help_panel=MEASURING),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the schedules of arrivals.", rich_help_panel=MEASURING)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.", rich_help_panel=OUTPUT)]
