"""Checkpoints of a training: weights, optimizer, schedule, random numbers and position, in one file, whole or not at all."""

from __future__ import annotations

import contextlib
import glob
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from convoy.errors import InputError

FORMAT: Final = "convoy checkpoint 1"

TOKEN_BYTES: Final = 4
"""Of the name under which a file is written until it is whole."""

RandomState = dict[str, torch.Tensor]
"""One process's random number generators, uint8 tensors in host memory: `cpu`, and `cuda` where it trains on a GPU."""


class Position(NamedTuple):
    """Where a training is: epochs that are done, and steps of the next one."""

    epoch: int
    step: int


def random_state(device: torch.device) -> RandomState:
    """Where the generators are that a training on this device draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def put_random_state(state: RandomState, device: torch.device) -> None:
    """Put the generators where `random_state` found them; a GPU's stays as it is where the state was taken without one."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def write_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    position: Position,
    random: Sequence[RandomState],
) -> None:
    """Write everything that a training needs to go on; an existing file is replaced only when the new one is complete.

    Args:
        path: the file.
        model: its weights and buffers are written,
        optimizer: its momenta,
        schedule: and where it is.
        position: between two updates: gradients are not written.
        random: of every process, in the order of ranks.

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
        "random": list(random),
    }
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(TOKEN_BYTES)}")
    try:
        torch.save(state, fresh)
        fresh.replace(path)
    except (OSError, RuntimeError) as error:
        raise InputError("checkpoint", str(path), "a file that can be written", str(error)) from error
    finally:
        fresh.unlink(missing_ok=True)


def remove_unfinished(path: Path) -> None:
    """Remove what a process that was killed while it wrote a checkpoint left beside it: each is as large as the file."""
    for left in path.parent.glob(f".{glob.escape(path.name)}." + "[0-9a-f]" * (2 * TOKEN_BYTES)):
        with contextlib.suppress(OSError):  # it is in nobody's way
            left.unlink()


def read_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    device: torch.device,
    rank: int = 0,
) -> Position:
    """Put a training where a checkpoint was written; tensors alone are read, nothing in the file is run.

    Args:
        path: the file.
        model: is given the weights and buffers,
        optimizer: its momenta,
        schedule: and its place.
        device: what this process trains on: its generator goes on too.
        rank: of this process: it goes on with its own random numbers. One that was not there yet takes the first one's.

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
    put_random_state(_own_random_state(state["random"], rank), device)
    return Position(int(state["epoch"]), int(state["step"]))


def _own_random_state(random: torch.Tensor | list[RandomState], rank: int) -> RandomState:
    """One process's share of what a file holds; files were once written with the first one's CPU generator alone."""
    if isinstance(random, torch.Tensor):
        return {"cpu": random}
    return random[rank] if rank < len(random) else random[0]
