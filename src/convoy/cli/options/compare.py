"""Options of `convoy compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.command import MEASURING, MODEL, OUTPUT, SUBJECT, TUNING

ALL = "torch,inductor,jax,tensorflow,onnxruntime,openvino,convoy"

Batch = Annotated[
    str | None,
    typer.Option(
        "--batch", help="Batch sizes, separated by commas; by default 1, or a .pt2's own.", rich_help_panel=MODEL
    ),
]
Train = Annotated[
    bool,
    typer.Option("--train", help="Time training steps: forward, backward, SGD update.", rich_help_panel=SUBJECT),
]
Frameworks = Annotated[
    str | None,
    typer.Option(
        "--frameworks", help=f"Names separated by commas, by default {ALL.replace(',', ', ')}.", rich_help_panel=SUBJECT
    ),
]
OptionNames = Annotated[
    str | None,
    typer.Option(
        "--options",
        help="Measure options of PyTorch, alone and together: all, or their names.",
        rich_help_panel=SUBJECT,
    ),
]
Effort = Annotated[
    str,
    typer.Option("--effort", help="How much Convoy may tune: none, quick or full.", rich_help_panel=TUNING),
]
TimeS = Annotated[
    float,
    typer.Option(
        "--time-s",
        "--time",
        show_default=False,
        help="Seconds that tuning of each case may take; Convoy predicts the rest. By default no limit.",
        rich_help_panel=TUNING,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", help="CPU threads of each framework; by default PyTorch's own number.", rich_help_panel=MEASURING
    ),
]
Rounds = Annotated[
    int,
    typer.Option(
        "--rounds",
        help="Timing rounds, in which the frameworks take turns; slow calls get fewer.",
        rich_help_panel=MEASURING,
    ),
]
TimeoutS = Annotated[
    float,
    typer.Option(
        "--timeout-s",
        help="Seconds that a framework may take to start, to build one configuration, or for a round.",
        rich_help_panel=MEASURING,
    ),
]
Seconds = Annotated[
    float,
    typer.Option(
        "--seconds",
        show_default=False,
        help="Seconds after which nothing new begins; the same command continues. By default no limit.",
        rich_help_panel=MEASURING,
    ),
]
Jobs = Annotated[
    int,
    typer.Option(
        "--jobs",
        show_default=False,
        help="Frameworks built at the same time; by default 1 on a CPU, several on a GPU.",
        rich_help_panel=MEASURING,
    ),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--memory-limit", metavar="SIZE", help="Most memory of a framework's process, such as 8GiB.",
        rich_help_panel=MEASURING,
    ),
]  # fmt: skip
Output = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="The run file (JSON); by default compare-MODEL.json or options-MODEL.json.",
        rich_help_panel=OUTPUT,
    ),
]
RunFile = Annotated[Path | None, typer.Option("--run", help="Another name of --out.", rich_help_panel=OUTPUT)]
Again = Annotated[
    bool,
    typer.Option("--again", help="Measure again what the run file already has.", rich_help_panel=OUTPUT),
]
