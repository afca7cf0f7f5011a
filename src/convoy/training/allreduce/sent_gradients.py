"""How gradients are sent to the other processes: the values of `gradients` of `convoy.training_step`, and the all-reduces."""

from __future__ import annotations

from typing import Any, Final

import torch

from convoy.capture import TrainingCapture
from convoy.schedule import Collective, collectives
from convoy.training.allreduce.bf16_allreduce import BF16, BF16_ERROR_FEEDBACK, Bf16AllReduce, Bf16ErrorFeedback
from convoy.training.allreduce.gathered_factors import FACTORS, GatheredFactors
from convoy.training.allreduce.gradient_allreduce import GradientAllReduce

GRADIENTS: Final = (BF16, BF16_ERROR_FEEDBACK, FACTORS)
"""Values of `gradients`; None: gradients are sent in their own dtype."""


def make_allreduce(group: Any, device: torch.device, gradients: str | None) -> GradientAllReduce:
    """What averages gradients over a process group.

    Args:
        group: a process group of `torch.distributed`. Gradients of one process are sent to nobody and never rounded.
        device: where the gradients lie.
        gradients: one of `GRADIENTS`, or None.
    """
    import torch.distributed as dist

    if gradients is None or dist.get_world_size(group) == 1:
        return GradientAllReduce(group, device)
    kinds = {BF16: Bf16AllReduce, BF16_ERROR_FEEDBACK: Bf16ErrorFeedback, FACTORS: GatheredFactors}
    return kinds[gradients](group, device)


def collectives_of(capture: TrainingCapture, group: Any) -> list[Collective]:
    """The all-reduces of a step's gradients over a process group, as launches of a schedule.

    A group of one process is planned for as one of two, so that its plan serves any number.
    """
    import torch.distributed as dist

    graph = capture.captured.graph
    names = graph.outputs[1 : 1 + len(capture.learned)]
    specs = [graph.values[name].spec for name in names]
    processes = max(2, dist.get_world_size(group))
    return collectives(names, [spec.size_bytes for spec in specs], [spec.dtype for spec in specs], processes)
