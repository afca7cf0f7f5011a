"""Gradients on their way to other processes, as launches of a schedule: what travels together, and how long it may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

BUCKET_BYTES: Final = 25 << 20
"""Bytes of gradients that travel together: DistributedDataParallel's own default (its argument bucket_cap_mb)."""

LAST_BUCKET_BYTES: Final = 1 << 20
"""Bytes of the bucket that leaves last: nothing is left to hide it behind, so it holds little more than must wait so long.
ResNet-50's stem and first stage fit; 25 MiB take 90 us at 290 GB/s (bench/results/scaling-nvidia-h200.csv), and their copies come
on top."""

LATENCY_US: Final = 20.0
"""Of one all-reduce, and bytes a microsecond that a GPU of a host with NVLink sends: guesses of the right size, which only order
launches."""

BYTES_PER_US: Final = 200e3

NCCL_SHARE: Final = 0.1
"""Part of the device that NCCL's channels take while they send: 16 blocks of about 132 multiprocessors."""


@dataclass(frozen=True, slots=True)
class Collective:
    """An all-reduce of one bucket, as a launch: it reads gradients, and nothing but the update reads what it makes.

    Attributes:
        args: names of the gradients.
        time_us: how long it may take.
        results: none.
    """

    args: tuple[str, ...]
    time_us: float
    results: tuple[str, ...] = ()


def buckets(sizes: Sequence[int], dtypes: Sequence[object], limit: int = BUCKET_BYTES) -> list[list[int]]:
    """Indices of tensors in their order, cut where the dtype changes and where a bucket would grow over the limit.

    Args:
        sizes: bytes of each.
        dtypes: of each.
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
        names: of the gradients, in the parameters' order.
        sizes: bytes of each.
        dtypes: of each.
        processes: that take part; with one there is nothing to send.
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
