"""The run of a step's program in which the factors of weight gradients are gathered."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any, Final

import torch

from convoy.program.eager import EagerProgram
from convoy.training.allreduce.bound_products import bind_products
from convoy.training.allreduce.gathered_factors import GatheredFactors
from convoy.training.allreduce.gradient_allreduce import GradientAllReduce
from convoy.training.allreduce.overlapped_allreduce import OverlappedAllReduce
from convoy.training.allreduce.weight_products import weight_products
from convoy.training.plan_agreement import host_group
from convoy.training.step_program import StepProgram
from convoy.typed_torch import all_reduce


@dataclass(frozen=True, slots=True)
class StepRun:
    """A program that runs, and what averages its gradients.

    Attributes:
        runnable: (parameters, buffers, batch) → (loss, gradients, new buffers).
        overlap: averages gradients during the backward pass; None if they are averaged after it.
        sent_bytes: bytes of gradients whose all-reduce would send as much; 0 if that was not counted.
    """

    runnable: EagerProgram
    overlap: OverlappedAllReduce | None
    sent_bytes: float = 0.0


def factored_run(program: StepProgram, averages: GradientAllReduce | None, device: torch.device) -> StepRun | None:
    """The run with gathered factors; None if they are not asked for, or pay for no gradient of the plan.

    Args:
        program: the step's.
        averages: what averages its gradients.
        device: the model's.
    """
    import torch.distributed as dist

    if not isinstance(averages, GatheredFactors) or program.runnable is None or program.capture is None:
        return None
    graph, count = program.capture.captured.graph, len(program.capture.learned)
    processes = dist.get_world_size(averages.group)
    found = weight_products(graph, graph.outputs[1 : 1 + count])
    paying = [product for product in found if product.pays(graph, processes, device.type)]
    bound, products = bind_products(program.runnable.bound, graph, paying)
    if not products:
        return None
    names = {bound.slot_names[product.gradient] for product in products}
    gathered = {product.gradient: product for product in found if product.gradient in names}
    size = {name: graph.values[name].spec.size_bytes for name in graph.values}
    # A process sends its factors to n - 1 others, where an all-reduce sends 2 (n - 1) / n of the gradient's bytes.
    factors = sum(size[one.left] + size[one.right] for one in gathered.values()) * processes / 2
    reduced = sum(size[name] for name in graph.outputs[1 : 1 + count] if name not in gathered)
    overlap = OverlappedAllReduce(bound, count, averages, products)
    return StepRun(program.runnable.with_bound(bound), overlap, reduced + factors)


STEP_PATIENCE: Final = dt.timedelta(minutes=10)
"""How long a process waits for the others to begin a step: NCCL's own limit of a collective."""


class StepAgreement:
    """Whether all processes can gather factors in a step: one that cannot, as for another batch, needs all to do without.

    Args:
        group: the processes.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._talk: Any = None  # made in the first step, which all processes take

    def all_can(self, can: bool) -> bool:
        """Whether every process says so in this step; each must ask."""
        if self._talk is None:
            self._talk = host_group(self._group, STEP_PATIENCE)
        import torch.distributed as dist

        said = torch.tensor([int(can)])
        all_reduce(said, dist.ReduceOp.MIN, group=self._talk)
        return bool(said.item())
