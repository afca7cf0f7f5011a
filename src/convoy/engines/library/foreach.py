"""foreach: many changes of dtype in one launch, by PyTorch's multi-tensor copy (`torch._foreach_copy_`)."""

from __future__ import annotations

import torch

from convoy.engines.base import Buffers, Engine, Executable, Knobs
from convoy.engines.subgraph import parse_subgraph, torch_support
from convoy.problem import Problem, SubgraphProblem, kind_in_words
from convoy.regions.casts import is_cast
from convoy.support import Support
from convoy.target import Target


class _Casts(Executable):
    """Each argument into the result of its place. A graph's args come in the order of its nodes, as its results do."""

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        del workspace
        results = [result for result in buffers.results if result is not None]
        torch._foreach_copy_(results, list(buffers.args))  # pyright: ignore[reportPrivateImportUsage]


class Foreach(Engine):
    """Several casts from one dtype to another: the weights of a net under autocast."""

    id = "foreach"
    family = "library"

    def supports(self, problem: Problem, target: Target) -> Support:
        """Subgraphs of casts only, one for each argument."""
        del target
        if not isinstance(problem, SubgraphProblem):
            return Support.no(f"computes subgraphs, got {kind_in_words(problem)}")
        support = torch_support(problem)
        if not support:
            return support
        graph = parse_subgraph(problem.text)
        if len(graph.nodes) < 2 or not all(map(is_cast, graph.nodes)):
            return Support.no(
                f"computes several dtype casts, got {problem.label or ', '.join(node.op for node in graph.nodes)}"
            )
        pairs = [(next(node.refs()), node.outputs[0]) for node in graph.nodes]
        if pairs != list(zip(graph.inputs, graph.outputs, strict=False)) or len(pairs) != len(graph.inputs):
            return Support.no("needs each argument cast once, and every result returned")
        dtypes = {(graph.values[a].spec.dtype, graph.values[b].spec.dtype) for a, b in pairs}
        if len(dtypes) > 1:
            return Support.no("needs one input dtype and one output dtype")
        return Support.yes()

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Nothing is compiled."""
        del problem, knobs, target
        return _Casts()


ENGINE = Foreach()
