"""Which engines a search at effort `quick` leaves untried, and why: a slow cost model, or a slow time on a related device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from convoy.engines.manifest import BASELINE
from convoy.problem import EngineConfig
from convoy.tune.leaderboard import Leaderboard
from convoy.tune.search_space import SearchSpace
from convoy.tune.transfer_hints import TransferHints

HOPELESS_RATIO: Final = 4.0
"""At effort `quick`, an engine whose cost model predicts more than this many times the best measured time is not tried. The
factor allows for a model that is wrong by a factor of two, and for knobs that gain as much again."""

RECHECK_RATIO: Final = HOPELESS_RATIO / 2
"""The ratio for an engine that was left untried before: it stays untried while the best time moves a little."""


@dataclass(frozen=True, slots=True)
class EnginePruning:
    """The decisions for one problem, from the rows so far.

    Attributes:
        space: the problem's search space.
        board: the rows so far.
        hints: the results of a related device.
        full: whether effort is `full`, which tries every engine.
    """

    space: SearchSpace
    board: Leaderboard
    hints: TransferHints
    full: bool

    def is_hopeless(self, config: EngineConfig, ratio: float) -> bool:
        """Whether the cost model predicts more than `ratio` times the best measured time."""
        limit_us, estimate = self.board.limit_us(), self.space.estimate_us(config)
        if self.full or limit_us is None or estimate is None or config.engine == BASELINE:
            return False
        return estimate > ratio * limit_us

    def is_independent(self, config: EngineConfig) -> bool:
        """Whether other configs' times do not decide if this one is tried."""
        return config in self.hints.configs or config.engine == BASELINE or self.space.estimate_us(config) is None

    def settled(self) -> Mapping[str, float]:
        """Engines that the related device's search rules out, with their slowdown there.

        Empty if every hinted config fails on this device: the hints then do not apply.
        """
        tried = [self.board.rows.get(config) for config in self.hints.configs]
        failed = bool(tried) and all(row is not None and not self.board.is_usable(row) for row in tried)
        return {} if failed else self.hints.slowdowns

    def untried(self) -> list[EngineConfig]:
        """Each engine's default without a row, and the hinted configs without a row.

        An engine that skips zeros has a default for each percentage. Engines that `settled` names are left out.
        """
        settled = self.settled()
        wanted = [config for config in self.space.defaults if config.engine not in settled]
        return [config for config in dict.fromkeys((*wanted, *self.hints.configs)) if config not in self.board.rows]

    def is_exhausted(self) -> bool:
        """Whether no untried config may win."""
        return all(self.is_hopeless(config, RECHECK_RATIO) for config in self.untried())

    def reasons(self) -> dict[str, str]:
        """Why each untried engine was left out, by engine id."""
        if self.full:
            return {}
        tried = {config.engine for config in self.board.rows}
        found = {
            engine: f"not tried at effort quick: on {self.hints.source} it took {slowdown:.2f} times the best time"
            for engine, slowdown in self.settled().items()
            if engine not in tried
        }
        limit_us = self.board.limit_us()
        for config in self.untried():
            if limit_us is not None and self.is_hopeless(config, RECHECK_RATIO):
                found[config.engine] = (
                    f"not tried at effort quick: its cost model expects {self.space.estimate_us(config):.0f} us, "
                    f"the best takes {limit_us:.0f} us"
                )
        return found
