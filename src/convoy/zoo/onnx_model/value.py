"""What the nodes of an ONNX graph exchange: tensors, constants, and arrays that are known while the graph is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from convoy.typed_torch import from_numpy

Array = np.ndarray[Any, Any]


class UnsupportedOnnxError(Exception):
    """The file has something that has no form in PyTorch here; the message says what."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A value of the file.

    Attributes:
        array: it, on the host: sizes, axes and the like are read from there.
        tensor: the same on the module's device, in the module's dtype.
    """

    array: Array
    tensor: torch.Tensor


Value = torch.Tensor | Constant | Array


@dataclass(frozen=True, slots=True)
class OnnxNode:
    """One node of the graph.

    Attributes:
        operator: its type, such as `Conv`.
        version: of the operators' set that the file uses.
        inputs: names of values; empty for one that is left out.
        outputs: names of values; empty for one that nobody reads.
        attributes: by name, in Python's types.
    """

    operator: str
    version: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute, or a default where the node has none."""
        return self.attributes.get(name, default)


Inputs = Sequence[Value | None]
Operator = Callable[[OnnxNode, Inputs], Any]
"""Computes a node's outputs: a tensor or an array, or a tuple of them."""


def tensor(value: Value | None) -> torch.Tensor:
    """A value as a tensor.

    Raises:
        UnsupportedOnnxError: it is left out.
    """
    if value is None:
        raise UnsupportedOnnxError("an input is left out that is needed")
    if isinstance(value, torch.Tensor):
        return value
    return value.tensor if isinstance(value, Constant) else from_numpy(np.array(value))


def array(value: Value | None, what: str) -> Array:
    """A value that must be known while the graph is read, such as a shape.

    Args:
        value: the value.
        what: its meaning, for the message.

    Raises:
        UnsupportedOnnxError: it depends on the inputs.
    """
    if isinstance(value, Constant):
        return value.array
    if isinstance(value, np.ndarray):
        return value
    raise UnsupportedOnnxError(f"{what} that depends on the inputs' values")


def integers(value: Value | None, what: str) -> list[int]:
    """A list of integers that must be known while the graph is read."""
    return [int(number) for number in array(value, what).reshape(-1)]


def optional(inputs: Inputs, index: int) -> Value | None:
    """An input that may be left out."""
    return inputs[index] if index < len(inputs) else None


def axes_of(node: OnnxNode, inputs: Inputs, index: int = 1) -> list[int] | None:
    """Axes from an attribute, as older sets have them, or from an input."""
    if node.get("axes") is not None:
        return [int(axis) for axis in node.get("axes")]
    given = optional(inputs, index)
    return None if given is None else integers(given, "axes")
