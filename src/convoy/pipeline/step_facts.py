"""What else could compute a step's nodes, and what PyTorch takes for them: for `explain` and the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from convoy.engines.activation_sparsity import SparsityShares
from convoy.engines.manifest import BASELINE
from convoy.perfdb import Measurement
from convoy.pipeline.net import Net, engines_on
from convoy.pipeline.selection_input import rows_at
from convoy.plan import Step, StepCandidate
from convoy.plan.file import MAX_REASON
from convoy.problem import ConvProblem, Problem
from convoy.regions import Region
from convoy.settings import Settings
from convoy.tune import SearchResult
from convoy.untrusted import escape_controls, storable

SINGLE_NODE_PATTERNS: Final = ("conv", "linear", "dgrad", "wgrad", "op", "draw")
"""Patterns of the regions that hold one node alone."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The measurements of a net, asked by step.

    Attributes:
        net: the net.
        found: its search's result.
        regions: the net's regions by pattern and nodes.
        copies: the net's changes of memory format by problem key.
        engines: ids of the engines that have code for the device.
    """

    net: Net
    found: SearchResult
    regions: Mapping[tuple[str, tuple[str, ...]], Region]
    copies: Mapping[str, Problem]
    engines: frozenset[str]

    @staticmethod
    def of(net: Net, found: SearchResult, settings: Settings) -> StepFacts:
        """The facts of a net after its search."""
        copies = {problem.key: problem for problem in net.copies.values()}
        engines = frozenset(engine.id for engine in engines_on(net.target, settings))
        return StepFacts(net, found, net.regions_by_nodes, copies, engines)

    def problems(self, step: Step) -> dict[str, Problem]:
        """The problems that a step may solve, one for each memory format, by key; of a copy its own."""
        if step.kind == "convert":
            return {step.problem: self.copies[step.problem]}
        return {problem.key: problem for problem in self.regions[step.pattern, step.nodes].problems}

    def shares(self, step: Step) -> SparsityShares | None:
        """The shares of zeros in the input of a step that is a convolution; None if they were not counted."""
        conv = isinstance(self.problems(step)[step.problem], ConvProblem)
        return self.net.zeros.get(step.args[0]) if conv else None

    def rows(self, step: Step) -> list[tuple[str, Measurement]]:
        """(layout, row) of every candidate that holds for the zeros of the step's input: the fastest first, failures last."""
        share = self.shares(step)
        found = [
            (problem.layout, row)
            for key, problem in self.problems(step).items()
            for row in rows_at(self.found.rows.get(key, ()), share)
        ]
        return sorted(found, key=lambda item: (not item[1].ok, item[1].median_us))

    def refusals(self, step: Step) -> list[tuple[str, str, str]]:
        """(engine, layout, reason) of the engines that do not offer a candidate."""
        return [
            (engine, problem.layout, reason)
            for key, problem in self.problems(step).items()
            for engine, reason in self.found.refusals.get(key, {}).items()
        ]

    def baseline(self, step: Step) -> tuple[float, bool]:
        """PyTorch's time for the same nodes one by one, in the caller's memory format, and whether a part is predicted.

        It is 0 for a copy to another layout.
        """
        total, predicted = 0.0, False
        for node in step.nodes:
            patterns = [self.regions.get((pattern, (node,))) for pattern in SINGLE_NODE_PATTERNS]
            region = next(region for region in patterns if region is not None)
            rows = self.found.rows.get(region.problems[0].key, ())
            own = [row for row in rows if row.ok and row.config.engine == BASELINE]
            if own:
                best = min(own, key=lambda row: row.median_us)
                total, predicted = total + best.median_us, predicted or best.predicted
        return total, predicted

    def explained(self, step: Step) -> Step:
        """A step with PyTorch's time and its candidates: each engine's fastest config in each format, or why it has none.

        Engines for other devices are left out: the report has them.
        """
        fastest: dict[tuple[str, str], StepCandidate] = {}
        failed: dict[str, StepCandidate] = {}
        for layout, row in self.rows(step):
            if row.ok:
                fastest.setdefault((row.config.engine, layout), _candidate(layout, row))
            else:
                failed.setdefault(row.config.engine, _candidate(layout, row))
        for engine, layout, reason in self.refusals(step):
            if engine in self.engines:
                failed.setdefault(engine, StepCandidate(engine, "", layout, "unsupported", reason=_line(reason)))
        timed = {engine for engine, _ in fastest}
        rest = [one for engine, one in failed.items() if engine not in timed]
        baseline_us, predicted = self.baseline(step)
        return replace(
            step, baseline_us=baseline_us, baseline_predicted=predicted, candidates=(*fastest.values(), *rest)
        )


def _candidate(layout: str, row: Measurement) -> StepCandidate:
    config = row.config
    reason = "" if row.ok else _line(row.reason)
    return StepCandidate(
        config.engine, str(config.knobs), layout, str(row.status), row.median_us, row.predicted, reason
    )


def _line(text: str) -> str:
    """The first line of a reason, which may be a compiler's log."""
    return storable(escape_controls(text.strip().partition("\n")[0], one_line=True), MAX_REASON)
