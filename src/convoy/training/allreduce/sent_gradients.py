"""How gradients are sent to the other processes: the values of `gradients` of `convoy.training_step`."""

from __future__ import annotations

from typing import Any, Final

import torch

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
