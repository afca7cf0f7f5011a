"""Criteria: which engine wins on which kind of layer, as a small decision tree that a person can read.

`convoy.compare.study.learn_criteria` learns them from measurements; `criteria_file` stores them as JSON. Effort `none` uses
them (`convoy.tune.predict`): those of a device of the same name first, else of a device of the same architecture. They follow
the criteria of Kim et al., ISPASS 2017, and the choice per layer of Xu et al., ICA3PP 2018.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from convoy.problem import ConvProblem, EngineConfig, LinearProblem, Problem
from convoy.problem.layer_coordinates import kind_name as kind_of_layer
from convoy.target import Target

MAX_REGRET: Final = 1.0
"""Regret of an engine that never came near, a natural logarithm: a larger value makes no difference."""

LayerProblem = ConvProblem | LinearProblem
Feature = Callable[[LayerProblem], float]


def _gemm(problem: LayerProblem) -> tuple[int, int, int]:
    """Sizes of one group's implicit GEMM: pixels, filters, reduction."""
    if isinstance(problem, LinearProblem):
        return problem.n, problem.k, problem.c
    per_group = problem.c // problem.groups
    return problem.n * problem.p * problem.q, problem.k // problem.groups, per_group * problem.r * problem.s


def _conv(read: Callable[[ConvProblem], float], otherwise: float) -> Feature:
    return lambda problem: float(read(problem)) if isinstance(problem, ConvProblem) else otherwise


