"""Options that several commands share, and how words become Settings, models and inputs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convoy.cli.command import ENGINES, GOAL, MODEL, OUTPUT, TUNING
from convoy.cli.output import say
from convoy.errors import InputError, unknown_name
from convoy.settings import Settings, parse_bytes

if TYPE_CHECKING:
    from torch import nn

    from convoy.compare import Run
    from convoy.deadline import Deadline
    from convoy.pipeline.observer import Observer
    from convoy.target import Target
    from convoy.training import TrainingResult
    from convoy.zoo.image_size import ImageSize

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
Input = Annotated[
    list[Path] | None,
    typer.Option(
        "--input", metavar="PATH", help="Images, or folders of images, to run on; repeatable.", rich_help_panel=MODEL
    ),
]
Batch = Annotated[
    int | None,
    typer.Option("--batch", help="Batch size; by default 1, or the number of images.", rich_help_panel=MODEL),
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


def words_of(text: str | Sequence[str] | None) -> list[str]:
    """The words of an option that takes several: separated by commas, or the option repeated."""
    parts = (text,) if isinstance(text, str) else text or ()
    return [word for part in parts for piece in part.split(",") if (word := piece.strip())]


def image_size(text: str | None) -> ImageSize | None:
    """Read `--size`: `224x320` as height and width, `224` as both; None where the option was not given.

    Raises:
        InputError: anything else, or a side below 1.
    """
    if text is None:
        return None
    height, separator, width = text.strip().lower().partition("x")
    both = (height, width) if separator else (height, height)
    if not all(side.isascii() and side.isdecimal() and int(side) > 0 for side in both):
        raise InputError("--size", text, "HxW in pixels, such as 224x320, or one number for both")
    return int(both[0]) if both[0] == both[1] else (int(both[0]), int(both[1]))


def tell(message: str) -> None:
    """Say something that is no result."""
    say(f"convoy: {message}", err=True)


def pick_device(device: str | None) -> str:
    """The device asked for, or the best there is; raises InputError where it is not there."""
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    from convoy.measurement import detect_target

    return detect_target(device).device


def pick_target(device: str | None, dtype: str) -> Target:
    """The device asked for, or the best there is; raises InputError where it is not there or has not the dtype."""
    from convoy.measurement import check_dtype, detect_target

    target = detect_target(pick_device(device))
    check_dtype(target, dtype)
    return target


def settings_from(**words: Any) -> Settings:
    """Settings from option words, each by the name of its field; None means the default."""
    given = {name: value for name, value in words.items() if value is not None}
    for name in ("memory_budget_bytes", "tuning_memory_bytes"):
        if name in given:
            given[name] = parse_bytes(given[name], name)
    for name in ("only_engines", "deny_engines"):
        if name in given:
            given[name] = tuple(words_of(given[name]))
    check_database(given.get("db"))
    return Settings(**given)


def check_database(db: Path | None) -> None:
    """Refuse a database's path that is a folder or a device, before any work is done."""
    from convoy.perfdb.location import checked_path

    if db is not None:
        checked_path(db)


def load(model: str, weights: str | None, dtype: str, device: str, *, trust: bool) -> nn.Module:
    """The model in evaluation mode, on its device; where it is trusted, its file may run code."""
    from convoy.zoo import load_model

    pick_target(device, dtype)
    return load_model(model, weights=weights, dtype=dtype, trust=trust).to(device)


def load_plan(module: nn.Module, plan: Path, args: tuple[Any, ...]) -> nn.Module:
    """The module run by a saved plan."""
    import convoy

    return convoy.load(module, plan, args)


AMP = {"bf16": "bfloat16", "fp16": "float16"}
"""Words of `--amp` and torch's names."""


def train(
    module: nn.Module,
    args: tuple[Any, ...],
    name: str,
    settings: Settings,
    observer: Observer,
    amp: str | None,
    deadline: Deadline | None = None,
) -> TrainingResult:
    """Tune a training step on a batch: cross entropy with random labels."""
    import torch

    from convoy.prune.accuracy import class_scores
    from convoy.training import train_model
    from convoy.training.step_program import StepOptions
    from convoy.training.trainer.fit import classification_loss

    if amp is not None and amp not in AMP:
        raise unknown_name("--amp", amp, AMP)
    module.eval()
    with torch.no_grad():
        classes = class_scores(module(*args)).shape[1]
    labels = torch.randint(0, classes, (args[0].shape[0],), generator=torch.Generator().manual_seed(0))
    module.train()
    return train_model(
        module,
        classification_loss,
        torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1, momentum=0.9),
        (args[0] if len(args) == 1 else args, labels.to(args[0].device)),
        options=StepOptions(amp=getattr(torch, AMP[amp]) if amp else None),
        settings=settings,
        name=name,
        observer=observer,
        deadline=deadline,
    )


def write_report(run: Run, path: Path | None) -> None:
    """The page of a run, where one is wanted."""
    if path is None:
        return
    from convoy.compare.runs.run_page import sheet_of
    from convoy.report.sheet import write_sheet

    write_sheet(sheet_of([run]), path)
    say(f"report: {path}")


def check_output(path: Path | None, argument: str) -> None:
    """Refuse an output path before any work is done for it."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        raise InputError(argument, str(path), "a file in a folder that exists")
    if not os.access(folder, os.W_OK):
        raise InputError(argument, str(path), "a file in a folder that may be written to")


def check_outputs(outputs: Mapping[str, Path | None]) -> None:
    """`check_output` for each option; and no two may name one file, for the second would replace the first."""
    seen: dict[Path, str] = {}
    for argument, path in outputs.items():
        check_output(path, argument)
        if path is not None:
            other = seen.setdefault(path.resolve(), argument)
            if other != argument:
                raise InputError(argument, str(path), f"another file than {other} names")
