"""Options of `convoy prune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.command import ADVICE, FINETUNING, MODEL, OUTPUT, PRUNING

Sparsity = Annotated[
    float | None,
    typer.Option("--sparsity", help="Share of weights to make zero, such as 0.9.", rich_help_panel=PRUNING),
]
Pattern = Annotated[
    str | None,
    typer.Option(
        "--pattern",
        help="unstructured (default), N:M (2:4), block:RxC (block:1x8) or channel.",
        rich_help_panel=PRUNING,
    ),
]
Scope = Annotated[
    str,
    typer.Option(
        "--scope",
        help="layer: rank weights within each layer; global: in all layers together.",
        rich_help_panel=PRUNING,
    ),
]
Skip = Annotated[
    str | None,
    typer.Option(
        "--skip", help="Layers to leave unchanged, separated by commas: names, first or last.", rich_help_panel=PRUNING
    ),
]
Finetune = Annotated[
    str | None,
    typer.Option(
        "--finetune",
        help="Train on this data afterwards: a folder, cifar10:PATH, a file or synthetic.",
        rich_help_panel=FINETUNING,
    ),
]
Epochs = Annotated[
    int | None,
    typer.Option(
        "--epochs", help="Passes over that data; by default 1, or as many as make 50 steps.", rich_help_panel=FINETUNING
    ),
]
Evaluate = Annotated[
    str | None,
    typer.Option(
        "--evaluate",
        help="Data to take the accuracy on; by default the images of --finetune that are held out. Images that are trained on "
        "are not counted.",
        rich_help_panel=FINETUNING,
    ),
]
Images = Annotated[
    int | None,
    typer.Option("--images", help="Use at most this many images of each data set.", rich_help_panel=FINETUNING),
]
Batch = Annotated[
    int | None,
    typer.Option(
        "--batch",
        help="Images in a step, by default 128, or fewer for a small data set; with --advise in a call, 1.",
        rich_help_panel=MODEL,
    ),
]
Lr = Annotated[
    float,
    typer.Option("--lr", help="Learning rate of the first step; it falls to 0.", rich_help_panel=FINETUNING),
]
Seed = Annotated[
    int,
    typer.Option("--seed", help="Seed of the order of images and of their augmentation.", rich_help_panel=FINETUNING),
]
Advise = Annotated[
    bool,
    typer.Option(
        "--advise",
        help="Write nothing: measure from which sparsity each layer would be faster.",
        rich_help_panel=ADVICE,
    ),
]
Effort = Annotated[str, typer.Option("--effort", help="With --advise: quick or full.", rich_help_panel=ADVICE)]
Dtype = Annotated[str, typer.Option("--dtype", help="With --advise: fp32, fp16 or bf16.", rich_help_panel=ADVICE)]
Numerics = Annotated[
    str, typer.Option("--numerics", help="With --advise: strict, as_torch or half.", rich_help_panel=ADVICE)
]
Db = Annotated[
    Path | None,
    typer.Option("--db", help="With --advise: the performance database.", rich_help_panel=ADVICE),
]
Output = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Write the pruned weights to this .safetensors file.", rich_help_panel=OUTPUT),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.", rich_help_panel=OUTPUT)]
