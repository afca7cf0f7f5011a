"""Every config that the engines offer for one problem, and what is known of each before it runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property

from convoy.engines.activation_sparsity import SparsityBucket, sparsity_percent, with_sparsity
from convoy.engines.base import Engine
from convoy.engines.manifest import BASELINE
from convoy.errors import InputError
from convoy.measurement.engine_space import offered_knobs
from convoy.measurement.known_spaces import KnownSpaces
from convoy.problem import EngineConfig, Problem
from convoy.target import Target


class SearchSpace:
    """The configs that may be chosen for one problem.

    Args:
        problem: the problem.
        engines: the competing engines.
        target: the device.
        deterministic: whether configs that may give different bits from run to run are excluded.
        baseline_only: whether only the baseline is offered, because a larger region covers the same work.
        zeros: sparsity buckets of the inputs of the layers with this problem; engines that skip zeros are offered for each
            bucket's percentage (`convoy.engines.activation_sparsity`).
        curve: further percentages to offer for such engines.
        measured_only: whether no time is predicted.
        memory_counts: whether selection keeps to a memory budget, so that slower configs may be chosen for their memory.
        spaces: the target's known spaces.
        spared: competing engines that are not asked for their configs (`convoy.tune.spared_engines`).

    Attributes:
        problem: as given.
        target: as given.
        deterministic: as given.
        baseline_only: as given.
        measured_only: as given.
        memory_counts: as given.
        engines: the engines that offer a config, by id.
        configs: their configs by engine id, the default first.
        refusals: the reasons of the other engines, by id.
        buckets: `zeros`, sorted.
        spared: the versions of the engines that are not asked, by id.
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
        measured_only: bool = False,
        memory_counts: bool = False,
        spaces: KnownSpaces | None = None,
        spared: Collection[Engine] = (),
    ) -> None:
        self.problem = problem
        self.target = target
        self.deterministic = deterministic
        self.baseline_only = baseline_only
        self.measured_only = measured_only
        self.memory_counts = memory_counts
        self.engines: dict[str, Engine] = {}
        self.configs: dict[str, list[EngineConfig]] = {}
        self.refusals: dict[str, str] = {}
        self.buckets = sorted(zeros)
        self.spared = {engine.id: engine.version for engine in spared}
        for engine in engines:
            if baseline_only and engine.id != BASELINE:
                self.refusals[engine.id] = (
                    "not measured: the same convolution with its activation, or in nhwc, is offered"
                )
                continue
            if not engine.competes(problem):
                continue  # it competes on the problem without the mask, which is always offered too
            space, reason = offered_knobs(engine, problem, target, deterministic=deterministic, spaces=spaces)
            if not space:
                self.refusals[engine.id] = reason
                continue
            self.engines[engine.id] = engine
            percentages = dict.fromkeys((*self._percentages(engine), *curve)) if engine.skips_zeros else (None,)
            self.configs[engine.id] = [
                engine.config(k if percent is None else with_sparsity(k, percent, engine.zeros_kind))
                for percent in percentages
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

    @cached_property
    def defaults(self) -> tuple[EngineConfig, ...]:
        """Every engine's default config; for an engine that skips zeros, one for each percentage."""
        first: dict[tuple[str, int | None], EngineConfig] = {}
        for config in self:
            first.setdefault((config.engine, sparsity_percent(config.knobs)), config)
        return tuple(first.values())

    def winning_buckets(self) -> list[SparsityBucket]:
        """The sparsity buckets that have a winner each; a single one if no engine skips zeros."""
        return self.buckets if any(engine.skips_zeros for engine in self.engines.values()) else self.buckets[:1]

    def estimate_us(self, config: EngineConfig) -> float | None:
        """The time that the engine's cost model predicts, microseconds; None without a cost model."""
        try:
            return self.engines[config.engine].estimate_us(self.problem, config.knobs, self.target)
        except Exception:  # a broken cost model counts as none: measurements decide
            return None

    def workspace_bytes(self, config: EngineConfig) -> int | None:
        """Workspace of a config; None if the engine finds the config impossible here, such as another layer's library plan."""
        try:
            return self.engines[config.engine].workspace_bytes(self.problem, config.knobs)
        except InputError:
            return None

    def asks_for_workspace(self, config: EngineConfig) -> bool:
        """Whether `workspace_bytes` asks a library first."""
        try:
            return self.engines[config.engine].asks_for_workspace(self.problem, config.knobs)
        except InputError:
            return False

    def must_build(self, config: EngineConfig) -> bool:
        """Whether the config must be compiled first."""
        return not self.engines[config.engine].trusted

    def builds_slowly(self) -> bool:
        """Whether an engine is there that takes longer to build than others."""
        return any(engine.build_patience > 1 for engine in self.engines.values())

    def skips_zeros(self, config: EngineConfig) -> bool:
        """Whether the config's time depends on the data."""
        return self.engines[config.engine].skips_zeros

    def _percentages(self, engine: Engine) -> list[int]:
        """The percentages of what an engine skips, over all buckets."""
        return sorted({bucket.at(engine.zeros_kind) for bucket in self.buckets})
