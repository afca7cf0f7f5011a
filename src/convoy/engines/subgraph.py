"""Subgraphs, read from their problems: shared by the engines that compute them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from convoy.engines.interpret import compile_graph
from convoy.engines.torch_operators import resolve
from convoy.errors import InputError
from convoy.graph.ir import LAYERS, Graph, Node, Ref
from convoy.graph.text import parse_graph
from convoy.problem import Pool, SubgraphProblem, TensorSpec
from convoy.regions.pool import flattens, pool_of
from convoy.support import Support


def torch_format(layout: str, rank: int) -> torch.memory_format:
    """The memory format of a value of some rank at the border of a problem with this layout.

    Beside `ndhwc`, 4-D values are in channels_last. A value without a layout, such as a 5-D one beside `nhwc`, is contiguous.
    """
    if layout == "ndhwc" and rank in (4, 5):
        return torch.channels_last if rank == 4 else torch.channels_last_3d
    return torch.channels_last if layout == "nhwc" and rank == 4 else torch.contiguous_format


@lru_cache(maxsize=1024)
def parse_subgraph(text: str) -> Graph:
    """The graph of a subgraph problem's text.

    Raises:
        InputError: text that is no graph.
    """
    return parse_graph(text)


def torch_support(problem: SubgraphProblem) -> Support:
    """Whether PyTorch can run a subgraph: valid text, a memory format of PyTorch's, and operators that this PyTorch has."""
    if problem.layout == "blocked":
        return Support.no("PyTorch's operators take nchw and nhwc tensors, got blocked")
    return _operators_support(problem.text)


@lru_cache(maxsize=1024)
def _operators_support(text: str) -> Support:
    """The same of a subgraph in any memory format: each is asked for in two."""
    try:
        compile_graph(parse_subgraph(text))
    except InputError as error:
        return Support.no(str(error))
    return Support.yes()


def pooling_of(problem: SubgraphProblem, *, flat: bool = False) -> tuple[Pool, TensorSpec] | None:
    """The pooling that a subgraph consists of, and its input; None for any other subgraph.

    Args:
        problem: the subgraph.
        flat: require a view after the pooling that flattens each image.
    """
    graph = parse_subgraph(problem.text)
    if len(graph.nodes) != 1 + flat or len(graph.inputs) != 1 or graph.outputs != graph.nodes[-1].outputs[:1]:
        return None
    node = graph.nodes[0]
    if flat and (list(graph.nodes[1].refs()) != [node.outputs[0]] or not flattens(graph, graph.nodes[1])):
        return None
    pool = pool_of(graph, node)
    if pool is None or not isinstance(node.args[0], Ref):
        return None
    return pool, graph.values[node.args[0].name].spec


def averages_images(graph: Graph, node: Node) -> bool:
    """Whether a node takes the mean of each channel over each image, of at least one pixel, as [n, c, 1, 1] or as [n, c]."""
    x = node.args[0] if node.args else None
    if node.op not in ("aten.mean.dim", "aten.adaptive_avg_pool2d.default") or node.kwargs or not isinstance(x, Ref):
        return False
    spec, made = graph.values[x.name].spec, graph.values[node.outputs[0]].spec
    if len(spec.shape) != 4 or not spec.shape[2] * spec.shape[3] or made.dtype != spec.dtype:
        return False
    if node.op == "aten.mean.dim":
        dims = node.args[1] if len(node.args) > 1 else None
        if not isinstance(dims, tuple) or sorted(dim % 4 for dim in dims if isinstance(dim, int)) != [2, 3]:
            return False
        return made.shape in (spec.shape[:2], (*spec.shape[:2], 1, 1))
    return made.shape == (*spec.shape[:2], 1, 1)


class SubgraphResults:
    """Converts the operators' return values to results that a launch may hand out: new tensors in the problem's memory format.

    An operator may return a view of an argument, or the argument itself. Such a result would change with the argument, so it
    is copied. Only results that may alias an argument are checked, because a check costs about a microsecond.
    """

    def __init__(self, problem: SubgraphProblem) -> None:
        graph = parse_subgraph(problem.text)
        self._formats = tuple(
            torch_format(problem.layout, len(graph.values[name].spec.shape)) for name in graph.outputs
        )
        self._suspects = tuple(_may_alias(graph, name) for name in graph.outputs)
        self._watch = any(self._suspects)

    def store(
        self,
        made: Sequence[torch.Tensor],
        read_from: Sequence[torch.Tensor],
        results: list[torch.Tensor | None],
    ) -> None:
        """Fill `results` from the return values `made`; `read_from` are the args and constants that they may alias."""
        held = {t.untyped_storage().data_ptr() for t in read_from} if self._watch else ()
        for index, (tensor, layout) in enumerate(zip(made, self._formats, strict=True)):
            result = tensor.contiguous(memory_format=layout)
            if self._suspects[index] and result.untyped_storage().data_ptr() in held:
                result = result.clone(memory_format=layout)
            results[index] = result


def _may_alias(graph: Graph, name: str) -> bool:
    """Whether a value may lie in the memory of an input or a constant."""
    node = graph.producer(name)
    if node is None:
        return True
    if node.op in LAYERS:
        return False
    overload = _overload(node)
    if any(returned.alias_info is not None for returned in overload._schema.returns):
        return True
    # A composite operator may hand back its argument (dropout that is off), which has the result's own shape then.
    same = any(graph.values[read_name].spec == graph.values[name].spec for read_name in node.refs())
    return same and overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def _overload(node: Node) -> torch._ops.OpOverload:
    """The overload that a node names; `resolve` has checked that it is there."""
    resolve(node.op)
    _, packet, overload = node.op.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)
