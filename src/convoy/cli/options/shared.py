"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.command import ENGINES, GOAL, MODEL, OUTPUT, TUNING

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A torchvision name (alexnet), timm:NAME, resnet20_cifar10, FILE.py:FACTORY (with --trust), a .pt2 or .onnx file.",
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Allow the file that MODEL names to run code: any .py file, a .pt2 that holds pickles.",
        rich_help_panel=MODEL,
    ),
]
Signers = Annotated[
    Path | None,
    typer.Option(
        "--signers",
        help="Trust a .convoy file that one of these people signed: names and public keys, as ssh-keygen takes them.",
        rich_help_panel=MODEL,
    ),
]
Input = Annotated[
    list[Path] | None,
    typer.Option(
        "--input", metavar="PATH", help="Images, or folders of images, to run on; repeatable.", rich_help_panel=MODEL
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(
        "--batch", help="Batch size; by default 1, a .pt2's own, or the number of images.", rich_help_panel=MODEL
    ),
]
Size = Annotated[
    str | None,
    typer.Option(
        "--size",
        metavar="HxW",
        help="Height and width of the images in pixels: 224x320, or 224 for 224x224; by default the model's own.",
        rich_help_panel=MODEL,
    ),
]
Dtype = Annotated[str, typer.Option("--dtype", help="fp32, fp16 or bf16.", rich_help_panel=MODEL)]
OwnDtype = Annotated[
    str | None,
    typer.Option("--dtype", help="fp32, fp16 or bf16; by default a .pt2's own, else fp32.", rich_help_panel=MODEL),
]
Device = Annotated[
    str | None,
    typer.Option("--device", help="cpu or cuda; by default cuda where there is one.", rich_help_panel=MODEL),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        help="A .safetensors file, or DEFAULT for the library's own; else random.",
        rich_help_panel=MODEL,
    ),
]
Numerics = Annotated[
    str, typer.Option("--numerics", help="strict, as_torch or half: which rounding is allowed.", rich_help_panel=GOAL)
]
Effort = Annotated[str, typer.Option("--effort", help="none (database only), quick or full.", rich_help_panel=TUNING)]
TimeS = Annotated[
    float | None,
    typer.Option(
        "--time-s",
        "--time",
        help="Seconds that the whole call may take; Convoy predicts what it cannot measure by then. By default no limit.",
        rich_help_panel=TUNING,
    ),
]
OnlyEngines = Annotated[
    list[str] | None,
    typer.Option(
        "--only-engines",
        metavar="IDS",
        help="Only these engines beside the baseline; separated by commas, or repeated.",
        rich_help_panel=ENGINES,
    ),
]
Db = Annotated[
    Path | None,
    typer.Option("--db", help="The performance database; CONVOY_DB moves it too.", rich_help_panel=TUNING),
]
Report = Annotated[
    Path | None, typer.Option("--report", help="Write the HTML page to this file.", rich_help_panel=OUTPUT)
]
