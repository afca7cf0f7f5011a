"""OnnxModule: computes an ONNX graph with PyTorch's operators, node by node, so that torch.export can capture it."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, cast

import numpy as np
import torch
from torch import nn

from convoy.typed_torch import from_numpy
from convoy.zoo.onnx_model import host
from convoy.zoo.onnx_model.convolutions import CONVOLUTIONS
from convoy.zoo.onnx_model.elementwise import ELEMENTWISE
from convoy.zoo.onnx_model.read import OnnxGraph
from convoy.zoo.onnx_model.shapes import SHAPES
from convoy.zoo.onnx_model.value import Constant, Inputs, OnnxNode, Operator, UnsupportedOnnxError, Value

OPERATORS: Final[dict[str, Operator]] = {**CONVOLUTIONS, **ELEMENTWISE, **SHAPES}
"""ONNX's operator → its function on tensors."""

MOST_NAMED: Final = 10
"""Unsupported operators that a message names."""


class OnnxModule(nn.Module):
    """A graph as a module: its inputs by position, in the file's order; one output, or a tuple.

    Weights are parameters, `weight_0` and so on; other constants are buffers.

    Args:
        graph: from `read_graph`.

    Raises:
        UnsupportedOnnxError: it has operators that have no function here; all are named.
    """

    def __init__(self, graph: OnnxGraph) -> None:
        super().__init__()
        missing = Counter(
            node.operator for node in graph.nodes if node.operator not in OPERATORS and node.operator != "Range"
        )
        if missing:
            named = ", ".join(f"{name} ({count})" for name, count in missing.most_common(MOST_NAMED))
            raise UnsupportedOnnxError(f"the operators {named}")
        self.graph = graph
        self.names: dict[str, str] = {}
        statistics = {
            name for node in graph.nodes if node.operator == "BatchNormalization" for name in node.inputs[3:5]
        }
        used = {name for node in graph.nodes for name in node.inputs} | set(graph.outputs)
        for index, (name, value) in enumerate((n, v) for n, v in graph.constants.items() if n in used):
            made = from_numpy(np.array(value))
            if made.is_floating_point() and name not in statistics:
                self.register_parameter(f"weight_{index}", nn.Parameter(made))
                self.names[name] = f"weight_{index}"
            else:
                self.register_buffer(f"constant_{index}", made)
                self.names[name] = f"constant_{index}"

    def forward(self, *args: torch.Tensor) -> Any:
        """The graph's outputs."""
        if len(args) != len(self.graph.inputs):
            raise TypeError(
                f"forward() takes {len(self.graph.inputs)} inputs ({', '.join(self.graph.inputs)}), got {len(args)}"
            )
        values: dict[str, Value] = dict(zip(self.graph.inputs, args, strict=True))
        for name, attribute in self.names.items():
            values[name] = Constant(self.graph.constants[name], getattr(self, attribute))
        for node in self.graph.nodes:
            found = self._compute(node, [values[name] if name else None for name in node.inputs])
            outputs: tuple[Any, ...] = cast("tuple[Any, ...]", found) if isinstance(found, tuple) else (found,)
            values.update({name: value for name, value in zip(node.outputs, outputs, strict=False) if name})
        results = tuple(self._result(values[name]) for name in self.graph.outputs)
        return results[0] if len(results) == 1 else results

    @staticmethod
    def _compute(node: OnnxNode, inputs: Inputs) -> Any:
        if all(host.is_host(value) for value in inputs) and node.inputs:
            try:
                return host.compute(node, inputs)
            except KeyError:  # there is no such operator on the host
                pass
        try:
            return OPERATORS[node.operator](node, inputs)
        except KeyError as error:
            raise UnsupportedOnnxError(f"{node.operator} of values that depend on the inputs") from error
        except UnsupportedOnnxError as error:
            raise UnsupportedOnnxError(f"{node.operator}: {error}") from error

    @staticmethod
    def _result(value: Value) -> torch.Tensor:
        if isinstance(value, Constant):
            return value.tensor.clone()
        return from_numpy(value) if isinstance(value, np.ndarray) else value
