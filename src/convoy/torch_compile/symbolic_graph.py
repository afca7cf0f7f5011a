"""SymbolicGraph: a graph that Dynamo caught with symbolic shapes. Shapes that come again get a graph of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import fx

from convoy.torch_compile.dispatch_modes import modes_forbid_tuning
from convoy.torch_compile.inference_graph import InferenceGraph
from convoy.torch_compile.symbolic_batch import BatchInputs, SymbolicBatch
from convoy.user_warning import warn_user

MOST_SHAPES: Final = 8
"""Shapes of one graph that are compiled. Each is tuned, which takes minutes where nothing is known of it."""

MOST_SEEN: Final = 1000
"""Shapes that are remembered until one comes again."""

Compile = Callable[[fx.GraphModule, Sequence[torch.Tensor]], Callable[..., Any]]
"""Compiles a graph for inputs of fixed shapes."""


class SymbolicGraph:
    """Runs a graph with symbolic shapes by a graph of fixed shapes for each that came twice, else as PyTorch runs it.

    Without gradients, a batch of another size is split and padded among those that are compiled, where that is faster
    (`SymbolicBatch`).

    Dynamo makes a graph symbolic as soon as a batch of another size comes, such as the last one of an epoch, and uses it for
    all sizes from then on.

    Args:
        graph_module: the graph; some inputs are numbers.
        weights_at: inputs that are parameters or buffers: their shapes are fixed.
        compile_fixed: compiles the graph for fixed shapes.
    """

    def __init__(self, graph_module: fx.GraphModule, weights_at: Sequence[int], compile_fixed: Compile) -> None:
        self._module, self._compile = graph_module, compile_fixed
        count = sum(node.op == "placeholder" for node in graph_module.graph.nodes)
        self._free_at = tuple(sorted(set(range(count)) - set(weights_at)))
        self._lock = threading.Lock()
        self._seen: set[tuple[Any, ...]] = set()
        self._told = False
        self.fixed: dict[tuple[Any, ...], Callable[..., Any]] = {}
        batch = BatchInputs.of(graph_module, self._free_at)
        self._parts = None if batch is None else SymbolicBatch(graph_module, batch)
        self._untimed: set[tuple[Any, ...]] = set()

    def __call__(self, *inputs: Any) -> Any:
        """Run once."""
        key = _key([inputs[i] for i in self._free_at])
        found = self.fixed.get(key)
        again = key in self._seen
        if found is None:
            found = self._fixed(key, inputs)
        if found is None:
            return self._other(inputs, again=again)
        made = found(*[value for value in inputs if isinstance(value, torch.Tensor)])
        if key in self._untimed:
            self._take(key, inputs, found)
        return made

    def _other(self, inputs: Sequence[Any], *, again: bool) -> Any:
        """Run a call whose shapes are not compiled: by graphs of other batch sizes, or as PyTorch does."""
        made = None
        if self._parts is not None and not modes_forbid_tuning():
            made = self._parts(inputs, lambda part: self.fixed.get(_key([part[i] for i in self._free_at])))
        if made is not None:
            return made
        if again and len(self.fixed) >= MOST_SHAPES:
            self._tell()
        return self._module(*inputs)

    def _take(self, key: tuple[Any, ...], inputs: Sequence[Any], found: Callable[..., Any]) -> None:
        """Use a graph that was compiled in this call for other batch sizes too, if it runs a plan."""
        with self._lock:
            if key not in self._untimed:
                return
            self._untimed.remove(key)
        plan = found.plan if isinstance(found, InferenceGraph) else None
        if self._parts is not None and plan is not None and not plan.baseline:
            self._parts.take(inputs, found)

    def _fixed(self, key: tuple[Any, ...], inputs: Sequence[Any]) -> Callable[..., Any] | None:
        """The graph for these shapes; None where they are new, or too many were compiled."""
        if modes_forbid_tuning():
            return None
        with self._lock:
            if key in self.fixed:
                return self.fixed[key]
            if key not in self._seen:
                if len(self._seen) >= MOST_SEEN:
                    self._seen.clear()
                self._seen.add(key)
                return None
            if len(self.fixed) >= MOST_SHAPES:
                return None
            tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
            self.fixed[key] = self._compile(_with_numbers(self._module, inputs), tensors)
            self._untimed.add(key)
            return self.fixed[key]

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            warn_user(
                f"torch.compile: a graph was called with more than {MOST_SHAPES} shapes, so PyTorch runs the further ones."
                " Pad inputs to a few shapes"
            )


def _key(free: Sequence[Any]) -> tuple[Any, ...]:
    """Numbers, shapes and strides of inputs, and which of them share memory."""
    tensors = [value for value in free if isinstance(value, torch.Tensor)]
    memory = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return (
        *(tuple(value.shape) + value.stride() if isinstance(value, torch.Tensor) else value for value in free),
        *map(memory.index, memory),
    )


def _with_numbers(module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """The graph with its inputs' numbers written in; its inputs are the tensors alone."""
    graph = fx.Graph()
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    numbers = {
        node: value for node, value in zip(placeholders, inputs, strict=True) if not isinstance(value, torch.Tensor)
    }
    made: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        made[node] = numbers[node] if node in numbers else graph.node_copy(node, lambda used: made[used])
    return fx.GraphModule(module, graph)
