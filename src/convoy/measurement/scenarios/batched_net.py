"""A net that answers batches of samples: the system under test of the scenarios."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


class BatchedNet:
    """Copies samples into the inputs of a program, runs it, and waits for the answers.

    Args:
        call: the net.
        inputs: for each batch size, example inputs of that program. With one size alone the inputs need not be batches: then the
            size is 1 and a sample is a whole call.
    """

    def __init__(self, call: Callable[..., Any], inputs: Mapping[int, Sequence[torch.Tensor]]) -> None:
        self._call = call
        self._inputs = {size: tuple(tensor.clone() for tensor in given) for size, given in inputs.items()}
        largest = inputs[max(inputs)]
        # Twice as many samples as a batch has, so that a batch begins at another sample each time.
        self._samples = tuple(torch.cat([tensor, tensor]) if tensor.dim() else tensor for tensor in largest)
        self._largest, self._next = max(inputs), 0
        self._is_cuda = any(tensor.is_cuda for tensor in largest)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The programs' batch sizes, ascending."""
        return tuple(sorted(self._inputs))

    def __call__(self, samples: int, size: int) -> None:
        """Answer that many samples by the program of that batch size."""
        for place, sample in zip(self._inputs[size], self._samples, strict=True):
            if place.dim():
                rows = samples * (len(place) // size)
                place[:rows].copy_(sample[self._next : self._next + rows])
        self._next = (self._next + samples) % self._largest
        with torch.no_grad():
            self._call(*self._inputs[size])
        if self._is_cuda:
            torch.cuda.synchronize()
