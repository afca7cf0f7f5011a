"""Criteria: which engine wins on what kind of layer, as a small tree of questions that a person can read.

Learned from measurements by `convoy.compare.study.learn_criteria`, stored as JSON (`criteria_file`). Effort `none` asks them
(`convoy.tune.predict`), of a device of the same name first, else of one of the same architecture. After the criteria of
Kim et al., ISPASS 2017, and the choice per layer of Xu et al., ICA3PP 2018.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from convoy.problem import ConvProblem, LinearProblem, Problem
from convoy.target import Target
from convoy.tune.problem_distance import kind_of

MAX_REGRET: Final = 1.0
"""Regret of an engine that never came near: at this distance, a natural logarithm, more makes no difference."""

LayerProblem = ConvProblem | LinearProblem
Feature = Callable[[LayerProblem], float]


def _gemm(problem: LayerProblem) -> tuple[int, int, int]:
    """Sizes of a group's implicit GEMM: pixels, filters, reduction."""
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
"""What a question may be about, in natural units. `gemm_m gemm_n gemm_k` are pixels, filters and reduction of one group;
`channels` are those of one group, `pixels` those of one image's result, `taps` is filter height times width; 1 stands for yes in
`nhwc`, `half`, `fprop`, `wgrad`, `fresh` (the weight changes from call to call), `epilogue` (there is any) and `residual`."""

BOOLEAN_FEATURES: Final = ("nhwc", "half", "fprop", "wgrad", "fresh", "epilogue", "residual")


def features_of(problem: LayerProblem) -> dict[str, float]:
    """Every feature of a layer."""
    return {name: read(problem) for name, read in FEATURES.items()}


def kind_name(problem: Problem) -> str:
    """The kind that a layer is of (`predict.kind_of`) as a text; empty for what is not covered.

    That is what is no layer, and a layer with a weight mask: no feature tells its zeros.
    """
    masked = isinstance(problem, ConvProblem) and problem.weight_mask
    return "" if masked else "/".join(map(str, kind_of(problem) or ()))


@dataclass(frozen=True, slots=True)
class TreeLeaf:
    """The end of the questions.

    Attributes:
        problems: how many measured layers came here.
        regret: by engine, mean of log(its time / the best engine's), at most `MAX_REGRET`.
    """

    problems: int
    regret: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TreeSplit:
    """A question: whether a feature is at most a number.

    Attributes:
        feature: one of `FEATURES`.
        at_most: the number, in natural units.
        yes: where to go if so.
        no: where to go if not.
    """

    feature: str
    at_most: float
    yes: TreeNode
    no: TreeNode


TreeNode = TreeLeaf | TreeSplit


@dataclass(frozen=True, slots=True)
class Criteria:
    """The questions of one target.

    Attributes:
        target: where the measurements were taken.
        protocol: id of the protocol that they were taken by.
        engines: versions of the engines that competed, by id; an engine that is of another version now is not judged.
        kinds: kinds of layers that they cover; of others they say nothing.
        root: the first question.
        problems: layers that they were learned from.
        date: when, ISO 8601.
        commit: the commit that learned them; empty where it is not known.
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
        """Where the questions lead."""
        node = self.root
        while isinstance(node, TreeSplit):
            node = node.yes if FEATURES[node.feature](problem) <= node.at_most else node.no
        return node

    def regrets(self, problem: Problem, versions: Mapping[str, int]) -> dict[str, float] | None:
        """How far behind the best each engine is expected to be, as a natural logarithm; None for what is not covered.

        Args:
            problem: what is to be computed.
            versions: the engines that can do it, with their versions now.
        """
        if not isinstance(problem, (ConvProblem, LinearProblem)) or kind_name(problem) not in self.kinds:
            return None
        regret = self.leaf(problem).regret
        return {e: regret.get(e, MAX_REGRET) for e, version in versions.items() if self.engines.get(e) == version}

    def ranking(self, problem: Problem, versions: Mapping[str, int]) -> list[str]:
        """Engines by what is expected of them, the best first; empty for what is not covered."""
        regrets = self.regrets(problem, versions) or {}
        return sorted(regrets, key=regrets.__getitem__)


# --- for people -------------------------------------------------------------------------------------------------------------


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
    """A question in words."""
    if split.feature in BOOLEAN_FEATURES:
        return f"not {split.feature}"
    return (
        f"{split.feature} <= {split.at_most:,.4g}" if split.at_most < 1e4 else f"{split.feature} <= {split.at_most:.4g}"
    )


def leaves(node: TreeNode) -> list[TreeLeaf]:
    """All leaves, from the first."""
    return [node] if isinstance(node, TreeLeaf) else [*leaves(node.yes), *leaves(node.no)]
