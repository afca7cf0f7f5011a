"""Learn criteria (`convoy.tune.criteria`) from measurements, and find out how good they are on layers left out.

A regression tree after Breiman et al. (CART, 1984): it grows by what each engine costs and is cut back by what a wrong choice
costs. Engines that are equally fast are equally right.
"""

from __future__ import annotations

import datetime as dt
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from convoy.engines.activation_sparsity import sparsity_percent
from convoy.errors import InputError
from convoy.perfdb import Measurement
from convoy.problem import ConvProblem, LinearProblem, parse_problem
from convoy.target import Target
from convoy.tune.criteria import (
    FEATURES,
    MAX_REGRET,
    Criteria,
    LayerProblem,
    TreeLeaf,
    TreeNode,
    TreeSplit,
    features_of,
    kind_name,
)
from convoy.tune.predict import MIN_SAMPLES

DEEPEST: Final = 12
LEAST_LAYERS: Final = 6
"""Layers of a leaf, at least. With 5 to 10, layers left out are picked about equally well (bench/tuning/criteria.py, H200)."""

LEAST_GAIN: Final = 1.0
"""Cost that each further leaf must save, in layers that are chosen wrong by `WRONG` and more. With 0.3 to 1.5, layers left out
are picked about equally well, by 71 leaves down to 29."""

ALIKE: Final = 0.8
"""Share of the engines' scatter in what a split lessens; the rest is the cost of the best choice on each side. By the latter
alone no split pays where one engine leads on both sides, though it would further down: of the gradients of 623 layers 605
stayed together."""

WRONG: Final = 0.1
"""Share from which a choice counts as wholly wrong; below, it counts in proportion (of its logarithm)."""

TAIL: Final = 0.15
"""What each unit of the logarithm costs on top, so that ten times too slow is worse than twice."""

Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MeasuredLayer:
    """A layer that was measured.

    Attributes:
        problem: the layer.
        best_us: by engine, the time of its fastest config.
    """

    problem: LayerProblem
    best_us: Mapping[str, float]

    @property
    def least_us(self) -> float:
        """The time of the best engine."""
        return min(self.best_us.values())

    def is_choice(self) -> bool:
        """Whether at least two engines were measured: of the others there is nothing to learn."""
        return len(self.best_us) > 1


def known_layers(rows: Iterable[Measurement]) -> list[MeasuredLayer]:
    """Convolutions and linear layers with the best time of each engine; failures and single runs are left out."""
    best: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if sparsity_percent(row.config.knobs):  # a time for an input with zeros is no time for any input
            continue
        if row.ok and row.samples >= MIN_SAMPLES and row.problem.startswith(("conv:", "linear:")):
            engine = row.config.engine
            best[row.problem][engine] = min(row.median_us, best[row.problem].get(engine, math.inf))
    found: list[MeasuredLayer] = []
    for key, times in sorted(best.items()):
        try:
            problem = parse_problem(key, "")
        except InputError:  # of another version of Convoy: it teaches nothing here
            continue
        if isinstance(problem, (ConvProblem, LinearProblem)) and kind_name(problem):
            found.append(MeasuredLayer(problem, times))
    return found


def learn(rows: Sequence[Measurement], target: Target, *, protocol: str, commit: str = "") -> Criteria:
    """Criteria from measurements of one target.

    Args:
        rows: measurements.
        target: where.
        protocol: id of the protocol; rows of another one are left out.
        commit: of the code that learns them.

    Raises:
        InputError: no layer was measured with two engines.
    """
    rows = [row for row in rows if row.protocol == protocol]
    layers = [layer for layer in known_layers(rows) if layer.is_choice()]
    if not layers:
        raise InputError("rows", len(rows), "measurements of at least two engines on some layer")
    versions: dict[str, int] = {}
    for row in rows:
        versions[row.config.engine] = max(row.config.version, versions.get(row.config.engine, 0))
    engines = sorted({engine for layer in layers for engine in layer.best_us})
    features = np.array([list(features_of(layer.problem).values()) for layer in layers])
    behind = np.array(
        [[math.log(layer.best_us.get(e, math.inf) / layer.least_us) for e in engines] for layer in layers]
    )
    return Criteria(
        target=target,
        protocol=protocol,
        engines={engine: versions[engine] for engine in engines},
        kinds=tuple(sorted({kind_name(layer.problem) for layer in layers})),
        root=_grow(features, behind, engines, DEEPEST),
        problems=len(layers),
        date=dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        commit=commit,
    )


def _cost(behind: Matrix) -> Matrix:
    """Cost of choosing each engine on each layer."""
    return np.minimum(1.0, behind / math.log1p(WRONG)) + TAIL * np.minimum(3.0, behind)


def _grow(features: Matrix, behind: Matrix, engines: Sequence[str], depth: int) -> TreeNode:
    """A tree that is as deep as it may be, cut back to the splits that save enough."""
    return _cut(features, behind, _cost(behind), engines, depth)[0]


def _cut(
    features: Matrix, behind: Matrix, cost: Matrix, engines: Sequence[str], depth: int
) -> tuple[TreeNode, float, int]:
    """A node with its cost and number of leaves: a leaf, unless the subtree below saves enough."""
    here = float(cost.sum(0).min())
    split = _best_split(features, cost) if depth else None
    if split is not None:
        column, at_most = split
        low = features[:, column] <= at_most
        sides = [_cut(features[own], behind[own], cost[own], engines, depth - 1) for own in (low, ~low)]
        (yes, yes_cost, yes_leaves), (no, no_cost, no_leaves) = sides
        if here - yes_cost - no_cost >= LEAST_GAIN * (yes_leaves + no_leaves - 1):
            node = TreeSplit(list(FEATURES)[column], at_most, yes, no)
            return node, yes_cost + no_cost, yes_leaves + no_leaves
    return _leaf(behind, engines), here, 1


