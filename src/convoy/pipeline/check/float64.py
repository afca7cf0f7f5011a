"""A model's outputs in float64: what errors of the end-to-end check are measured against."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from convoy.capture.copies import copy_module
from convoy.measurement.failure import is_out_of_memory
from convoy.pipeline.check.end_to_end import detached_outputs

ORACLE_FLOPS = 4e10
"""Operations above which a CPU's float64 oracle computes only the first images of the batch (about 10 s at 4 GFLOP/s)."""


def exact_outputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], flops: int) -> list[torch.Tensor]:
    """The model's floating-point outputs by a float64 copy of it.

    Above `ORACLE_FLOPS` on a CPU, or if a GPU has too little memory, only the first images of a batch are computed, and
    `errors_against` compares as many. If not even one image fits on the GPU, the host computes and holds the results.

    Raises:
        Exception: it does not fit on the device, and the model does not run on the host.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    batches = {t.shape[0] for t in tensors if t.dim()}
    images = batches.pop() if len(batches) == 1 else 1
    affordable = images if flops <= ORACLE_FLOPS else max(1, int(images * ORACLE_FLOPS / flops))
    keep = images if device.type == "cuda" else affordable

    def exact(images_kept: int, where: torch.device) -> list[torch.Tensor]:
        wide = [_wide(leaf, images_kept if images > 1 else None, where) for leaf in leaves]
        given, named = pytree.tree_unflatten(wide, spec)
        return detached_outputs(copy_module(model, where).double()(*given, **named))

    while True:
        try:
            return exact(keep, device)
        except Exception as error:  # everything: out of memory has several types; any other error is raised again
            if not is_out_of_memory(error):
                raise
            short = error.with_traceback(None)  # the traceback would keep the memory in use
        if keep == 1:
            break
        keep //= 2
    try:
        return exact(affordable, torch.device("cpu"))
    except (RuntimeError, MemoryError) as error:  # e.g. a tensor that the model makes on its own device
        raise short from error


def _wide(leaf: Any, images: int | None, device: torch.device) -> Any:
    """The first images of a tensor, floating-point values in float64; other values unchanged."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    kept = leaf[:images] if leaf.dim() and images else leaf
    return kept.to(device, torch.float64) if leaf.is_floating_point() else kept.to(device)
