"""Checkpoints of a training: weights, optimizer, schedule, random numbers and position, in one file, whole or not at all."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from convoy.errors import InputError

FORMAT: Final = "convoy checkpoint 1"


class Position(NamedTuple):
    """Where a training is: epochs that are done, and steps of the next one."""

    epoch: int
    step: int


def write_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    position: Position,
) -> None:
    """Write everything that a training needs to go on; an existing file is replaced only when the new one is complete.

    Raises:
        InputError: the file cannot be written.
    """
    state: dict[str, Any] = {
        "format": FORMAT,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "epoch": position.epoch,
        "step": position.step,
        "random": torch.get_rng_state(),
    }
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        torch.save(state, fresh)
        fresh.replace(path)
    except (OSError, RuntimeError) as error:
        raise InputError("checkpoint", str(path), "a file that can be written", str(error)) from error
    finally:
        fresh.unlink(missing_ok=True)


def read_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> Position:
    """Put a training where a checkpoint was written; tensors alone are read, nothing in the file is run.

    Raises:
        InputError: no checkpoint, a damaged one, or one of another model. Nothing is changed then.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # over damaged bytes torch's reader stumbles in whatever way they lead it
        expected, says = (
            "a checkpoint that is whole",
            str(error).splitlines()[0] if str(error) else type(error).__name__,
        )
        raise InputError("checkpoint", str(path), expected, says) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise InputError("checkpoint", str(path), f"a file of the format {FORMAT!r}")
    own = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if own != {name: tuple(value.shape) for name, value in state["model"].items()}:
        raise InputError("checkpoint", str(path), "a checkpoint of this model")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    torch.set_rng_state(state["random"])
    return Position(int(state["epoch"]), int(state["step"]))