def _best_split(features: Matrix, cost: Matrix) -> tuple[int, float] | None:
    """The column and the number that lessen most; None where nothing is lessened.

    That is the scatter of the engines' costs on both sides, and by a smaller share what the best engine of each side costs.
    """
    count = len(features)
    squares = float((cost**2).sum())
    best: tuple[float, int, float] | None = None
    for column in range(features.shape[1]):
        order = np.argsort(features[:, column], kind="stable")
        values, sums = features[order, column], cost[order].cumsum(0)
        left = np.arange(LEAST_LAYERS, count - LEAST_LAYERS + 1)
        left = left[values[left - 1] < values[left]] if len(left) else left
        if not len(left):
            continue
        total = _remains(sums[left - 1], sums[-1] - sums[left - 1], left, count, squares)
        at = int(total.argmin())
        if best is None or total[at] < best[0] - 1e-9:
            low, high = float(values[left[at] - 1]), float(values[left[at]])
            best = (float(total[at]), column, round_between(low, high))
    whole = cost.sum(0)
    unsplit = ALIKE * (squares - float((whole**2).sum()) / count) + (1 - ALIKE) * float(whole.min())
    if best is None or best[0] > unsplit - 1e-6:
        return None
    return best[1], best[2]


def _remains(low: Matrix, high: Matrix, left: NDArray[np.int64], count: int, squares: float) -> Matrix:
    """What is left of scatter and cost after each split, from the sums of the costs on its sides.

    Args:
        low: by split and engine, the sum over layers on its left.
        high: likewise on its right.
        left: by split, how many layers are on its left.
        count: layers.
        squares: the sum of all squared costs.
    """
    scatter = squares - (low**2).sum(1) / left - (high**2).sum(1) / (count - left)
    return ALIKE * scatter + (1 - ALIKE) * (low.min(1) + high.min(1))


def round_between(low: float, high: float) -> float:
    """The number with the fewest digits in [low, high), nearest to the geometric mean: a number that a person would write."""
    middle = math.sqrt(low * high) if low > 0 else (low + high) / 2
    for digits in range(1, 17):
        number = float(f"{middle:.{digits - 1}e}")
        if low <= number < high:
            return number
    return low


def _leaf(behind: Matrix, engines: Sequence[str]) -> TreeLeaf:
    """Mean regrets, the best engine first; of engines that were measured on some layer of the leaf."""
    regret: dict[str, float] = {}
    for column, engine in enumerate(engines):
        own = behind[:, column]
        own = own[np.isfinite(own)]
        if len(own):
            regret[engine] = float(np.minimum(own, MAX_REGRET).mean())
    return TreeLeaf(len(behind), dict(sorted(regret.items(), key=lambda item: item[1])))


# --- how good they are ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CriteriaCheck:
    """How often a way to choose comes near the best measured engine.

    Attributes:
        layers: on how many layers.
        within_5: share on which the chosen engine is within 5 % of the best.
        within_10: likewise 10 %.
        mean: geometric mean of the share of the best speed.
    """

    layers: int
    within_5: float
    within_10: float
    mean: float

    @staticmethod
    def of(fractions: Sequence[float]) -> CriteriaCheck:
        """From each layer's best time over the chosen engine's time."""
        count = len(fractions)
        if not count:
            return CriteriaCheck(0, 0.0, 0.0, 0.0)
        near = [sum(f >= 1 / (1 + share) for f in fractions) / count for share in (0.05, 0.10)]
        return CriteriaCheck(count, near[0], near[1], math.exp(sum(map(math.log, fractions)) / count))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"layers": self.layers, "within_5": self.within_5, "within_10": self.within_10, "mean": self.mean}

    def __str__(self) -> str:
        return (
            f"within 5 % of the best on {self.within_5:.1%} of {self.layers} layers, within 10 % on {self.within_10:.1%}, "
            f"{self.mean:.3f} of the best speed on average"
        )


def sizes_of(problem: LayerProblem) -> str:
    """Equal for layers that differ in batch, memory format, dtype, rounding and epilogue alone: one is no test for another."""
    if isinstance(problem, LinearProblem):
        return f"linear {problem.c} {problem.k}"
    p = problem
    sizes = (
        p.c,
        p.h,
        p.w,
        p.k,
        p.r,
        p.s,
        p.pad_h,
        p.pad_w,
        p.stride_h,
        p.stride_w,
        p.dilation_h,
        p.dilation_w,
        p.groups,
    )
    return "conv " + " ".join(map(str, sizes))


def check(criteria: Criteria, layers: Iterable[MeasuredLayer], baseline: str) -> CriteriaCheck:
    """The engine that the criteria put first, of those that were measured, against the best; the baseline where they abstain."""
    fractions: list[float] = []
    for layer in layers:
        ranked = criteria.ranking(layer.problem, {e: criteria.engines.get(e, 0) for e in layer.best_us})
        chosen = next(iter(ranked), baseline)
        if chosen in layer.best_us:
            fractions.append(layer.least_us / layer.best_us[chosen])
    return CriteriaCheck.of(fractions)
