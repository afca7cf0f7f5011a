"""Weight gradients in a bound plan whose factors are gathered: their steps hand over the average instead of computing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from convoy.engines.base import Buffers, Executable
from convoy.engines.torch_operators import DTYPES
from convoy.graph.ir import Graph
from convoy.program.bound_plan import BoundPlan, BoundStep
from convoy.training.allreduce.bucket_completion import slot_writers
from convoy.training.allreduce.gathered_factors import GatheredFactors
from convoy.training.allreduce.gradient_allreduce import GradientAllReduce
from convoy.training.allreduce.weight_products import WeightProduct, kept_apart


@dataclass(slots=True)
class AverageCell:
    """Where a step finds the average that it hands over; None before it is there.

    Attributes:
        average: the gradient's average.
    """

    average: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class BoundProduct:
    """A weight gradient whose factors are gathered.

    Attributes:
        gradient: slot of the gradient.
        left: slot of the gradient of the layer's output.
        right: slot of the layer's input.
        dtype: of the gradient.
        cell: from which the step that makes the gradient takes it.
    """

    gradient: int
    left: int
    right: int
    dtype: torch.dtype
    cell: AverageCell = field(default_factory=AverageCell)

    @property
    def factors(self) -> tuple[int, int]:
        """The slots of both factors."""
        return self.left, self.right

    def begin(
        self, averages: GradientAllReduce, slots: Sequence[torch.Tensor | None], made: Sequence[torch.Event]
    ) -> torch.Event | None:
        """Begin to gather; the event says when the average is there, None that it is."""
        left, right = slots[self.left], slots[self.right]
        assert isinstance(averages, GatheredFactors)
        assert left is not None
        assert right is not None
        self.cell.average, there = averages.begin_product(left, right, self.dtype, made)
        return there


class HandOver(Executable):
    """Computes nothing; its results are a cell's average for one of them, and None."""

    allocates_results = True

    def __init__(self, at: int | None, cell: AverageCell) -> None:
        self._at, self._cell = at, cell

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Hand over the average."""
        del workspace
        if self._at is not None:
            assert self._cell.average is not None
            buffers.results[self._at] = self._cell.average
            self._cell.average = None


def bind_products(
    bound: BoundPlan, graph: Graph, found: Sequence[WeightProduct]
) -> tuple[BoundPlan, list[BoundProduct]]:
    """A bound plan without the steps of some products, and these.

    Args:
        bound: the plan, with steps that compute all gradients.
        graph: its graph.
        found: products of the graph; those that share a step with other nodes stay in the plan.
    """
    made = slot_writers(bound)
    slot_of = {name: slot for slot, name in reversed(list(enumerate(bound.slot_names)))}
    steps = list(bound.steps)
    products: list[BoundProduct] = []
    for product in kept_apart(found, [step.step.nodes for step in bound.steps]):
        names = (product.gradient, product.left, product.right)
        if not all(name in slot_of for name in names) or slot_of[product.left] not in made:
            continue
        gradient, left, right = (slot_of[name] for name in names)
        one = BoundProduct(gradient, left, right, DTYPES[graph.values[product.gradient].spec.dtype])
        products.append(one)
        for at, step in enumerate(steps):
            if step.step.nodes and set(step.step.nodes) <= set(product.nodes):
                steps[at] = _handing_over(step, one)
    return replace(bound, steps=tuple(steps)), products


def _handing_over(step: BoundStep, product: BoundProduct) -> BoundStep:
    at = step.results.index(product.gradient) if product.gradient in step.results else None
    return replace(step, executable=HandOver(at, product.cell), constants=())
