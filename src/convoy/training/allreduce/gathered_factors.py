"""Averages of linear layers' weight gradients from gathered factors: activations travel instead of gradients.

The weight gradient of a linear layer is dy^T x, summed over the rows of the batch. Its average over processes is the same product
over the rows of all processes. So each process gathers dy and x of all others and multiplies, where that takes less time than an
all-reduce of the gradient ("sufficient factor broadcasting": Xie et al., 2014; Zhang et al., Poseidon, 2017). AlexNet's first
linear layer sends 3.4 MB of bf16 factors for 128 images where its gradient has 151 MB.

The sum over all rows is taken in fp32 by one product, so the average is rounded less often than an average of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from convoy.program.cuda.recording import distinct_stream
from convoy.training.allreduce.gradient_allreduce import GradientAllReduce
from convoy.typed_torch import all_gather_flat

FACTORS: Final = "factors"
"""A value of `gradients` of `convoy.training_step`."""


class GatheredFactors(GradientAllReduce):
    """Averages gradients as `GradientAllReduce`, and those that are products of two values by gathering the values.

    On a GPU the products run on a second stream, so that the next bucket need not wait for them.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        super().__init__(group, device)
        self._multiplying = None if self.stream is None else distinct_stream(device, (self.stream,))

    @property
    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        """The streams that gradients and factors travel on, and that of the products; none on a CPU."""
        return (*super().streams, *filter(None, [self._multiplying]))

    def begin_product(
        self, left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype, made: Sequence[torch.Event]
    ) -> tuple[torch.Tensor, torch.Event | None]:
        """Gather the factors of a gradient when the events say that they are there, and multiply.

        Args:
            left: gradient of the layer's output, [rows, out features]; as many rows in every process.
            right: the layer's input, [rows, in features], of the same dtype.
            dtype: of the gradient.
            made: what to wait for.

        Returns:
            The average, [out features, in features], and when it is there; None on a CPU, where it is.
        """
        if self.stream is None or self._multiplying is None:
            return self._average(self._gathered(left), self._gathered(right), dtype), None
        with torch.cuda.stream(self.stream):
            for event in made:
                self.stream.wait_event(event)
            factors = self._gathered(left), self._gathered(right)
            there = self.stream.record_event()
        self._kept += [left, right, *factors]
        with torch.cuda.stream(self._multiplying):
            self._multiplying.wait_event(there)
            average = self._average(*factors, dtype)
            return average, self._multiplying.record_event()

    def _gathered(self, factor: torch.Tensor) -> torch.Tensor:
        """All processes' rows of a factor, in the order of ranks."""
        import torch.distributed as dist

        rows, features = factor.shape
        found = factor.new_empty(dist.get_world_size(self.group) * rows, features)
        all_gather_flat(found.view(-1), factor.contiguous().view(-1), group=self.group)
        return found

    def _average(self, left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """left^T x right, divided by the number of processes, summed in fp32."""
        import torch.distributed as dist

        scale = 1 / dist.get_world_size(self.group)
        if left.dtype == dtype:
            out = left.new_empty(left.shape[1], right.shape[1])
            return torch.addmm(out, left.t(), right, beta=0, alpha=scale)
        if left.device.type == "cuda":
            out = left.new_empty(left.shape[1], right.shape[1], dtype=dtype)
            return torch.addmm(out, left.t(), right, out_dtype=dtype, beta=0, alpha=scale)
        return torch.mm(left.t().to(dtype), right.to(dtype)).mul_(
            scale
        )  # a CPU has no product with another dtype's result
