"""The processes that train one model: their number, and the random states that they hand to the one that writes checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from convoy.training.trainer.checkpoint import RandomState
from convoy.typed_torch import all_gather, new_group, process_group


def host_group(model: nn.Module) -> Any:
    """The processes that train a model together, as a group that communicates through their hosts; None for one alone.

    The model's own group would mix these messages with the all-reduces of a captured step.
    """
    import torch.distributed as dist

    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return None
    ranks = dist.get_process_group_ranks(process_group(model))
    return new_group(ranks, backend="gloo", use_local_synchronization=True)


def gathered_random_states(own: RandomState, group: Any) -> list[RandomState]:
    """Every process's random state, in the order of ranks."""
    import torch.distributed as dist

    if group is None:
        return [own]
    found: list[RandomState] = [{} for _ in range(dist.get_world_size(group))]
    for name, state in own.items():
        parts = [torch.empty_like(state) for _ in found]
        all_gather(parts, state, group=group)
        for each, part in zip(found, parts, strict=True):
            each[name] = part
    return found


def process_rank() -> int:
    """Rank of this process; 0 where it is alone."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def process_count() -> int:
    """Number of processes; 1 where this one is alone."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
