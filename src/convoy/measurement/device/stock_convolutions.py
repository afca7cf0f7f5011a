"""How cuDNN's algorithms are chosen where a tuning call runs PyTorch's own convolutions."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from convoy.engines.torch_flags import convolutions


class _Current:
    """How the call that runs now has them chosen; one call tunes at a time (`convoy.pipeline.isolation`)."""

    searches: bool = True


@contextmanager
def first_answer_wanted(wanted: bool) -> Generator[None]:
    """A context in which `stock_convolutions` leaves PyTorch's flags as the user has them, if `wanted` is set.

    By default PyTorch takes the plan that cuDNN's heuristics put first. A search by the clock builds and loads every plan: the
    first run of ResNet-50's training step at batch 32 takes 16.3 s with it and 0.5 without, DenseNet-169's 6.7 and 0.4. The
    plans that it finds made neither net faster (H200, cuDNN 9.19, commit a3920695).
    """
    before = _Current.searches
    _Current.searches = not wanted
    try:
        yield
    finally:
        _Current.searches = before


def stock_convolutions(device: torch.device) -> AbstractContextManager[object]:
    """A context for PyTorch's own runs in a tuning call: on CUDA cuDNN searches, unless a first answer is wanted.

    PyTorch keeps the first plan that is found for a convolution, also for later calls. So every run of a tuning call is in this
    context, from the first one on.
    """
    if device.type == "cuda" and not _Current.searches:
        return nullcontext()
    return convolutions("as_torch", device)
