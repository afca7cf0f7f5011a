"""What measures: this process, a child process that may crash or hang, or stored rows without a device.

All have the same methods, so the search does not depend on which one it uses.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from typing import Protocol as Interface

from convoy.measurement.protocol import Protocol
from convoy.perfdb.row import Measurement, Status
from convoy.problem import EngineConfig, Problem
from convoy.target import Target

PhaseCallback = Callable[[int, str], None]
"""Called with the phase that begins: the config's index in the request (-1: none) and `data`, `build` or `time`."""


@dataclass(frozen=True, slots=True)
class Request:
    """Configs to measure on one problem, against each other.

    Attributes:
        problem: the problem.
        configs: the candidates, likely fast ones first, because slow ones are pruned against earlier ones.
        rounds: samples to take of each.
        best_us: median of the best candidate known so far; 0: none.
    """

    problem: Problem
    configs: tuple[EngineConfig, ...]
    rounds: int
    best_us: float = 0.0


class Runner(Interface):
    """Measures requests."""

    def prepare(self, requests: Sequence[Request]) -> None:
        """Announce the next requests, so that slow builds can begin in parallel; may do nothing."""
        ...

    def is_ready(self, request: Request) -> bool:
        """Whether `measure` would begin at once, without waiting for builds."""
        ...

    def measure(self, request: Request, protocol: Protocol) -> Iterator[Measurement]:
        """One row for each config, as they are found, in any order. Failures are rows too.

        A generator that is closed early, or interrupted, leaves the runner usable.
        """
        ...

    def close(self) -> None:
        """End everything that was started."""
        ...


def measurement_row(
    target: Target, problem: Problem, config: EngineConfig, protocol: Protocol, status: Status, **values: Any
) -> Measurement:
    """A row with the target's digest and versions and the present time."""
    return Measurement(
        problem=problem.key,
        config=config,
        target=target.digest,
        protocol=protocol.id,
        status=status,
        versions=" ".join(f"{name}={version.replace(' ', '_')}" for name, version in target.versions),
        date=dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **values,
    )
