"""The tile configurations that `pruned.cuda` offers for a layer, by rising estimated time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from convoy.engines.base import Knobs
from convoy.engines.sparse_weights.generated_tile import RESERVED_BYTES, VECTORS, GeneratedTile, block_bytes, template
from convoy.engines.sparse_weights.generated_tile_cost import counts_of, estimate_us
from convoy.errors import InputError
from convoy.problem import ConvProblem
from convoy.target import Target

MOST_THREADS: Final = 1024
"""Of a block: the more threads run the same code, the less of it a pixel costs."""

MOST_STEPS: Final = 8

STEP_FMAS: Final = 64
"""Multiply-adds of a thread in one step, at least: a barrier costs as much as some ten."""

MOST_FMAS: Final = 400_000
"""Multiply-add instructions of one tile configuration, at most: at half a millisecond each, twelve seconds of 16 cores."""

SPACE_FMAS: Final = 1_000_000
"""Multiply-add instructions of all tile configurations of a space."""

MOST_FORMS: Final = 16

LANES: Final = (32, 64, 128, 256, 384, 512, 768, 1024)
FILTERS: Final = (4, 8, 16, 32, 64)
SPLITS: Final = (1, 2, 4, 8, 16)


def tile_configs(problem: ConvProblem, target: Target) -> list[GeneratedTile]:
    """Forms to try, best first by the model: of each number of sums the best, and more of the best of all.

    As many as `MOST_FORMS`, and fewer the more code they write.
    """
    assert problem.mask is not None
    found = sorted(_all(problem, target), key=lambda config: estimate_us(problem, config, target))
    firsts: dict[tuple[int, int], GeneratedTile] = {}
    for config in found:
        firsts.setdefault((config.vectors, config.filters), config)
    near = [
        config for config in found if found and (config.vectors, config.filters) == (found[0].vectors, found[0].filters)
    ]
    wanted = dict.fromkeys([*firsts.values(), *near])
    chosen: list[GeneratedTile] = []
    fmas = 0
    for config in sorted(wanted, key=found.index):
        fmas += problem.mask.nonzeros * config.vectors
        if len(chosen) == MOST_FORMS or (len(chosen) >= 2 and fmas > SPACE_FMAS):
            break
        chosen.append(config)
    return chosen


def tile_config_of(problem: ConvProblem, knobs: Knobs, target: Target) -> GeneratedTile:
    """The tile configuration of the given knobs; raises InputError if it does not fit the problem or the device."""
    numbers = {name: knobs.integer(name) for name in ("lanes", "vectors", "filters", "splits")}
    expected = "settings of the engine's space for this problem and device"
    if min(numbers.values()) < 1 or numbers["vectors"] not in VECTORS:
        raise InputError("knobs", str(knobs), expected)
    config = _fitted(problem, GeneratedTile(**numbers, channels=1, shared_kib=1, resident=1), target)
    if config is None:
        raise InputError("knobs", str(knobs), expected)
    return config


def _all(problem: ConvProblem, target: Target) -> Iterator[GeneratedTile]:
    """Every tile configuration that fits the device."""
    assert problem.mask is not None
    pixels = problem.n * problem.p * problem.q
    for vectors in VECTORS:
        if vectors > 1 and problem.mask.nonzeros * vectors > MOST_FMAS:
            continue
        for lanes in LANES:
            if lanes > 64 and (lanes // 2) * vectors >= pixels * 1.3:
                continue  # half of the threads would be enough; 64 suit the smallest
            for filters in FILTERS:
                if (filters > FILTERS[0] and filters // 2 >= problem.k) or filters * vectors > 128:
                    continue
                for splits in SPLITS:
                    if lanes * splits < 64:
                        continue
                    config = _fitted(problem, GeneratedTile(lanes, vectors, filters, splits, 1, 1, 1), target)
                    if config is not None:
                        yield config


def _fitted(problem: ConvProblem, config: GeneratedTile, target: Target) -> GeneratedTile | None:
    """A tile configuration with its steps: as few as fit shared memory at once, else two of them; None if it does not fit."""
    assert problem.mask is not None
    counts = counts_of(problem.mask, config.filters)
    if config.threads > MOST_THREADS or config.is_cramped:
        return None
    if config.splits > 1 and counts.values < 8 * config.splits:
        return None
    layout = template(problem, config)
    phases = max(len(layout.phases), 1)
    most = block_bytes(target) - RESERVED_BYTES
    if config.splits * config.filters * config.tile * 4 > most:
        return None
    # Two blocks on a multiprocessor where there are blocks enough, and threads to spare.
    blocks = layout.positions // config.tile * counts.groups
    resident = 2 if blocks > target.units and not replace(config, resident=2).is_cramped else 1
    most = most // resident - (resident - 1) * RESERVED_BYTES
    channels = max(len(layout.channels), 1)
    whole = (layout.span * phases + counts.values / channels + 4) * 4
    room = int(most / whole)
    if room < min(channels, 2):
        return None
    # Several steps, so that the first begins early, where each has enough to do for its barrier.
    steps = max(1, min(MOST_STEPS, int(counts.values * config.vectors / (config.splits * STEP_FMAS))))
    wanted = -(-channels // steps)
    if channels > room:
        wanted = min(wanted, max(1, room // 4))
    return replace(config, channels=wanted, shared_kib=most >> 10, resident=resident)
