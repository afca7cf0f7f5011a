"""SymbolicBatch: batches of a graph with a symbolic batch size, computed by its graphs of fixed batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from convoy.dynamic.batch_split import cheapest_split
from convoy.dynamic.dims import DynamicDims
from convoy.dynamic.independence import why_not_split
from convoy.dynamic.layouts import empty_joined
from convoy.dynamic.timing import call_ms
from convoy.pipeline.isolation import preserve_global_state
from convoy.plan import SizeRange

Graph = Callable[..., Any]
"""Computes a graph; called with its tensors alone, or with all its inputs."""


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """Where a graph's batch size stands in its inputs.

    Attributes:
        number: the input that is the batch size.
        tensors: inputs whose dimension 0 it is.
    """

    number: int
    tensors: tuple[int, ...]

    @staticmethod
    def of(module: fx.GraphModule, free_at: Sequence[int]) -> BatchInputs | None:
        """Those of a graph by Dynamo's symbols; None if dimension 0 of the first tensor is fixed, or is a size elsewhere too."""
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        values: dict[int, Any] = {index: placeholders[index].meta.get("example_value") for index in free_at}
        tensors = {index: value for index, value in values.items() if isinstance(value, torch.Tensor)}
        first = next((value for value in tensors.values() if value.dim()), None)
        symbol = None if first is None else _expression(first.shape[0])
        if symbol is None:
            return None
        batched: list[int] = []
        for index, tensor in tensors.items():
            for dim, side in enumerate(tensor.shape):
                expression = _expression(side)
                if expression is None or symbol not in expression.free_symbols:
                    continue
                if dim or expression != symbol:
                    return None
                batched.append(index)
        numbers = [index for index, value in values.items() if _expression(value) == symbol]
        return BatchInputs(numbers[0], tuple(batched)) if len(numbers) == 1 else None

    def part(self, inputs: Sequence[Any], start: int, count: int, batch: int) -> list[Any]:
        """The inputs for some images of a batch; the last image is repeated until there are `batch`."""
        made = list(inputs)
        made[self.number] = batch
        for index in self.tensors:
            some = inputs[index].narrow(0, start, count)
            if batch > count:
                made[index] = torch.cat((some, some[-1:].expand(batch - count, *some.shape[1:])))
            else:
                made[index] = some
        return made


class SymbolicBatch:
    """Splits and pads batches among the batch sizes that were compiled, where that is faster than PyTorch and proven right.

    Args:
        module: the symbolic graph.
        batch: where its batch size stands.
    """

    def __init__(self, module: fx.GraphModule, batch: BatchInputs) -> None:
        self._module, self._batch = module, batch
        self._splits: bool | None = None
        self._times: dict[tuple[Any, ...], dict[int, float]] = {}
        self._stock: dict[tuple[Any, ...], dict[int, float]] = {}
        self._chosen: dict[tuple[Any, ...], tuple[int, ...]] = {}

    def take(self, inputs: Sequence[Any], run: Graph) -> None:
        """Use a compiled graph for other batches too, after it has run once on these inputs: it is timed beside PyTorch."""
        others, images = self._sizes(inputs)
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        if images < 2 or _needs_gradient(tensors):
            return
        with preserve_global_state(), torch.no_grad():
            if self._splits is None:
                self._splits = self._may_split(inputs, images)
            if not self._splits:
                return
            device = inputs[self._batch.tensors[0]].device
            self._times.setdefault(others, {})[images] = call_ms(lambda: run(*tensors), device)
            self._stock.setdefault(others, {})[images] = call_ms(lambda: self._module(*inputs), device)
        self._chosen = {}

    def __call__(self, inputs: Sequence[Any], find: Callable[[Sequence[Any]], Graph | None]) -> Any:
        """The results; None where PyTorch is to compute them.

        Args:
            inputs: all inputs.
            find: the compiled graph for inputs of fixed shapes.
        """
        others, images = self._sizes(inputs)
        times = self._times.get(others)
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        if not times or images < 1 or _needs_gradient(tensors):
            return None
        key = (*others, images)
        if key not in self._chosen:
            split = cheapest_split(images, times)
            faster = split.cost_ms < _estimate(images, self._stock[others])
            self._chosen[key] = split.batches if faster else ()
        whole: list[torch.Tensor] = []
        start = 0
        for batch in self._chosen[key]:
            count = min(batch, images - start)
            part = self._batch.part(inputs, start, count, batch)
            run = find(part)
            if run is None:  # other strides
                return None
            made = run(*[value for value in part if isinstance(value, torch.Tensor)])
            whole = whole or [empty_joined(tensor, images) for tensor in made]
            for target, tensor in zip(whole, made, strict=True):
                target.narrow(0, start, count).copy_(tensor.narrow(0, 0, count))
            start += count
        return whole or None

    def _sizes(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], int]:
        """All numbers but the batch size, and the batch size."""
        numbers = [value for i, value in enumerate(inputs) if i != self._batch.number]
        others = tuple(value for value in numbers if not isinstance(value, torch.Tensor))
        return others, int(inputs[self._batch.number])

    def _may_split(self, inputs: Sequence[Any], images: int) -> bool:
        places = [index for index, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        shapes = tuple(tuple(inputs[index].shape) for index in places)
        batched = tuple((places.index(index), 0) for index in self._batch.tensors)
        dims = DynamicDims((SizeRange("batch", 2, images, images, batched),), shapes)

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            del kwargs
            given = list(args)
            given[self._batch.number] = given[self._batch.tensors[0]].shape[0]
            made = self._module(*given)
            return made if all(isinstance(one, torch.Tensor) for one in made) else ()

        return images > 2 and not why_not_split(run, (tuple(inputs), {}), dims)


def _expression(size: Any) -> Any:
    """The expression of a symbolic size; None for anything else."""
    symbolic: type[Any] = torch.SymInt
    return size.node.expr if isinstance(size, symbolic) else None


def _needs_gradient(tensors: Sequence[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _estimate(images: int, times: dict[int, float]) -> float:
    """PyTorch's time for a batch, on the line between known ones; beyond them in proportion, which is never too long."""
    known = sorted(times)
    for low, high in pairwise(known):
        if low <= images <= high:
            return times[low] + (times[high] - times[low]) * (images - low) / (high - low)
    near = known[0] if images < known[0] else known[-1]
    return times[near] * images / near
