"""What PyTorch's own step is said to take: without the casts of indices that capture adds."""

from __future__ import annotations

from convoy.graph.text import parse_graph
from convoy.pipeline.choice import stock_us
from convoy.problem import EngineConfig, Knobs
from convoy.selection import Candidate, Cover, SelectionProblem, solve

NARROW = """graph 1
input %x: fp32[2,4,8,8]
input %dy: fp32[2,4,4,4]
%v: fp32[2,4,4,4], %i: i64[2,4,4,4] = aten.max_pool2d_with_indices.default(%x, (2, 2), (2, 2))
%n: i16[2,4,4,4] = aten._to_copy.default(%i, dtype=dtype.i16)
%w: i64[2,4,4,4] = aten._to_copy.default(%n, dtype=dtype.i64)
%dx: fp32[2,4,8,8] = aten.max_pool2d_with_indices_backward.default(%dy, %x, (2, 2), (2, 2), (0, 0), (1, 1), False, %w)
return %v, %dx
"""
WIDE = "\n".join(line for line in NARROW.splitlines() if "_to_copy" not in line).replace("%w)", "%i)") + "\n"


def offered(text: str) -> tuple[SelectionProblem, float]:
    """A baseline for each node, that of the k-th at 2 to the power k microseconds, and what PyTorch itself is said to take."""
    graph = parse_graph(text)
    nodes = tuple(node.name for node in graph.nodes)
    values = [value for value in graph.values.values() if value.kind != "constant"]
    problem = SelectionProblem(
        nodes=nodes,
        inputs=graph.inputs,
        outputs=graph.outputs,
        regions=tuple(
            Cover(
                f"op({node.name})", (node.name,), tuple(dict.fromkeys(node.refs())), tuple(filter(None, node.outputs))
            )
            for node in graph.nodes
        ),
        candidates=tuple(
            Candidate(i, f"p{i}", EngineConfig("aten", 1, Knobs()), "nchw", 2.0**i, baseline=True)
            for i in range(len(nodes))
        ),
        value_layouts={value.name: ("nchw",) for value in values},
        value_bytes={value.name: value.spec.size_bytes for value in values},
        convert_us={},
    )
    baseline = solve(problem, "baseline")
    return problem, stock_us(baseline, problem, graph) - baseline.total_us


def test_casts_of_indices_are_not_pytorchs() -> None:
    problem, difference = offered(NARROW)
    assert [problem.nodes[i] for i in (1, 2)] == ["n", "w"]
    assert difference == -(2.0 + 4.0)


def test_all_else_is() -> None:
    assert offered(WIDE)[1] == 0.0
