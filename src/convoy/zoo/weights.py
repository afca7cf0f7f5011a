"""Weights: a .safetensors file with a strict check, or torchvision's and timm's own download."""

from __future__ import annotations

import io
import logging
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn

from convoy.errors import InputError
from convoy.narrowing import is_dict
from convoy.typed_torch import load_safetensors
from convoy.untrusted import escape_controls, open_file
from convoy.zoo.checksummed_file import CHECKPOINT_FORMAT, read_checksummed, read_metadata
from convoy.zoo.torchvision_import import import_torchvision, torchvision_weights

MOST_BYTES = 64 << 30
"""Of a file of weights."""

_NO_DOWNLOAD = "weights that can be downloaded or are in the cache already"


def read(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a .safetensors file, or of the model in a checkpoint of `convoy train`, by name; InputError for others."""
    is_checkpoint = _is_checkpoint(file)
    if file.suffix != ".safetensors" and not is_checkpoint:
        expected = "DEFAULT, a .safetensors file, or a checkpoint of convoy train"
        raise InputError("weights", str(file), expected, _CONVERT if file.suffix in PICKLED else "")
    if not file.exists():
        raise InputError("weights", str(file), "a .safetensors file that is there")
    with open_file(file, MOST_BYTES, "weights"):
        pass  # a regular file: the library would wait for the writer of a pipe
    if is_checkpoint:
        return _model_of_checkpoint(file)
    try:
        return load_safetensors(file)
    except Exception as error:  # everything: the library's own errors, and torch's for unknown types and shapes
        said = escape_controls(f"Reading it failed: {_first_line(error)}")[:300]
        raise InputError("weights", str(file), "a whole .safetensors file", said) from error


PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
"""Endings of files that torch.save writes."""

_CONVERT = (
    "Pickled weights can hold code. Convert them: "
    "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'net.safetensors')."
)


def _is_checkpoint(file: Path) -> bool:
    try:
        return read_metadata(file, "weights").get("format") == CHECKPOINT_FORMAT
    except (OSError, RuntimeError, ValueError):
        return False


def _model_of_checkpoint(file: Path) -> dict[str, torch.Tensor]:
    state = read_checksummed(file, CHECKPOINT_FORMAT, "weights", most_bytes=MOST_BYTES)
    model = state.get("model") if is_dict(state) else None
    if not is_dict(model):
        raise InputError("weights", str(file), "a checkpoint with a model in it")
    return {name: tensor for name, tensor in model.items() if isinstance(tensor, torch.Tensor)}


def load_into(model: nn.Module, state: Mapping[str, torch.Tensor], file: Path) -> None:
    """Copy tensors into a model; every name and shape must match (batch-norm counters may be missing)."""
    own = model.state_dict()
    missing = [n for n in own if n not in state and not n.endswith("num_batches_tracked")]
    unexpected = [n for n in state if n not in own]
    for word, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            raise InputError(
                "weights", str(file), "exactly the model's names", f"{len(names)} {word}: {_first_three(names)}."
            )
    other = [n for n, t in state.items() if t.shape != own[n].shape]
    if other:
        shown = [f"{n} is {list(state[n].shape)} and should be {list(own[n].shape)}" for n in other]
        raise InputError("weights", str(file), "the model's shapes", f"{len(other)} differ: {_first_three(shown)}.")
    for name, tensor in state.items():
        if tensor.is_floating_point() != own[name].is_floating_point():
            raise InputError("weights", str(file), f"{name} in {own[name].dtype}", f"It is {tensor.dtype}.")
    model.load_state_dict(dict(state), strict=False)  # the check above is the stricter one


def other_classes(model: nn.Module, state: Mapping[str, torch.Tensor]) -> int | None:
    """The number of classes of a fine-tuned file: all shapes that differ, differ in their first side, and alike."""
    own = model.state_dict()
    pairs = [(own[n].shape, t.shape) for n, t in state.items() if n in own and own[n].shape != t.shape]
    sides = {there[0] for here, there in pairs if len(here) == len(there) > 0 and here[1:] == there[1:]}
    return int(sides.pop()) if len(sides) == 1 and all(len(h) == len(t) and h[1:] == t[1:] for h, t in pairs) else None


def torchvision_default(name: str) -> nn.Module:
    """A torchvision model with its DEFAULT weights, downloaded and checked by torchvision itself.

    The file is read once by torch's restricted unpickler before torchvision reads it: weights are data.
    """
    from torchvision.models import get_model

    import_torchvision()
    try:
        default = torchvision_weights(name).DEFAULT
    except (AttributeError, ValueError) as error:
        raise InputError("weights", "DEFAULT", f"weights that torchvision has for {name}") from error
    options: dict[str, Any] = {"aux_logits": False} if name == "inception_v3" else {}
    try:
        with redirect_stdout(io.StringIO()):  # torch.hub prints the address, which an error names too
            default.get_state_dict(progress=False, check_hash=True, weights_only=True)
            return get_model(name, weights=default, progress=False, **options)
    except (urllib.error.URLError, OSError, RuntimeError) as error:
        raise InputError("weights", "DEFAULT", _NO_DOWNLOAD, f"{default.url}: {_first_line(error)}") from error


def class_names_of(model: str, weights: str | Path | None) -> tuple[str, ...]:
    """What the outputs of torchvision's DEFAULT weights stand for; empty for other weights and models."""
    if weights != "DEFAULT":
        return ()
    import_torchvision()
    try:
        return tuple(torchvision_weights(model).DEFAULT.meta.get("categories", ()))
    except (AttributeError, ValueError):
        return ()


def timm_default(name: str) -> nn.Module:
    """A timm model with its own pretrained weights, downloaded by timm."""
    import_torchvision()
    import timm

    config = timm.get_pretrained_cfg(name)
    if config is None or not (config.has_weights or config.url or config.hf_hub_id):
        raise InputError("weights", "DEFAULT", f"weights that timm has for {name}")
    with _offline_when_unreachable():
        try:
            return timm.create_model(name, pretrained=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise InputError("weights", "DEFAULT", _NO_DOWNLOAD, f"timm:{name}: {_first_line(error)}") from error


@contextmanager
def _offline_when_unreachable() -> Generator[None]:
    """Without a network, look in the hub's cache alone: its client would retry for 45 s and print a dozen warnings first."""
    from huggingface_hub import constants

    loggers = [logging.getLogger(n) for n in ("huggingface_hub", "timm")]
    before = constants.HF_HUB_OFFLINE, [logger.level for logger in loggers]
    constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE or not _reachable(constants.ENDPOINT)
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before[0]
        for logger, level in zip(loggers, before[1], strict=True):
            logger.setLevel(level)


def _reachable(endpoint: str, timeout_s: float = 5.0) -> bool:
    if not endpoint.startswith(("https://", "http://")):
        return False
    request = urllib.request.Request(endpoint, method="HEAD")  # noqa: S310  the scheme was checked above
    try:
        with urllib.request.urlopen(request, timeout=timeout_s):  # noqa: S310
            return True
    except urllib.error.HTTPError:
        return True  # somebody answered
    except OSError:
        return False


def _first_three(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
