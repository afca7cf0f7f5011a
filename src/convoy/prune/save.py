"""A pruned model's weights as a file: a plain state dict with true zeros."""

from __future__ import annotations

import secrets
from pathlib import Path

from torch import nn

from convoy.errors import InputError


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


def check_weights_path(path: Path) -> None:
    """Refuse a path that no weights can be read from again; raises InputError naming `out`."""
    if path.suffix != ".safetensors":
        raise InputError("out", str(path), "a file that ends in .safetensors")
