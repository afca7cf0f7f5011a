"""Region: nodes of the graph that one executable computes. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.problem import Problem


@dataclass(frozen=True, slots=True)
class Region:
    """A piece of the graph, with the problems (one per memory format) that compute it.

    Attributes:
        pattern: the rule that proposed it: `conv`, `conv_pool`, `linear`, `dgrad`, `wgrad`, `merge`, `banded`, `op` (one node as
            it was), `glue` (several nodes together) or `casts` (changes of dtype).
        nodes: names of the nodes covered, in graph order.
        args: names of the values read, in the order in which an executable takes them. For `conv`, `conv_pool` and `linear`: x,
            then the residual where the epilogue has one; fresh weight and bias stand between. For `dgrad`: dy, weight; for
            `wgrad`: x, dy. For `merge`, `banded`, `op` and `glue`: as the subgraph's inputs.
        constants: names of the constants read: weight, then bias where there is one; for `op` and `glue` as the subgraph's
            constants.
        results: names of the values made that are read outside the region or returned by the graph.
        problems: the same computation once per memory format that makes sense; 4-D values have that format at the border.
    """

    pattern: str
    nodes: tuple[str, ...]
    args: tuple[str, ...]
    constants: tuple[str, ...]
    results: tuple[str, ...]
    problems: tuple[Problem, ...]

    @property
    def id(self) -> str:
        """Unique in a graph: the pattern and the nodes covered (`conv(conv1+relu1)`)."""
        return f"{self.pattern}({'+'.join(self.nodes)})"
