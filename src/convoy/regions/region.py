"""Region: nodes of the graph that one executable computes. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.problem import Problem


@dataclass(frozen=True, slots=True)
class Region:
    """Nodes of the graph, with the problems (one per memory format) that compute them.

    Attributes:
        pattern: the rule that proposed it: `conv`, `conv_pool`, `linear`, `dgrad`, `wgrad`, `merge`, `banded`, `block`, `norm`,
            `op` (one node as it is), `draw` (one node that draws random numbers), `glue` (several nodes together), `casts`
            (changes of dtype) or `whole` (the whole net or a part of it).
        nodes: names of the nodes covered, in graph order.
        args: names of the values read, in the order in which an executable takes them. For `conv`, `conv_pool` and `linear`:
            x, then the residual if the epilogue has one; a dynamic weight and bias stand between. For `dgrad`: dy, weight;
            for `wgrad`: x, dy; a constant weight, as in a transposed convolution, is in `constants` instead. For the other
            patterns: the subgraph's inputs.
        constants: names of the constants read: weight, then bias if there is one; for subgraphs the subgraph's constants.
        results: names of the values made that are read outside the region or returned by the graph.
        problems: the same computation once per useful memory format, which the 4-D values at the border have.
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
