"""The names that models and dtypes go by, and the errors for names that stand for none."""

from __future__ import annotations

import difflib
from pathlib import Path

import torch

from convoy.errors import InputError, unknown_name
from convoy.zoo.cifar import CIFAR_NETS
from convoy.zoo.torchvision_import import import_torchvision

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
"""torch's dtype by Convoy's name."""

ONNX = ".onnx"

TIMM = "timm:"
"""Prefix of timm's names."""


def parse_dtype(name: str) -> torch.dtype:
    """Torch's dtype for `fp32`, `fp16`, `bf16` or `fp64`; raises InputError for anything else."""
    if name not in DTYPES:
        raise unknown_name("dtype", name, DTYPES)
    return DTYPES[name]


def is_exported(name: str) -> bool:
    """Whether a name means a file that holds a whole net: a saved torch.export program, or an ONNX file."""
    return name.endswith((".pt2", ONNX))


def split_factory(name: str) -> tuple[Path | None, str]:
    """`path/to/file.py:factory` in its two parts; (None, name) for a name that is no file's."""
    path, colon, factory = name.rpartition(":")
    if colon and path.endswith(".py"):
        return Path(path), factory
    if name.endswith(".py"):
        raise InputError("model", name, "the form path/to/file.py:factory", "Name the function that makes the model.")
    return None, name


def model_names() -> list[str]:
    """Convoy's own names, and all that torchvision offers but its quantised models (integer convolutions are not Convoy's)."""
    models = import_torchvision().models
    return [*CIFAR_NETS, *(name for name in models.list_models() if not name.startswith("quantized_"))]


def unknown_model(name: str) -> InputError:
    """The error for a name that nobody has, with the nearest names that there are."""
    if name.startswith(TIMM):
        import_torchvision()
        import timm

        known = [TIMM + found for found in timm.list_models()]
    else:
        known = model_names()
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    todo = f"Did you mean {', '.join(near)}?" if near else ""
    expected = "a torchvision name, timm:NAME, path/to/file.py:factory, a .pt2 or an .onnx file"
    if "/" in name or name.endswith((".pt", ".pth", ".safetensors")):
        todo = "Weights alone are no model: name the model, and give the file as weights (.safetensors)."
    return InputError("model", name, expected, todo)
