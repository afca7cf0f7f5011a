"""Captured: a model as a graph, its constants, and how its arguments and results nest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from convoy.capture.state.call_leftovers import CallLeftovers
from convoy.capture.structure import Structure
from convoy.engines.interpret import compile_graph
from convoy.engines.torch_operators import DTYPES
from convoy.errors import InputError
from convoy.graph.ir import Graph


@dataclass(frozen=True, slots=True)
class Captured:
    """What `capture_inference` makes of a model.

    Attributes:
        graph: the computation.
        constants: tensors of its constants by name, in the order of `graph.constants()`; contiguous. A parameter that no pass
            changed shares its memory with the model's.
        arguments: how the model's arguments nest.
        results: how its results nest.
        notes: what differs from the model in ways that numbers do not show, one line each.
        double: whether floating dtypes named in the graph are read as float64 (see `to_double`).
        overwritten: names of arguments that the model overwrites and the graph does not.
        strides: how PyTorch lays out each of the graph's outputs for arguments like those at capture; None, or empty: not known.
        traced: what PyTorch itself runs, before any pass, where that may differ in which bits it gives from run to run.
        was_run: whether the strides are those of a run of the model, not of a trace.
        returned: outputs that are the model's own parameters, buffers or other tensors: index of the output, qualified name.
        leftovers: attributes that calls of the model change, although results do not depend on that.
    """

    graph: Graph
    constants: dict[str, torch.Tensor]
    arguments: Structure
    results: Structure
    notes: tuple[str, ...] = ()
    double: bool = False
    overwritten: tuple[str, ...] = ()
    strides: tuple[tuple[int, ...] | None, ...] = ()
    traced: Graph | None = None
    was_run: bool = False
    returned: tuple[tuple[int, str], ...] = ()
    leftovers: CallLeftovers = field(default_factory=CallLeftovers)

    @property
    def as_pytorch(self) -> Graph:
        """The computation as PyTorch runs it: passes leave its numbers alone, but not which operators compute them."""
        return self.graph if self.traced is None else self.traced

    def flatten_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> list[torch.Tensor]:
        """The tensors of a call, in the order of `graph.inputs`.

        Raises:
            InputError: another structure, shape or dtype than at capture, or another value for what is no tensor.
        """
        tensors = self.arguments.flatten(args, dict(kwargs) if kwargs else {})
        values = self.graph.values
        for name, tensor in zip(self.graph.inputs, tensors, strict=True):
            spec = values[name].spec
            if tensor.shape != spec.shape or tensor.dtype != DTYPES[spec.dtype]:
                raise InputError(name, f"{tensor.dtype} {list(tensor.shape)}", f"{spec}, which was captured")
        return tensors

    def unflatten_outputs(self, outputs: Sequence[torch.Tensor]) -> Any:
        """Nest the graph's outputs as the model nests its results."""
        return self.results.unflatten(outputs)


def captured_function(captured: Captured) -> Callable[..., Any]:
    """A function that does what the model does, by PyTorch's operators alone, without gradients.

    With `to_double` before it, this is the oracle: floating inputs are cast to float64, and so are the results.
    """
    run = compile_graph(captured.graph, double=captured.double)
    constants = [captured.constants[value.name] for value in captured.graph.constants()]

    def function(*args: Any, **kwargs: Any) -> Any:
        inputs = captured.flatten_inputs(args, kwargs)
        if captured.double:
            inputs = [_to_double(tensor) for tensor in inputs]
        with torch.no_grad():
            return captured.unflatten_outputs(run(inputs, constants))

    return function


def to_double(captured: Captured) -> Captured:
    """The same computation in float64: floating constants cast (copies), floating dtypes read as float64."""
    constants = {name: _to_double(tensor) for name, tensor in captured.constants.items()}
    return replace(captured, constants=constants, double=True)


def _to_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
