"""What happens to gradients between the backward pass and the update: averaged over processes, accumulated, unscaled, clipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import nn

BUCKET_BYTES: Final = 25 << 20
"""Bytes of gradients that travel together: DistributedDataParallel's own default (its argument bucket_cap_mb)."""


def put_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor], *, add: bool) -> None:
    """Give parameters their gradients, or add to those that they have, and call the hooks on them as autograd does.

    Args:
        parameters: in the order of the gradients.
        gradients: new tensors, which the parameters keep.
        add: whether this is a further micro-batch of one step.
    """
    made = [_hooked(parameter, gradient) for parameter, gradient in zip(parameters, gradients, strict=True)]
    if add:
        torch._foreach_add_([p.grad for p in parameters], made)
    else:
        for parameter, gradient in zip(parameters, made, strict=True):
            parameter.grad = gradient
    for parameter in parameters:
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(parameter)


def has_hooks(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether Python must be called for some gradient."""
    return any(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters)


def _hooked(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def average(gradients: Sequence[torch.Tensor], group: object) -> None:
    """Average gradients over the processes of a group, in place, in buckets of one dtype that travel together.

    Buckets go in reverse order, last layer first, as the backward pass makes them; all are under way before the first is
    waited for.
    """
    import torch.distributed as dist

    size = dist.get_world_size(group)  # type: ignore[arg-type]
    under_way = []
    for bucket in buckets(list(reversed(gradients))):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        under_way.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))  # type: ignore[arg-type]
    for bucket, flat, work in under_way:
        work.wait()
        parts = flat.div_(size).split([gradient.numel() for gradient in bucket])
        torch._foreach_copy_(list(bucket), [p.view(g.shape) for p, g in zip(parts, bucket, strict=True)])


def buckets(gradients: Sequence[torch.Tensor], limit: int = BUCKET_BYTES) -> list[list[torch.Tensor]]:
    """Gradients in their order, cut where the dtype changes and where a bucket would grow over the limit."""
    found: list[list[torch.Tensor]] = []
    held = 0
    for gradient in gradients:
        size = gradient.numel() * gradient.element_size()
        if not found or found[-1][0].dtype != gradient.dtype or held + size > limit:
            found.append([])
            held = 0
        found[-1].append(gradient)
        held += size
    return found


def clip(parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale all gradients down where their joint L2 norm is larger; gives the norm. Waits for no device."""
    return nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
