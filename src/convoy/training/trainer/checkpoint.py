"""Checkpoints of a training: weights, optimizer, schedule, random numbers and position, in one file, whole or not at all."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from convoy.errors import InputError
from convoy.narrowing import is_dict, is_list, is_sequence
from convoy.whole_file import unfinished_files
from convoy.zoo.checksummed_file import CHECKPOINT_FORMAT, read_checksummed, read_values, write_checksummed

FORMAT: Final = CHECKPOINT_FORMAT
"""Files of the first format, which torch.save wrote, held no sum: damage went unnoticed. They are refused."""

MOST_PROCESSES: Final = 65536
"""Whose random numbers a file may hold."""

_SPARE_BYTES: Final = 64 << 20
"""For a file's header and random numbers."""

RandomState = dict[str, torch.Tensor]
"""One process's random number generators, uint8 tensors in host memory: `cpu`, and `cuda` where it trains on a GPU."""


class TrainingPosition(NamedTuple):
    """Where a training is: epochs that are done, and steps of the next one."""

    epoch: int
    step: int


def random_state(device: torch.device) -> RandomState:
    """Where the generators are that a training on this device draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Put the generators where `random_state` found them; a GPU's stays as it is where the state was taken without one."""
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)  # first: it alone may still refuse a state
    torch.set_rng_state(state["cpu"])


def write_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    position: TrainingPosition,
    random: Sequence[RandomState],
    about: Mapping[str, str] | None = None,
) -> None:
    """Write everything that a training needs to go on; an existing file is replaced only when the new one is complete.

    Args:
        path: the file.
        model: its weights and buffers are written,
        optimizer: its momenta,
        schedule: and where it is.
        position: between two updates: gradients are not written.
        random: of every process, in the order of ranks.
        about: words about model and data, and the batch: `convoy.zoo.read_info` reads them.

    Raises:
        InputError: the file cannot be written.
    """
    state: dict[str, Any] = {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "epoch": position.epoch,
        "step": position.step,
        "random": list(random),
        "about": dict(about or {}),
    }
    try:
        write_checksummed(path, FORMAT, state, "checkpoint")
    except InputError:
        raise
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise InputError("checkpoint", str(path), "a file that can be written", str(error)) from error


def remove_unfinished(path: Path) -> None:
    """Remove what a process that was killed while it wrote a checkpoint left beside it: each is as large as the file."""
    for left in unfinished_files(path):
        with contextlib.suppress(OSError):  # it is in nobody's way
            left.unlink()


