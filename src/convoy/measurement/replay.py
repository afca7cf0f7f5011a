"""ReplayRunner: returns stored rows, without a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from convoy.measurement.protocol import Protocol
from convoy.measurement.runner import Request
from convoy.perfdb.row import Measurement, Status
from convoy.problem import EngineConfig


class ReplayRunner:
    """Returns stored rows, so that the search can be tested without a device; unknown configs are `unsupported`.

    Attributes:
        asked: (problem key, config, rounds) of every requested config, in order.
        prepared: number of configs announced by `prepare`.
    """

    def __init__(self, rows: Sequence[Measurement]) -> None:
        self._rows = {(row.problem, row.config): row for row in rows}
        self.asked: list[tuple[str, EngineConfig, int]] = []
        self.prepared = 0

    def prepare(self, requests: Sequence[Request]) -> None:
        """Count the announced configs."""
        self.prepared += sum(len(request.configs) for request in requests)

    def is_ready(self, request: Request) -> bool:
        """Always True."""
        del request
        return True

    def measure(self, request: Request, protocol: Protocol) -> Iterator[Measurement]:
        """The stored rows of the request's configs."""
        for config in request.configs:
            self.asked.append((request.problem.key, config, request.rounds))
            known = self._rows.get((request.problem.key, config))
            yield known or Measurement(
                request.problem.key, config, "", protocol.id, Status.UNSUPPORTED, reason="no stored row"
            )

    def close(self) -> None:
        """Does nothing."""
