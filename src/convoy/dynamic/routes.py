"""How a call of sizes without a program of its own is computed."""

from __future__ import annotations

from typing import Any

from convoy.dynamic.size_programs import BatchPart, Route, SizePrograms
from convoy.program import calls
from convoy.program.program_cache import ProgramCache


def find_route(cache: ProgramCache, known: SizePrograms, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Route:
    """How a call without a program of its own is computed."""
    dims = known.dims
    unknown = Route(reason=cache.why_unknown(args, kwargs))
    formed = cache.in_form(args, kwargs, known.example)
    if formed is None:
        return unknown
    given, arrangement = formed
    sizes = dims.sizes_of(list(calls.tensors_of(given)))
    if sizes is None:
        return unknown
    outside = dims.outside(sizes)
    if outside:
        return Route(reason=f"{outside}: the stock module runs; give `dynamic` a wider range")
    split = known.split(sizes)
    if split is None:
        return Route(sizes=sizes, reason=known.why_no_program(sizes))
    parts: list[BatchPart] = []
    start = 0
    for batch in split.batches:
        count = min(batch, sizes[0] - start)
        signature = calls.signature_of(*dims.images(given, start, count, batch))
        parts.append(BatchPart(start, count, batch, signature))
        start += count
    found = [cache.tuned.get(part.signature) for part in parts]
    if any(cached is None for cached in found):  # another dtype, device or option
        return unknown
    if all(cached is not None and cached.program.runnable is None for cached in found):
        return Route(sizes, arrangement)
    return Route(sizes, arrangement, tuple(parts))
