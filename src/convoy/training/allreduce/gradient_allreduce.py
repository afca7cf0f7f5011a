"""What happens to gradients between the backward pass and the update: averaged over processes, accumulated, unscaled, clipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from convoy.program.cuda.recording import distinct_stream
from convoy.schedule import allreduce_buckets
from convoy.typed_torch import all_reduce, foreach_add, foreach_copy, split


def put_gradients(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], *, add: bool) -> None:
    """Give parameters their gradients, or add to those that they have, and call the hooks on them as autograd does.

    Args:
        parameters: in the order of the gradients.
        gradients: new tensors, which the parameters keep.
        add: whether this is a further micro-batch of one step.
    """
    made = [_hooked(parameter, gradient) for parameter, gradient in zip(parameters, gradients, strict=True)]
    if add:
        foreach_add([cast("torch.Tensor", p.grad) for p in parameters], made)
    else:
        for parameter, gradient in zip(parameters, made, strict=True):
            parameter.grad = gradient
    for parameter in parameters:
        hooks: dict[int, Callable[..., object]] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for hook in hooks.values():
            if hook(parameter) is not None:  # in autograd's words
                raise RuntimeError("Tensor post accumulate grad hooks should return None.")


def has_hooks(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether Python must be called for some gradient."""
    return any(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters)


def _hooked(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


class GradientAllReduce:
    """Gradients averaged over the processes of a group, in place, bucket by bucket; several may be under way at once.

    On a GPU everything happens on a stream of its own, which waits for what makes the gradients and for nothing else, so that the
    backward pass goes on meanwhile; nobody waits on the host, and all of it can be captured.

    Args:
        group: a process group of `torch.distributed`.
        device: where the gradients lie.

    Attributes:
        group: the process group.
        stream: what gradients are sent on; None on a CPU.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group = group
        self.stream = distinct_stream(device) if device.type == "cuda" else None
        self._arrival = self.stream
        self._under_way: list[Callable[[], None]] = []
        # Tensors that several streams use: freed when all were waited for.
        self._kept: list[torch.Tensor] = []

    def restart(self) -> None:
        """A step begins: nothing is under way, also where the last one was given up."""
        self._under_way.clear()
        self._kept.clear()

    def begin(self, bucket: Sequence[torch.Tensor], made: Sequence[torch.Event] = ()) -> None:
        """Send a bucket, of one dtype, when the events say that it is there."""
        if self.stream is None:
            self._send(bucket)
            return
        with torch.cuda.stream(self.stream):
            for event in made:
                self.stream.wait_event(event)
            self._send(bucket)
        with torch.cuda.stream(self._arrival):
            self.receive()

    def mark(self) -> torch.Event | None:
        """When all that has begun until now is there; None on a CPU, where `receive` waits."""
        return None if self._arrival is None else self._arrival.record_event()

    def end(self) -> None:
        """What follows finds all averages: on a GPU on torch's current stream."""
        if self.stream is None:
            self.receive()
        for stream in self.streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self._kept.clear()

    @property
    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        """The streams that gradients travel on; none on a CPU."""
        return tuple(dict.fromkeys(stream for stream in (self.stream, self._arrival) if stream is not None))

    def _send(self, bucket: Sequence[torch.Tensor]) -> None:
        self._under_way.append(self._begun(bucket))

    def receive(self) -> None:
        """Wait for all that has begun: on a CPU the host does, on a GPU torch's current stream."""
        for arrive in self._under_way:
            arrive()
        self._under_way.clear()

    def _begun(self, bucket: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Begin a bucket's all-reduce; the function that is returned waits for it and puts the averages in their places."""
        values = [memory_order(gradient) for gradient in bucket]
        flat = values[0] if len(values) == 1 else torch.cat(values)  # a large one is sent from where it lies
        work = self._reduce(flat)

        def arrive() -> None:
            work.wait()
            self._divide(flat)
            if flat.data_ptr() != bucket[0].data_ptr():
                put_averages(bucket, flat)

        return arrive

    def _reduce(self, flat: torch.Tensor) -> Any:
        """Begin to sum over the processes, in place; with NCCL to average."""
        import torch.distributed as dist

        how = dist.ReduceOp.AVG if self._sender_divides() else dist.ReduceOp.SUM
        return all_reduce(flat, how, group=self.group, async_op=True)

    def _divide(self, flat: torch.Tensor) -> None:
        """Make averages of sums, where the sender did not."""
        import torch.distributed as dist

        size = 1 if self._sender_divides() else dist.get_world_size(self.group)
        if size > 1:
            flat.div_(size)

    def _sender_divides(self) -> bool:
        """NCCL divides while it sends; others want a launch for it behind every bucket."""
        import torch.distributed as dist

        return dist.get_backend(self.group) == dist.Backend.NCCL


def allreduce_gradients(gradients: Sequence[torch.Tensor], averages: GradientAllReduce) -> None:
    """Average gradients that are all there: the same buckets as while they are made, so the same bits.

    Buckets go in reverse order, last layer first; all are under way before the first is waited for.
    """
    averages.restart()
    back = list(reversed(gradients))
    stream = averages.stream
    made = [torch.cuda.current_stream(stream.device).record_event()] if stream is not None else []
    for bucket in allreduce_buckets([g.numel() * g.element_size() for g in back], [g.dtype for g in back]):
        averages.begin([back[index] for index in bucket], made)
    averages.end()


def memory_order(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient's values as they lie in memory, without a copy where it is dense. Every process has the plan's formats."""
    return (gradient.permute(0, 2, 3, 1) if _is_nhwc(gradient) else gradient).reshape(-1)


def put_averages(bucket: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Copy a bucket's averages, which lie one behind the other, into its gradients."""
    parts = split(flat, [gradient.numel() for gradient in bucket])
    foreach_copy(bucket, [_like(part, g) for part, g in zip(parts, bucket, strict=True)])


def _like(part: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Such values in the gradient's shape."""
    if not _is_nhwc(gradient):
        return part.view(gradient.shape)
    n, c, h, w = gradient.shape
    return part.view(n, h, w, c).permute(0, 3, 1, 2)


def _is_nhwc(gradient: torch.Tensor) -> bool:
    return gradient.dim() == 4 and gradient.is_contiguous(memory_format=torch.channels_last)


def clip(parameters: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale all gradients down where their joint L2 norm is larger; gives the norm. Waits for no device."""
    return nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
