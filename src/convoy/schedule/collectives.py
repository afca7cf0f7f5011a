"""All-reduces of gradients, as launches of a schedule: their buckets, and their estimated time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

BUCKET_BYTES: Final = 25 << 20
"""Bytes of gradients in one bucket: DistributedDataParallel's default (its argument bucket_cap_mb)."""

LAST_BUCKET_BYTES: Final = 1 << 20
"""Bytes of the last bucket: no computation is left to hide it, so it is small. ResNet-50's stem and first stage fit; 25 MiB
take 90 us at 290 GB/s (bench/results/scaling-nvidia-h200.csv), plus their copies."""

LATENCY_US: Final = 20.0
"""Latency of one all-reduce, and (`BYTES_PER_US`) the rate of a GPU with NVLink: rough values, which only order launches."""

BYTES_PER_US: Final = 200e3

NCCL_SHARE: Final = 0.1
"""Share of the device that NCCL's channels take while they send: 16 blocks on about 132 multiprocessors."""


@dataclass(frozen=True, slots=True)
class Collective:
    """An all-reduce of one bucket, as a launch: it reads gradients; only the optimizer's update reads its results.

    Attributes:
        args: names of the gradients.
        time_us: estimated time.
        results: none.
    """

    args: tuple[str, ...]
    time_us: float
    results: tuple[str, ...] = ()


def buckets(sizes: Sequence[int], dtypes: Sequence[object], limit: int = BUCKET_BYTES) -> list[list[int]]:
    """Indices of tensors in their order, split where the dtype changes and where a bucket would exceed the limit.

    Args:
        sizes: bytes of each tensor.
        dtypes: dtype of each tensor.
        limit: bytes of a bucket; a larger tensor is a bucket by itself.
    """
    found: list[list[int]] = []
    held = 0
    for index, size in enumerate(sizes):
        if not found or dtypes[found[-1][-1]] != dtypes[index] or held + size > limit:
            found.append([])
            held = 0
        found[-1].append(index)
        held += size
    return found


def allreduce_buckets(sizes: Sequence[int], dtypes: Sequence[object], limit: int = BUCKET_BYTES) -> list[list[int]]:
    """`buckets` of gradients in sending order, last layer first; the last bucket is split at `LAST_BUCKET_BYTES`."""
    found = buckets(sizes, dtypes, limit)
    if not found:
        return found
    *others, last = found
    kept = len(last) - 1
    while kept > 0 and sum(sizes[i] for i in last[kept - 1 :]) <= LAST_BUCKET_BYTES:
        kept -= 1
    return [*others, *(part for part in (last[:kept], last[kept:]) if part)]


def collectives(
    names: Sequence[str], sizes: Sequence[int], dtypes: Sequence[object], processes: int, limit: int = BUCKET_BYTES
) -> list[Collective]:
    """The all-reduces of a step's gradients: last layer first, as the backward pass makes them.

    A ring sends 2 (n - 1) / n of the bytes (Patarasuk and Yuan, 2009).

    Args:
        names: names of the gradients, in the parameters' order.
        sizes: bytes of each.
        dtypes: dtype of each.
        processes: number of processes; with one there is nothing to send.
        limit: bytes of a bucket.
    """
    if processes < 2:
        return []
    back = range(len(names))[::-1]
    found: list[Collective] = []
    for bucket in allreduce_buckets([sizes[i] for i in back], [dtypes[i] for i in back], limit):
        members = [back[i] for i in bucket]
        sent = 2 * (processes - 1) / processes * sum(sizes[i] for i in members)
        found.append(Collective(tuple(names[i] for i in members), LATENCY_US + sent / BYTES_PER_US))
    return found
