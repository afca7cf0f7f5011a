"""Whether cuDNN searches for the algorithms of PyTorch's convolutions in a tuning call."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from convoy.engines.torch_flags import convolutions


@contextmanager
def cudnn_search(device: str, *, allowed: bool) -> Generator[None]:
    """A context for a tuning call. If no search is allowed, PyTorch's convolutions run as the user's flags say.

    By default PyTorch takes the plan that cuDNN's heuristics put first. A search by the clock builds and loads every plan: the
    first run of ResNet-50's training step at batch 32 takes 16.3 s with it and 0.5 without, DenseNet-169's 6.7 and 0.4. The
    plans that it finds made neither net faster (H200, cuDNN 9.19, commit a3920695). PyTorch keeps the first plan that it
    finds for a convolution, so later calls in this process run it too.

    Args:
        device: `cuda` or `cpu`, where nothing changes.
        allowed: whether cuDNN may search.
    """
    if allowed or device != "cuda":
        yield
        return
    users_own = torch.backends.cudnn.benchmark
    # A flag that is held stays as it is in the contexts inside, each of which would turn the search on (`HeldFlag`).
    with convolutions("as_torch", torch.device(device)):
        torch.backends.cudnn.benchmark = users_own
        yield
