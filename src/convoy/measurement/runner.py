"""Who measures: this process, a child process that may crash or hang, or stored rows without any device.

All answer the same calls, so that the search does not know which one it drives.
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
"""Told what begins: the config's index in the request (-1: none) and `data`, `build` or `time`."""


@dataclass(frozen=True, slots=True)
class Request:
    """Measure some configs on one problem, against each other.

    Attributes:
        problem: what is computed.
        configs: the candidates; the likely fast ones first, for the slow ones are pruned against what came before.
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
        """Told what will be asked next, so that slow builds can be begun in parallel; may do nothing."""
        ...

    def is_ready(self, request: Request) -> bool:
        """Whether `measure` would begin at once, and not wait for builds."""
        ...

    def measure(self, request: Request, protocol: Protocol) -> Iterator[Measurement]:
        """One row for each config, as they are found, in any order. Failures are rows too.

        A generator that is closed early, or interrupted, leaves the runner usable.
        """
        ...

    def close(self) -> None:
        """Give back whatever was started."""
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
