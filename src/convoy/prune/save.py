"""A pruned model's weights as a file: a plain state dict with true zeros."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

from torch import nn

from convoy.errors import InputError
from convoy.untrusted import escape_controls

LONGEST_WORDS: Final = 400
"""Characters of a file's own words that are repeated, at most: anybody may have written them."""


def save_weights(model: nn.Module, path: Path, about: dict[str, str]) -> None:
    """Write a model's state dict as .safetensors, whole or not at all.

    Args:
        model: on any device.
        path: replaced where it is there.
        about: metadata, text by word.

    Raises:
        InputError: naming `out`.
    """
    from safetensors.torch import save_file

    check_weights_path(path)
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        save_file(state, fresh, metadata=about)
        fresh.replace(path)
    except OSError as error:
        raise InputError("out", str(path), "a path that can be written", str(error)) from error
    finally:
        fresh.unlink(missing_ok=True)


def describe_weights(path: str | None) -> str:
    """How weights were pruned, in one line, as their file by `convoy prune` says; empty for other weights.

    Args:
        path: as `--weights` takes it: a file, `DEFAULT`, or None.
    """
    from safetensors import SafetensorError, safe_open

    if path is None or not Path(path).is_file():
        return ""
    try:
        with safe_open(path, framework="numpy") as file:
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
    """Refuse a path that no weights can be read from again; raises InputError naming `out`."""
    if path.suffix != ".safetensors":
        raise InputError("out", str(path), "a file that ends in .safetensors")
