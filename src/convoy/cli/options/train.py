"""Options of `convoy train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.command import CHECKPOINTS, MODEL, OUTPUT, TRAINING, TUNING

Data = Annotated[
    str,
    typer.Option(
        "--data",
        help="A folder of class folders, cifar10, cifar10:PATH, a file, or synthetic.",
        rich_help_panel=MODEL,
    ),
]
Images = Annotated[
    int | None, typer.Option("--images", help="Train on at most this many images.", rich_help_panel=MODEL)
]
Batch = Annotated[
    int | None,
    typer.Option(
        "--batch",
        help="Images in a step of one process; by default 128, or fewer so that an epoch has at least eight steps.",
        rich_help_panel=MODEL,
    ),
]
Head = Annotated[
    str | None,
    typer.Option(
        "--head",
        metavar="fit|keep",
        help="fit: replace the last layer by one with an output for each class. By default where data with named classes "
        "have another number of them than the net.",
        rich_help_panel=TRAINING,
    ),
]
Epochs = Annotated[int, typer.Option("--epochs", help="Passes over the images.", rich_help_panel=TRAINING)]
Lr = Annotated[
    float | None,
    typer.Option(
        "--lr",
        help="Learning rate of the first step; it falls to 0. By default 0.1 for 128 images in an update, in proportion "
        "for other numbers.",
        rich_help_panel=TRAINING,
    ),
]
Momentum = Annotated[float, typer.Option("--momentum", help="Momentum of the optimizer.", rich_help_panel=TRAINING)]
WeightDecay = Annotated[
    float, typer.Option("--weight-decay", help="Weight decay of the optimizer.", rich_help_panel=TRAINING)
]
Amp = Annotated[
    str | None, typer.Option("--amp", help="bf16: compute under autocast in that type.", rich_help_panel=TRAINING)
]
ClipGradNorm = Annotated[
    float | None,
    typer.Option(
        "--clip-grad-norm", help="Scale the gradients down to at most this joint L2 norm.", rich_help_panel=TRAINING
    ),
]
Accumulate = Annotated[
    int, typer.Option("--accumulate", help="Batches in an update of the weights.", rich_help_panel=TRAINING)
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of order, augmentation and dropout.", rich_help_panel=TRAINING)]
Stock = Annotated[
    bool,
    typer.Option("--stock", help="Train with PyTorch's own step, for comparison.", rich_help_panel=TRAINING),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        help="Write the state to this file after each epoch. A file that is there needs --resume.",
        rich_help_panel=CHECKPOINTS,
    ),
]
CheckpointEvery = Annotated[
    int,
    typer.Option(
        "--checkpoint-every",
        help="Write it after this many steps too; 0: only after each epoch.",
        rich_help_panel=CHECKPOINTS,
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue from the checkpoint if it exists, along the rates of the epochs and the lr asked for now.",
        rich_help_panel=CHECKPOINTS,
    ),
]
Plan = Annotated[
    Path | None,
    typer.Option("--plan", help="Replay this plan; measure nothing.", rich_help_panel=CHECKPOINTS),
]
SavePlan = Annotated[
    Path | None,
    typer.Option("--save-plan", help="Write the plan to this file.", rich_help_panel=CHECKPOINTS),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="Write the trained weights, with the names of their classes, to this .safetensors file.",
        rich_help_panel=OUTPUT,
    ),
]
TimeS = Annotated[
    float | None,
    typer.Option(
        "--time-s",
        "--time",
        help="Seconds that tuning may take. By default, at effort quick, a tenth of the training's estimated time, or 10.",
        rich_help_panel=TUNING,
    ),
]