def read_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    device: torch.device,
    rank: int = 0,
    most_step: int | None = None,
    *,
    about: Mapping[str, str] | None = None,
) -> TrainingPosition:
    """Put a training where a checkpoint was written; tensors and plain values are read, nothing in the file is run.

    Everything in the file is checked before anything is changed: its sum, names, shapes, dtypes, and the kinds of values.

    Args:
        path: the file.
        model: is given the weights and buffers,
        optimizer: its momenta,
        schedule: and its place.
        device: what this process trains on: its generator goes on too.
        rank: of this process: it goes on with its own random numbers. One that was not there yet takes the first one's.
        most_step: steps of an epoch; a file that was written behind more is of other batches.
        about: this training's words: its classes must be the file's, and amid an epoch its batch and processes too.

    Raises:
        InputError: no checkpoint, a damaged one, or one of another model or data. Nothing is changed then.
    """
    state = read_checksummed(path, FORMAT, "checkpoint", most_bytes=_most_bytes(model))
    try:
        if not is_dict(state) or state.keys() - {"about"} != set(_PARTS):
            raise ValueError("it has other parts than " + ", ".join(_PARTS))
        _check_model(state["model"], model)
        _check_optimizer(state["optimizer"], optimizer)
        _check_like(state["schedule"], schedule.state_dict(), "schedule")
        position = _position(state)
        if most_step is not None and position.step > most_step:
            raise ValueError(
                f"{position.step} steps of an epoch are made, which has {most_step} here: is batch the same?"
            )
        _check_about(state.get("about", {}), about or {}, position)
        random = _own_random_state(state["random"], device, rank)
    except ValueError as error:
        raise InputError("checkpoint", str(path), "a checkpoint of this model", f"In the file, {error}.") from error
    set_random_state(random, device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    return position


def read_position(path: Path) -> TrainingPosition | None:
    """Where the training was that wrote a file; None where it holds no such thing. Its sum is not looked at."""
    try:
        return _position(read_values(path, "checkpoint", most_bytes=1 << 62))
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None


_PARTS: Final = ("model", "optimizer", "schedule", "epoch", "step", "random")


def _most_bytes(model: nn.Module) -> int:
    """Of a file: a model's tensors, and as much again for each of up to two momenta of an optimizer."""
    return 3 * sum(t.nbytes for t in model.state_dict().values() if isinstance(t, torch.Tensor)) + _SPARE_BYTES


def _position(state: Mapping[str, Any]) -> TrainingPosition:
    for name in ("epoch", "step"):
        if type(state[name]) is not int or state[name] < 0:
            raise ValueError(f"{name} is no count")
    return TrainingPosition(state["epoch"], state["step"])


def _check_about(found: Any, own: Mapping[str, str], position: TrainingPosition) -> None:
    """Class names are the same; so is what the order of an epoch's images depends on, where the file was written amid one."""
    if not is_dict(found) or not all(isinstance(word, str) for pair in found.items() for word in pair):
        raise ValueError("its words are malformed")
    for name in ("classes", *(("batch", "processes") if position.step else ())):
        if name in found and name in own and found[name] != own[name]:
            where = f" amid an epoch ({position.step} steps are made)" if name != "classes" else ""
            raise ValueError(f"{name} is {found[name][:100]} and not {own[name][:100]}{where}")


def _check_model(found: Any, model: nn.Module) -> None:
    own = model.state_dict()
    if not is_dict(found) or found.keys() != own.keys():
        raise ValueError("the model's parameters and buffers have other names")
    for name, tensor in own.items():
        if isinstance(tensor, torch.Tensor):
            _check_tensor(found[name], tensor, name)
        else:
            _check_like(found[name], tensor, name)


def _check_tensor(found: Any, own: torch.Tensor, name: str) -> None:
    if not isinstance(found, torch.Tensor) or (found.shape, found.dtype) != (own.shape, own.dtype):
        words = f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise ValueError(f"{name} is {words} and not {own.dtype} {list(own.shape)}")


def _check_optimizer(found: Any, optimizer: torch.optim.Optimizer) -> None:
    """The groups hold the same parameters and options; a parameter's momenta have its shape and dtype."""
    if not is_dict(found) or found.keys() != {"state", "param_groups"} or not is_dict(found["state"]):
        raise ValueError("the optimizer's state is malformed")
    _check_like(found["param_groups"], optimizer.state_dict()["param_groups"], "param_groups")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, kept in found["state"].items():
        if type(index) is not int or not 0 <= index < len(parameters) or not is_dict(kept):
            raise ValueError("the optimizer's state is of other parameters")
        for name, value in kept.items():
            if isinstance(value, torch.Tensor) and value.dim():
                _check_tensor(value, parameters[index], f"{name} of parameter {index}")
            elif not (value is None or isinstance(value, torch.Tensor | int | float)):
                raise ValueError(f"{name} of parameter {index} is {type(value).__name__}")


def _check_like(found: Any, own: Any, name: str) -> None:
    """Plain values are of the kind that is there now, with the same keys and lengths; numbers are finite."""
    if is_dict(own) and is_dict(found):
        if found.keys() != own.keys():
            raise ValueError(f"{name} has other names")
        for key in own:
            _check_like(found[key], own[key], "params" if key == "params" else f"{name}.{key}")
    elif is_sequence(own) and type(found) is type(own):
        if len(found) != len(own) or (name == "params" and found != own):
            raise ValueError(f"{name} has another length or other members")
        for index, each in enumerate(own):
            _check_like(found[index], each, f"{name}.{index}")
    elif isinstance(own, torch.Tensor):
        _check_tensor(found, own, name)
    elif not (_is_number(found) and _is_number(own)) and type(found) is not type(own):
        raise ValueError(f"{name} is {type(found).__name__} and not {type(own).__name__}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _own_random_state(random: Any, device: torch.device, rank: int) -> RandomState:
    """One process's share of what a file holds, as this device's generators take it."""
    if not is_list(random) or not 0 < len(random) <= MOST_PROCESSES:
        raise ValueError("the random numbers are malformed")
    mine = random[rank] if rank < len(random) else random[0]
    if not is_dict(mine) or "cpu" not in mine:
        raise ValueError("the random numbers are malformed")
    for name, own in random_state(device).items():
        if name in mine:
            _check_tensor(mine[name], own, f"the random state of {name}")
    try:
        torch.Generator().set_state(mine["cpu"])
    except RuntimeError as error:
        raise ValueError("the random state of cpu is none") from error
    return mine
