"""Overlap: gradients are averaged over processes while the backward pass goes on, each bucket as soon as it is complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from convoy.program.bound_plan import BoundPlan
from convoy.schedule import allreduce_buckets
from convoy.training.allreduce.bound_products import BoundProduct
from convoy.training.allreduce.bucket_completion import BucketCompletion, slot_writers
from convoy.training.allreduce.gradient_allreduce import GradientAllReduce


class OverlappedAllReduce:
    """The all-reduces of a bound step, and after which launch each begins.

    The buckets are those of `schedule.allreduce_buckets`, as in an all-reduce after the backward pass: the same values travel
    together, so the averages have the same bits. A gradient whose factors are gathered instead is a bucket by itself; buckets
    then leave in the order in which they are complete.

    Args:
        bound: loss, gradients and new buffers.
        count: number of gradients; they are the outputs behind the loss.
        averages: what sends them.
        products: gradients whose factors are gathered; `averages` is then a `GatheredFactors`.

    Attributes:
        buckets: the slots of the gradients that travel together, in the order in which they leave.
    """

    def __init__(
        self, bound: BoundPlan, count: int, averages: GradientAllReduce, products: Sequence[BoundProduct] = ()
    ) -> None:
        self._averages = averages
        self._products = {product.gradient: product for product in products}
        specs = {slot: spec for step in bound.steps for slot, spec in zip(step.results, step.specs, strict=True)}
        made = slot_writers(bound)
        back = bound.outputs[count:0:-1]
        sent = [slot for slot in back if slot not in self._products]
        found = allreduce_buckets([specs[slot].size_bytes for slot in sent], [specs[slot].dtype for slot in sent])
        self.buckets = [tuple(sent[index] for index in bucket) for bucket in found]
        if products:  # their factors are in their slots when these are complete, and may not be later
            self.buckets += [(slot,) for slot in self._products]
            self.buckets.sort(key=lambda bucket: max(self._launches(bucket, made)))
        waits = [self._launches(bucket, made) for bucket in self.buckets]
        # A collective is begun in the same order by every process, so one that is ready early waits for those before it.
        self._completion = BucketCompletion(waits, averages.stream, in_order=True)
        self._arrivals: dict[int, torch.Event | None] = {}

    def restart(self) -> None:
        """A step begins: nothing is under way, also where the last one was given up."""
        self._averages.restart()
        self._completion.end()
        self._arrivals.clear()

    def after(self, index: int, slots: Sequence[torch.Tensor | None]) -> None:
        """A launch was given to torch's current stream; begin the buckets that are complete with it."""
        for number in self._completion.after(index):
            bucket, made = self.buckets[number], self._completion.events([number])
            if bucket[0] in self._products:
                product = self._products[bucket[0]]
                self._arrivals[number] = product.begin(self._averages, slots, made)
            else:
                self._averages.begin([slots[slot] for slot in bucket], made)  # pyright: ignore[reportArgumentType]
                self._arrivals[number] = self._averages.mark()

    def wait_for(self, number: int) -> None:
        """What follows on torch's current stream finds the averages of a bucket that has begun."""
        arrival, stream = self._arrivals[number], self._averages.stream
        if arrival is None or stream is None:
            self._averages.receive()
        else:
            torch.cuda.current_stream(stream.device).wait_event(arrival)

    def end(self) -> None:
        """What follows on torch's current stream finds the averages."""
        self._completion.end()
        self._averages.end()
        self._arrivals.clear()

    def _launches(self, bucket: Sequence[int], made: Mapping[int, int]) -> set[int]:
        """The launches that make the gradients or the factors of a bucket."""
        product = self._products.get(bucket[0])
        return {made[slot] for slot in (bucket if product is None else product.factors) if slot in made}