FEATURES: Final[dict[str, Feature]] = {
    "nhwc": _conv(lambda p: p.layout == "nhwc", 0),
    "half": lambda p: float(p.x_spec.dtype != "fp32"),
    "gemm_m": lambda p: float(_gemm(p)[0]),
    "gemm_n": lambda p: float(_gemm(p)[1]),
    "gemm_k": lambda p: float(_gemm(p)[2]),
    "gemm_k/gemm_m": lambda p: _gemm(p)[2] / max(1, _gemm(p)[0]),
    "gemm_n/gemm_m": lambda p: _gemm(p)[1] / max(1, _gemm(p)[0]),
    "gemm_k/gemm_n": lambda p: _gemm(p)[2] / _gemm(p)[1],
    "flops": lambda p: float(p.flops),
    "bytes": lambda p: float(p.bytes_min),
    "flops/bytes": lambda p: p.flops / max(1, p.bytes_min),
    "batch": lambda p: float(p.n),
    "channels": lambda p: float(p.c // p.groups if isinstance(p, ConvProblem) else p.c),
    "filters": lambda p: float(p.k),
    "pixels": _conv(lambda p: p.p * p.q, 1),
    "taps": _conv(lambda p: p.r * p.s, 1),
    "stride": _conv(lambda p: p.stride_h, 1),
    "groups": _conv(lambda p: p.groups, 1),
    "fprop": _conv(lambda p: p.direction == "fprop", 1),
    "wgrad": _conv(lambda p: p.direction == "wgrad", 0),
    "fresh": _conv(lambda p: p.dynamic_weight, 0),
    "epilogue": lambda p: float(str(p.epilogue) != "none"),
    "residual": lambda p: float(p.epilogue.residual),
}
"""Features that a split may compare, in natural units. `gemm_m gemm_n gemm_k` are pixels, filters and reduction of one group;
`channels` are those of one group, `pixels` those of one image's result; `taps` is filter height times width. 1 means yes
in `nhwc`, `half`, `fprop`, `wgrad`, `fresh` (the weight is dynamic; the name stands in stored files), `epilogue` (there is
one) and `residual`."""

BOOLEAN_FEATURES: Final = ("nhwc", "half", "fprop", "wgrad", "fresh", "epilogue", "residual")


def features_of(problem: LayerProblem) -> dict[str, float]:
    """Every feature of a layer."""
    return {name: read(problem) for name, read in FEATURES.items()}


def kind_name(problem: Problem) -> str:
    """A layer's kind (`layer_coordinates.kind_name`) as a text; empty for problems that the criteria do not cover.

    Those are problems that are not layers, and layers with a weight mask, because no feature describes a mask.
    """
    masked = isinstance(problem, ConvProblem) and problem.weight_mask
    return "" if masked else kind_of_layer(problem)


@dataclass(frozen=True, slots=True)
class TreeLeaf:
    """A leaf of the decision tree.

    Attributes:
        problems: how many measured layers reached it.
        regret: by engine, the mean of log(its time / the best engine's time), at most `MAX_REGRET`.
    """

    problems: int
    regret: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TreeSplit:
    """An inner node of the decision tree: whether a feature is at most a number.

    Attributes:
        feature: one of `FEATURES`.
        at_most: the number, in natural units.
        yes: the subtree if it is.
        no: the subtree if it is not.
    """

    feature: str
    at_most: float
    yes: TreeNode
    no: TreeNode


TreeNode = TreeLeaf | TreeSplit


@dataclass(frozen=True, slots=True)
class Criteria:
    """The decision tree of one target.

    Attributes:
        target: where the measurements were taken.
        protocol: id of their protocol.
        engines: versions of the engines that competed, by id; an engine of another version is not ranked.
        kinds: the kinds of layers that are covered.
        root: the tree's root.
        problems: number of layers that it was learned from.
        date: when it was learned, ISO 8601.
        commit: the commit that learned it; empty if unknown.
    """

    target: Target
    protocol: str
    engines: Mapping[str, int]
    kinds: tuple[str, ...]
    root: TreeNode
    problems: int
    date: str = ""
    commit: str = ""

    def leaf(self, problem: LayerProblem) -> TreeLeaf:
        """The leaf that a layer reaches."""
        node = self.root
        while isinstance(node, TreeSplit):
            node = node.yes if FEATURES[node.feature](problem) <= node.at_most else node.no
        return node

    def regrets(self, problem: Problem, versions: Mapping[str, int]) -> dict[str, float] | None:
        """Each engine's expected log ratio to the best engine's time; None for a problem that is not covered.

        Args:
            problem: the problem.
            versions: the engines that support it, with their present versions.
        """
        if not isinstance(problem, (ConvProblem, LinearProblem)) or kind_name(problem) not in self.kinds:
            return None
        regret = self.leaf(problem).regret
        return {e: regret.get(e, MAX_REGRET) for e, version in versions.items() if self.engines.get(e) == version}

    def ranking(self, problem: Problem, versions: Mapping[str, int]) -> list[str]:
        """Engines by expected regret, the best first; empty for a problem that is not covered."""
        regrets = self.regrets(problem, versions) or {}
        return sorted(regrets, key=regrets.__getitem__)


CRITERIA_WEIGHT: Final = 0.5
"""Weight of the criteria in an engine's predicted time. On the layers of six nets on an H100, net by net left out, all
weights from 0.5 to 0.8 chose equally well (bench/tuning/criteria.py)."""


def blend_with_criteria(
    times: dict[EngineConfig, float], judged: Collection[str], regrets: Mapping[str, float]
) -> dict[EngineConfig, float]:
    """Times in which every engine's best is moved to the mean, in logarithms, of its prediction and the criteria's.

    For an engine without a prediction (not in `judged`), the criteria alone decide.
    """
    best: dict[str, float] = {}
    for config, time_us in times.items():
        best[config.engine] = min(time_us, best.get(config.engine, math.inf))
    least = min(best[engine] for engine in judged)

    def factor(engine: str) -> float:
        if engine not in regrets:
            return 1.0
        behind = math.log(best[engine] / least)
        share = CRITERIA_WEIGHT if engine in judged else 1.0
        return math.exp(share * (regrets[engine] - behind))

    factors = {engine: factor(engine) for engine in best}
    return {config: time_us * factors[config.engine] for config, time_us in times.items()}


# --- text -------------------------------------------------------------------------------------------------------------------


def rules(criteria: Criteria) -> list[str]:
    """The tree as indented lines of text."""
    return list(_rules(criteria.root, 0))


def _rules(node: TreeNode, depth: int) -> Iterator[str]:
    indent = "  " * depth
    if isinstance(node, TreeLeaf):
        ranked = sorted(node.regret, key=node.regret.__getitem__)[:3]
        said = ", then ".join(f"{e} ({100 * math.expm1(node.regret[e]):.0f} %)" for e in ranked)
        yield f"{indent}{said} [{node.problems} layers]"
        return
    yield f"{indent}{question(node)}:"
    yield from _rules(node.yes, depth + 1)
    yield f"{indent}else:"
    yield from _rules(node.no, depth + 1)


def question(split: TreeSplit) -> str:
    """A split in words."""
    if split.feature in BOOLEAN_FEATURES:
        return f"not {split.feature}"
    return (
        f"{split.feature} <= {split.at_most:,.4g}" if split.at_most < 1e4 else f"{split.feature} <= {split.at_most:.4g}"
    )


def leaves(node: TreeNode) -> list[TreeLeaf]:
    """All leaves, first to last."""
    return [node] if isinstance(node, TreeLeaf) else [*leaves(node.yes), *leaves(node.no)]
