"""TiledKernelEngine: the base of GPU convolution engines whose knobs are tile configurations of one kernel."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from convoy.engines.base import Engine, Executable
from convoy.problem import ConvProblem, Knobs, Problem
from convoy.target import Target


class TileConfig(Protocol):
    """One way to tile a kernel: tile sizes, pipeline stages, warps."""

    @property
    def knobs(self) -> Knobs:
        """The configuration as an engine's knobs."""
        ...

    @classmethod
    def of(cls, knobs: Knobs) -> Self:
        """Inverse of `knobs`; raises InputError for knobs that name no valid configuration."""
        ...


TileConfigT = TypeVar("TileConfigT", bound=TileConfig)


class TiledKernelEngine(Engine, Generic[TileConfigT]):
    """A GPU convolution engine of one kernel. A cost model orders the kernel's tile configurations by estimated time."""

    pure_space = True

    tile_config: ClassVar[type[Any]]
    """The class of the engine's configurations, a `TileConfig`."""

    def tile_config_class(self, problem: ConvProblem) -> type[Any]:
        """The class of a problem's configurations; override it where the class depends on the problem."""
        del problem
        return self.tile_config

    @abstractmethod
    def tile_configs(self, problem: ConvProblem, units: int) -> Sequence[TileConfigT]:
        """Configurations worth trying on a GPU of `units` multiprocessors, by rising estimated time."""

    @abstractmethod
    def estimate_tile_us(self, problem: ConvProblem, config: TileConfigT, units: int, /) -> float:
        """The cost model's estimate for one configuration, in microseconds."""

    @abstractmethod
    def build_tile(self, problem: ConvProblem, config: TileConfigT, target: Target, /) -> Executable:
        """Compile one configuration; needs no GPU."""

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """The configurations' knobs, by rising estimated time."""
        assert isinstance(problem, ConvProblem)
        return [tile.knobs for tile in self.tile_configs(problem, target.units)]

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float | None:
        """The cost model's estimate."""
        assert isinstance(problem, ConvProblem)
        return self.estimate_tile_us(problem, self.tile_config_class(problem).of(knobs), target.units)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile one configuration."""
        assert isinstance(problem, ConvProblem)
        return self.build_tile(problem, self.tile_config_class(problem).of(knobs), target)
