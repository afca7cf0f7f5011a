"""Options of `convoy optimize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.command import ENGINES, GOAL, OUTPUT, TUNING

Layout = Annotated[
    str, typer.Option("--layout", help="auto, nchw or nhwc: memory formats inside the net.", rich_help_panel=GOAL)
]
MemoryBudgetBytes = Annotated[
    str | None,
    typer.Option(
        "--memory-budget-bytes",
        metavar="SIZE",
        help="Most bytes for values, workspace and packed weights, such as 256MiB.",
        rich_help_panel=GOAL,
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option("--deterministic", help="Only candidates that give the same bits in every run.", rich_help_panel=GOAL),
]
Train = Annotated[
    bool,
    typer.Option(
        "--train", help="Tune a training step: forward and backward pass, random labels.", rich_help_panel=GOAL
    ),
]
Amp = Annotated[
    str | None, typer.Option("--amp", help="With --train: bf16 or fp16, run under autocast.", rich_help_panel=GOAL)
]
TuningMemoryBytes = Annotated[
    str | None,
    typer.Option(
        "--tuning-memory-bytes",
        metavar="SIZE",
        help="Most bytes of GPU memory that tuning may take, such as 2GiB.",
        rich_help_panel=TUNING,
    ),
]
TimeoutS = Annotated[
    float | None,
    typer.Option(
        "--timeout-s",
        help="Seconds that one candidate may take to build or to run; by default 30.",
        rich_help_panel=TUNING,
    ),
]
DenyEngines = Annotated[
    list[str] | None,
    typer.Option(
        "--deny-engines",
        metavar="IDS",
        help="Not these engines; separated by commas, or repeated.",
        rich_help_panel=ENGINES,
    ),
]
Solver = Annotated[str, typer.Option("--solver", help="exact, greedy, single or baseline.", rich_help_panel=ENGINES)]
Streams = Annotated[
    int | None,
    typer.Option("--streams", help="Most CUDA streams to try; 1 keeps the net serial.", rich_help_panel=ENGINES),
]
StreamMemory = Annotated[
    float | None,
    typer.Option(
        "--stream-memory",
        metavar="FACTOR",
        help="Most memory on several CUDA streams, as a multiple of that on one; by default 1.1.",
        rich_help_panel=ENGINES,
    ),
]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="Write the plan to this file.", rich_help_panel=OUTPUT)]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write all results to this file, as JSON.", rich_help_panel=OUTPUT)
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        help="Write where the time of tuning went to this file, for Perfetto, and print a table.",
        rich_help_panel=OUTPUT,
    ),
]
TimelineFile = Annotated[
    Path | None,
    typer.Option("--timeline", help="Write when each step runs to this file, for Perfetto.", rich_help_panel=OUTPUT),
]
