"""Options of `convoy scale`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.command import MEASURING, MODEL, OUTPUT, PROCESSES, SUBJECT, TUNING

Models = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Models, separated by commas: torchvision names (alexnet), timm:NAME, FILE.py:FACTORY (with --trust), .pt2 files.",
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(
        "--batch",
        help="Images in a step of one GPU (or CPU process), with --strong of all of them; by default 128, or a .pt2's own.",
        rich_help_panel=MODEL,
    ),
]
Dtype = Annotated[
    str, typer.Option("--dtype", help="fp32; or fp16 or bf16: autocast with fp32 parameters.", rich_help_panel=MODEL)
]
Providers = Annotated[
    str,
    typer.Option(
        "--providers",
        help="Who trains, separated by commas: torch.ddp, torch.ddp.compiled, convoy. With +bf16 behind it, a provider sends its"
        " gradients in bf16 (convoy+bf16); with +bf16_error_feedback, Convoy adds what rounding dropped to the next step's;"
        " with +factors, it gathers the factors of linear layers' gradients instead of averaging these.",
        rich_help_panel=SUBJECT,
    ),
]
Weak = Annotated[
    bool,
    typer.Option(
        "--weak", help="Each GPU or process has --batch images; this is the default.", rich_help_panel=SUBJECT
    ),
]
Strong = Annotated[
    bool,
    typer.Option(
        "--strong", help="All GPUs or processes share --batch images; with --weak, both.", rich_help_panel=SUBJECT
    ),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        help="Numbers of GPUs (on a CPU: processes) of a host, separated by commas: 1,2,4,8.",
        rich_help_panel=PROCESSES,
    ),
]
Nodes = Annotated[
    int, typer.Option("--nodes", help="Hosts; the same command is run on each.", rich_help_panel=PROCESSES)
]
NodeRank = Annotated[int, typer.Option("--node-rank", help="Number of this host, from 0.", rich_help_panel=PROCESSES)]
Endpoint = Annotated[
    str,
    typer.Option(
        "--endpoint", help="HOST:PORT of the first host, where there is more than one.", rich_help_panel=PROCESSES
    ),
]
Effort = Annotated[
    str,
    typer.Option("--effort", help="How much Convoy's step tunes: none, quick or full.", rich_help_panel=TUNING),
]
Plans = Annotated[
    Path | None,
    typer.Option(
        "--plans",
        help="A folder of Convoy's plans: a plan that is there is replayed, on any number of GPUs; others are written.",
        rich_help_panel=TUNING,
    ),
]
TimeoutS = Annotated[
    float,
    typer.Option(
        "--timeout-s",
        help="Seconds that one provider may take on one number of GPUs.",
        rich_help_panel=MEASURING,
    ),
]
RoundS = Annotated[
    float,
    typer.Option(
        "--round-s", help="Least length of each of the 7 timed rounds, in seconds.", rich_help_panel=MEASURING
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="The run file (JSON); by default scale-MODEL.json. The first host writes it.",
        rich_help_panel=OUTPUT,
    ),
]
Again = Annotated[
    bool,
    typer.Option("--again", help="Measure again what the run file already has.", rich_help_panel=OUTPUT),
]
