"""A pruned model's weights as a file: a plain state dict with true zeros."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, cast

from torch import nn

from convoy.errors import InputError
from convoy.typed_torch import save_safetensors
from convoy.untrusted import escape_controls
from convoy.whole_file import whole_file

LONGEST_WORDS: Final = 400
"""Most characters of a file's metadata that are shown: the file may come from anyone."""


def save_weights(model: nn.Module, path: Path, about: dict[str, str]) -> None:
    """Write a model's state dict as .safetensors. If writing fails, an existing file stays as it was.

    Args:
        model: on any device.
        path: an existing file is replaced.
        about: metadata, strings by name.

    Raises:
        InputError: `path` cannot be written; the error names `out`.
    """
    check_weights_path(path)
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    try:
        with whole_file(path, "out") as temporary:
            save_safetensors(state, temporary, about)
    except OSError as error:
        raise InputError("out", str(path), "a path that can be written", str(error)) from error


def describe_weights(path: str | None) -> str:
    """One line that says how weights were pruned, from the metadata of a file by `convoy prune`; empty for other weights.

    Args:
        path: the value of `--weights`: a file, `DEFAULT`, or None.
    """
    from safetensors import SafetensorError, safe_open

    if path is None or not Path(path).is_file():
        return ""
    try:
        with cast("Any", safe_open)(path, framework="numpy") as file:
            about: dict[str, str] = file.metadata() or {}
    except (OSError, ValueError, SafetensorError):
        return ""
    if not {"pattern", "sparsity", "scope"} <= about.keys():
        return ""
    said = f"the weights were pruned: pattern {about['pattern']}, sparsity {about['sparsity']}, scope {about['scope']}"
    if {"accuracy", "accuracy_before", "accuracy_images"} <= about.keys():
        images, before, after = about["accuracy_images"], about["accuracy_before"], about["accuracy"]
        said += f"; accuracy on {images}: {before} before, {after} after"
    return escape_controls(" ".join(said.split()))[:LONGEST_WORDS]


def check_weights_path(path: Path) -> None:
    """Raise InputError, which names `out`, unless the path ends in .safetensors: weights are read from such files only."""
    if path.suffix != ".safetensors":
        raise InputError("out", str(path), "a file that ends in .safetensors")
