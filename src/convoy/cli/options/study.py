"""Options of `convoy study`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.command import MEASURING, MODEL, OUTPUT, SUBJECT, TUNING

SWEPT = "batch,channels,filters,size,kernel,stride"
"""Sizes that are swept by default."""

Sweep = Annotated[
    str | None,
    typer.Option(
        "--sweep",
        help=f"Sizes to sweep, separated by commas: {SWEPT} (these are the default), sparsity.",
        rich_help_panel=SUBJECT,
    ),
]
Layers = Annotated[
    Path | None,
    typer.Option("--layers", help="A CSV file of layers, as in bench/layers.", rich_help_panel=SUBJECT),
]
Base = Annotated[
    str,
    typer.Option(
        "--base",
        help="Sizes that stay fixed while one is swept: c=64,h=56,w=56 (names of ConvProblem).",
        rich_help_panel=SUBJECT,
    ),
]
Strategies = Annotated[
    str | None,
    typer.Option("--strategies", help="Nets, separated by commas, to compare strategies on.", rich_help_panel=SUBJECT),
]
Direction = Annotated[
    str,
    typer.Option("--direction", help="fprop, dgrad and wgrad, separated by commas.", rich_help_panel=SUBJECT),
]
Batch = Annotated[
    int | None,
    typer.Option(
        "--batch",
        help="Images of the nets of --strategies, by default 1. For layers: --base n=8.",
        rich_help_panel=MODEL,
    ),
]
Energy = Annotated[
    bool,
    typer.Option(
        "--energy",
        help="Measure the energy of each algorithm too: a second for each, on an NVIDIA GPU.",
        rich_help_panel=MEASURING,
    ),
]
Seconds = Annotated[
    float,
    typer.Option(
        "--seconds",
        show_default=False,
        help="Seconds after which nothing new is measured; the same command continues. By default no limit.",
        rich_help_panel=MEASURING,
    ),
]
NoCriteria = Annotated[
    bool,
    typer.Option(
        "--no-criteria",
        help="Do not learn criteria for `--effort none` from the measurements.",
        rich_help_panel=TUNING,
    ),
]
Output = Annotated[
    Path,
    typer.Option(
        "--out",
        "-o",
        help="The run file (JSON); the same command continues it.",
        rich_help_panel=OUTPUT,
    ),
]
Again = Annotated[
    bool,
    typer.Option(
        "--again",
        help="Begin a new run file; rows of the database are still used.",
        rich_help_panel=OUTPUT,
    ),
]
