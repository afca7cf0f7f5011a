"""Frameworks timed in turn: interleaved rounds of all that are ready, in an order drawn anew; noisy ones are taken again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Final

from convoy.compare.child_session import ChildFailedError, ChildSession
from convoy.compare.samples import MOST_REPEATS, NOISY, relative_spread
from convoy.measurement.statistics import disturbed_rounds

REPEATS_S: Final = 60.0
"""When rounds have taken this long they are not taken again: on a machine that is busy all the time they would be no quieter."""

ORDER_SEED: Final = 0
"""Seed of the orders: the same frameworks take the same turns in each run."""

Samples = dict[str, list[float]]
"""Values by metric: one a round, of `single_ms` one a call."""


def take_rounds(
    children: Mapping[str, ChildSession], rounds: int, failed: Callable[[str, ChildFailedError], None]
) -> dict[str, Samples]:
    """Samples of each framework, without the rounds that were slow for all.

    Args:
        children: by framework; those that fail are asked no more.
        rounds: how many.
        failed: told which fails and how; may take it out of `children`.
    """
    draw = random.Random(ORDER_SEED)
    found: dict[str, list[Samples]] = {name: [] for name in children}
    for _ in range(rounds):
        for name in draw.sample(list(found), len(found)):
            try:
                found[name].append(children[name].ask({"do": "sample", "rounds": 1}, "samples"))
            except ChildFailedError as error:
                del found[name]
                failed(name, error)
    dropped = disturbed_rounds({name: [one["latency_ms"][0] for one in own] for name, own in found.items()})
    return {name: _joined([one for i, one in enumerate(own) if i not in dropped]) for name, own in found.items()}


def _joined(rounds: list[Samples]) -> Samples:
    """The values of several rounds, metric by metric."""
    joined: Samples = {}
    for one in rounds:
        for metric, values in one.items():
            joined.setdefault(metric, []).extend(values)
    return joined


def quietest(rounds: Callable[[], Mapping[str, Samples]]) -> dict[str, Samples]:
    """The samples of each framework that scattered least, over rounds that are taken again while some are noisy."""
    best: dict[str, Samples] = {}
    start = time.monotonic()
    for _ in range(MOST_REPEATS + 1):
        found = rounds()
        for name, samples in found.items():
            if name not in best or relative_spread(samples) < relative_spread(best[name]):
                best[name] = samples
        quiet = all(relative_spread(samples) <= NOISY for samples in best.values())
        if not found or quiet or time.monotonic() - start > REPEATS_S:
            break
    return best
