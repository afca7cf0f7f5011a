"""Options of `convoy export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.command import GOAL, MODEL, OUTPUT

Out = Annotated[
    Path, typer.Option("--out", "-o", help="The package to write, such as net.convoy.", rich_help_panel=OUTPUT)
]
Plan = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        help="The plan to export, as `convoy optimize --plan` wrote it; else the model is tuned.",
        rich_help_panel=GOAL,
    ),
]
Portable = Annotated[
    bool,
    typer.Option(
        "--portable",
        help="Only Convoy's own kernels. On a CPU the C runtime runs no other packages; on a GPU it then needs no cuDNN.",
        rich_help_panel=GOAL,
    ),
]
Device = Annotated[
    str,
    typer.Option("--device", help="cpu, or cuda: the package is for the GPU of this machine.", rich_help_panel=MODEL),
]
Triton = Annotated[
    Path | None,
    typer.Option(
        "--triton",
        metavar="FOLDER",
        help="Also write it into this model repository of Triton Inference Server.",
        rich_help_panel=OUTPUT,
    ),
]
Batches = Annotated[
    str | None,
    typer.Option(
        "--batches",
        metavar="N,N,...",
        help="Several batch sizes, such as 1,8,32: a program for each, with the weights once.",
        rich_help_panel=MODEL,
    ),
]
