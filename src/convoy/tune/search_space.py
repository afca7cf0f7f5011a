"""Space: every setting that the engines offer for one problem, and what is known of each before it has run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from convoy.engines.activation_sparsity import SparsityBucket, sparsity_percent, with_sparsity
from convoy.engines.base import Engine
from convoy.engines.manifest import BASELINE
from convoy.errors import InputError
from convoy.measurement.engine_space import offered_knobs
from convoy.problem import EngineConfig, Problem
from convoy.target import Target


class SearchSpace:
    """What may be chosen for a problem.

    Args:
        problem: what is computed.
        engines: all that compete.
        target: the device.
        deterministic: whether settings that may give different bits from run to run are out.
        baseline_only: whether the baseline alone is on offer, because a larger region does the same and more.
        zeros: what the inputs of the layers with this problem could spare: engines that skip zeros are on offer for each share
            of what they leave out (`convoy.engines.activation_sparsity`).
        curve: further percentages of it for such engines.

    Attributes:
        problem: as given.
        target: as given.
        deterministic: as given.
        baseline_only: as given.
        engines: by id, those that offer something.
        configs: by their ids, what they offer, the default first.
        refusals: by id of the others, why not.
        levels: `zeros` in order.
    """

    def __init__(
        self,
        problem: Problem,
        engines: Sequence[Engine],
        target: Target,
        *,
        deterministic: bool = False,
        baseline_only: bool = False,
        zeros: Collection[SparsityBucket] = (SparsityBucket(),),
        curve: Collection[int] = (),
    ) -> None:
        self.problem = problem
        self.target = target
        self.deterministic = deterministic
        self.baseline_only = baseline_only
        self.engines: dict[str, Engine] = {}
        self.configs: dict[str, list[EngineConfig]] = {}
        self.refusals: dict[str, str] = {}
        self.levels = sorted(zeros)
        for engine in engines:
            if baseline_only and engine.id != BASELINE:
                self.refusals[engine.id] = "not measured: the same with its activation, or in nhwc, is on offer"
                continue
            if not engine.competes(problem):
                continue  # it competes on the problem without the mask, which is always offered beside this one
            space, reason = offered_knobs(engine, problem, target, deterministic=deterministic)
            if not space:
                self.refusals[engine.id] = reason
                continue
            self.engines[engine.id] = engine
            shares = dict.fromkeys((*self._shares(engine), *curve)) if engine.skips_zeros else (None,)
            self.configs[engine.id] = [
                engine.config(k if share is None else with_sparsity(k, share, engine.zeros_kind))
                for share in shares
                for k in space
            ]

    def __iter__(self) -> Iterator[EngineConfig]:
        return (config for configs in self.configs.values() for config in configs)

    def __len__(self) -> int:
        return sum(map(len, self.configs.values()))

    @property
    def versions(self) -> dict[str, int]:
        """The engines' versions, by id."""
        return {name: engine.version for name, engine in self.engines.items()}

    def defaults(self) -> list[EngineConfig]:
        """Every engine's default: of one that skips zeros, for every share."""
        first: dict[tuple[str, int | None], EngineConfig] = {}
        for config in self:
            first.setdefault((config.engine, sparsity_percent(config.knobs)), config)
        return list(first.values())

    def classes(self) -> list[SparsityBucket]:
        """The kinds of input that there is a winner for: one where no engine skips zeros."""
        return self.levels if any(engine.skips_zeros for engine in self.engines.values()) else self.levels[:1]

    def estimate_us(self, config: EngineConfig) -> float | None:
        """What the engine's cost model expects, microseconds; None where it has none."""
        try:
            return self.engines[config.engine].estimate_us(self.problem, config.knobs, self.target)
        except Exception:  # a broken cost model is no cost model: the clock decides, and its rows tell
            return None

    def workspace_bytes(self, config: EngineConfig) -> int | None:
        """None where the engine finds that it cannot have these knobs here: a plan of another layer that a library refuses."""
        try:
            return self.engines[config.engine].workspace_bytes(self.problem, config.knobs)
        except InputError:
            return None

    def must_build(self, config: EngineConfig) -> bool:
        """Whether it must be compiled first."""
        return not self.engines[config.engine].trusted

    def skips_zeros(self, config: EngineConfig) -> bool:
        """Whether what it takes depends on the data."""
        return self.engines[config.engine].skips_zeros

    def _shares(self, engine: Engine) -> list[int]:
        """The percentages that the layers have of what an engine leaves out."""
        return sorted({levels.at(engine.zeros_kind) for levels in self.levels})
