"""Gradients averaged over processes in bf16: half the bytes of fp32, as by DistributedDataParallel's `bf16_compress_hook`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from convoy.program.cuda.recording import distinct_stream
from convoy.training.allreduce.gradient_allreduce import GradientAllReduce, memory_order, put_averages
from convoy.typed_torch import all_gather_flat, all_to_all, foreach_add, foreach_copy, split

BF16: Final = "bf16"
"""fp32 gradients are rounded to bf16 and summed in bf16 by one all-reduce."""

BF16_ERROR_FEEDBACK: Final = "bf16_error_feedback"
"""fp32 gradients are sent in bf16 and summed in fp32. What rounding dropped is added to the next step's gradients."""


class Bf16AllReduce(GradientAllReduce):
    """fp32 gradients averaged in bf16; gradients of other dtypes are sent as they are.

    On a GPU averages are converted to fp32 on a second stream, so that the next bucket's conversion and all-reduce need not wait
    for it.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        super().__init__(group, device)
        if self.stream is not None:
            self._arrival = distinct_stream(device, (self.stream,))

    def _sender_divides(self) -> bool:
        """NCCL multiplies by 1 / n in bf16, which is exact for powers of two alone."""
        import torch.distributed as dist

        size = dist.get_world_size(self.group)
        return super()._sender_divides() and not size & (size - 1)

    def _begun(self, bucket: Sequence[torch.Tensor]) -> Callable[[], None]:
        return super()._begun(bucket) if bucket[0].dtype != torch.float32 else self._begun_in_bf16(bucket)

    def _begun_in_bf16(self, bucket: Sequence[torch.Tensor]) -> Callable[[], None]:
        values = [memory_order(gradient) for gradient in bucket]
        flat = torch.empty(sum(value.numel() for value in values), dtype=torch.bfloat16, device=values[0].device)
        foreach_copy(split(flat, [value.numel() for value in values]), values)
        self._kept.append(flat)
        work = self._reduce(flat)

        def arrive() -> None:
            work.wait()
            put_averages(bucket, flat)
            if not self._sender_divides():
                for gradient in bucket:
                    self._divide(gradient)  # in fp32: a sum of bf16 is rounded once less

        return arrive


class Bf16ErrorFeedback(Bf16AllReduce):
    """fp32 gradients averaged by two exchanges in bf16, each of whose rounding errors is added to what the next step sends.

    Each process sums one share of a bucket in fp32 and sends that share's average to all. So the bytes are those of an all-reduce
    in bf16, and a value is rounded twice: where it is sent, and as an average. Over many steps the sum of the averages differs
    from the exact one by the last step's errors alone.

    The errors take as many bytes as the gradients. They belong to this object: a checkpoint does not have them.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        super().__init__(group, device)
        self._errors: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self._number = 0

    def restart(self) -> None:
        """A step begins, with the first bucket."""
        super().restart()
        self._number = 0

    def _begun_in_bf16(self, bucket: Sequence[torch.Tensor]) -> Callable[[], None]:
        import torch.distributed as dist

        values = [memory_order(gradient) for gradient in bucket]
        counts = [value.numel() for value in values]
        size, total = dist.get_world_size(self.group), sum(counts)
        error, share_error = self._errors_of(bucket, size, total)
        foreach_add(split(error[:total], counts), values)
        sent = _rounded(error)
        parts = torch.empty_like(sent)
        self._kept += [sent, parts]
        work = all_to_all(parts, sent, group=self.group, async_op=True)

        def arrive() -> None:
            work.wait()
            share_error.add_(parts.view(size, -1).sum(0, dtype=torch.float32).div_(size))
            share = _rounded(share_error)
            found = torch.empty_like(sent)
            self._kept += [share, found]
            all_gather_flat(found, share, group=self.group)
            put_averages(bucket, found[:total])

        return arrive

    def _errors_of(self, bucket: Sequence[torch.Tensor], size: int, total: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the last rounding dropped: of a bucket's gradients, and of this process's share of the averages; flat, fp32.

        The bucket is padded with zeros to a multiple of the number of processes.

        Raises:
            RuntimeError: there are none yet, and the step is being captured: each replay would set them to 0 again.
        """
        key = (self._number, *(tuple(gradient.shape) for gradient in bucket))
        self._number += 1
        if key not in self._errors:
            device = bucket[0].device
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("error feedback needs a step that was launched before it is captured")
            share = -(-total // size)
            self._errors[key] = torch.zeros(share * size, device=device), torch.zeros(share, device=device)
        return self._errors[key]


def _rounded(values: torch.Tensor) -> torch.Tensor:
    """fp32 values in bf16; what rounding drops stays in `values`, but nothing of infinities and NaN, which would never leave."""
    found = values.to(torch.bfloat16)
    values.sub_(found).nan_to_num_(0.0, 0.0, 0.0)
    return found
