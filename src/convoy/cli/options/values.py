"""How the words of options become settings, devices, models and plans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convoy.errors import InputError, unknown_name
from convoy.setting_values import is_count
from convoy.settings import Settings, parse_bytes

if TYPE_CHECKING:
    from torch import nn

    from convoy.deadline import Deadline
    from convoy.pipeline.observer import Observer
    from convoy.target import Target
    from convoy.training import TrainingResult
    from convoy.zoo.image_size import ImageSize


def words_of(text: str | Sequence[str] | None) -> list[str]:
    """The words of an option that takes several: separated by commas, or the option repeated."""
    parts = (text,) if isinstance(text, str) else text or ()
    return [word for part in parts for item in part.split(",") if (word := item.strip())]


def positive_integers(option: str, text: str, expected: str) -> list[int]:
    """The integers of an option that takes several, separated by commas, in their order.

    Args:
        option: the option, for the error.
        text: its value.
        expected: what the option takes, for the error.

    Raises:
        InputError: an entry is no integer of at least 1.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(map(is_count, words)):
        raise InputError(option, text, expected)
    return [int(word) for word in words]


def image_size(text: str | None) -> ImageSize | None:
    """Read `--size`: `224x320` as height and width, `224` as both; None where the option was not given.

    Raises:
        InputError: anything else, or a side below 1.
    """
    if text is None:
        return None
    height, separator, width = text.strip().lower().partition("x")
    both = (height, width) if separator else (height, height)
    if not all(map(is_count, both)):
        raise InputError("--size", text, "HxW in pixels, such as 224x320, or one number for both")
    return int(both[0]) if both[0] == both[1] else (int(both[0]), int(both[1]))


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


def check_no_signers(signers: Path | None) -> None:
    """Refuse `--signers` with a model that is no package."""
    if signers is not None:
        raise InputError("--signers", str(signers), "nothing without a .convoy file", "Only packages are signed.")


def load(model: str, weights: str | None, dtype: str | None, device: str, *, trust: bool) -> nn.Module:
    """The model in evaluation mode, on its device; where it is trusted, its file may run code. No dtype: the model's own."""
    from convoy.zoo import load_model, own_dtype

    if dtype is not None:
        pick_target(device, dtype)  # refused before the model is loaded
    made = load_model(model, weights=weights, dtype=dtype, trust=trust)
    if dtype is None:
        pick_target(device, own_dtype(made))
    return made.to(device)


def load_fp32(model: str, weights: str | None, device: str, *, trust: bool) -> nn.Module:
    """As `load`, for a command that needs fp32 parameters and has no option for another dtype.

    Raises:
        InputError: naming `model`, for a .pt2 that was exported in another dtype.
    """
    from convoy.zoo import own_dtype

    made = load(model, weights, None, device, trust=trust)
    if own_dtype(made) != "fp32":
        todo = f"It was exported in {own_dtype(made)}; export it in fp32 for this command."
        raise InputError("model", model, "a model with fp32 parameters", todo)
    return made


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
    from convoy.training import tune_training_step
    from convoy.training.step_program import StepOptions
    from convoy.training.trainer.fit import classification_loss

    if amp is not None and amp not in AMP:
        raise unknown_name("--amp", amp, AMP)
    module.eval()
    with torch.no_grad():
        classes = class_scores(module(*args)).shape[1]
    labels = torch.randint(0, classes, (args[0].shape[0],), generator=torch.Generator().manual_seed(0))
    module.train()
    return tune_training_step(
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
