"""Tensors of a package, each once."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from convoy.package.tensor_file import tensor_bytes


class PackedTensors:
    """Tensors by the name that they get in the package.

    Attributes:
        by_name: the tensors.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def name(self, tensor: torch.Tensor) -> str:
        """The name of a tensor; tensors of the same values have the same name."""
        digest = hashlib.sha256(tensor_bytes(tensor)).digest()
        key = digest, tensor.dtype, tuple(tensor.shape)
        if key not in self._names:
            self._names[key] = f"t{len(self._names)}"
            self.by_name[self._names[key]] = tensor.detach()
        return self._names[key]
