"""Options of `convoy run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.command import ACCURACY, CHECKPOINTS, MODEL, OUTPUT

Plan = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        help="The plan to run, as `convoy optimize --plan` wrote it; a .convoy file has its own.",
        rich_help_panel=CHECKPOINTS,
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="Labelled images: a folder of class folders, cifar10:PATH, a file or synthetic. Prints the accuracy too.",
        rich_help_panel=ACCURACY,
    ),
]
Split = Annotated[
    str | None,
    typer.Option(
        "--split",
        metavar="test|train|all",
        help="Which images of --data; by default test if the weights were trained on the train part, else all.",
        rich_help_panel=ACCURACY,
    ),
]
Images = Annotated[
    int | None, typer.Option("--images", help="Run on at most this many images of --data.", rich_help_panel=ACCURACY)
]
Batch = Annotated[
    int | None, typer.Option("--batch", help="Images in a call; by default the plan's.", rich_help_panel=MODEL)
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="fp32, fp16 or bf16; by default the plan's.", rich_help_panel=MODEL)
]
Size = Annotated[
    str | None,
    typer.Option(
        "--size", metavar="HxW", help="Height and width of the images in pixels; by default the plan's.",
        rich_help_panel=MODEL,
    ),
]  # fmt: skip
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.", rich_help_panel=OUTPUT)]
