"""cpu.scale: scale and shift per channel in NHWC, after a concatenation and before an activation, in C (scale.c).

It computes a batch norm at inference, one scale and shift per channel:

    %x = aten.cat.default((%a, %b), 1)                or any 4-D value
    %n = aten.addcmul.default(%shift, %x, %scale)
    %y = aten.relu.default(%n)                        or another activation, or nothing

and the scaling of squeeze-and-excitation (Hu, Shen, Sun, CVPR 2018):

    %y = aten.mul.Tensor(%x, %gate)                   gate: [n, c, 1, 1]
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from convoy.engines.base import Executable, Packed
from convoy.engines.cpu.native_launch import Native, NativeExecutable, Operand
from convoy.engines.cpu.weight_tiles import ACTIVATIONS, STORED, storage_kernel
from convoy.engines.cpu_subgraph import CpuSubgraphEngine
from convoy.engines.subgraph import parse_subgraph
from convoy.graph.ir import Graph, Node, Ref
from convoy.problem import Knobs, Problem, SubgraphProblem, TensorSpec
from convoy.regions.activation import activation_of
from convoy.regions.concat import concat_inputs
from convoy.target import Target

SOURCE: Final = Path(__file__).with_name("scale.c")


@dataclass(frozen=True, slots=True)
class Scaling:
    """The computation of a subgraph.

    Attributes:
        specs: the concatenated values; one if nothing is concatenated.
        args: index of the input that holds each of them.
        gate: index of the input that holds the scales of each image; -1 if scale and shift are the subgraph's two constants.
        activation: of `ACTIVATIONS`.
    """

    specs: tuple[TensorSpec, ...]
    args: tuple[int, ...]
    gate: int
    activation: str

    @staticmethod
    def of(problem: SubgraphProblem) -> Scaling | None:
        """The computation of a subgraph; None if it is not such a scale."""
        graph = parse_subgraph(problem.text)
        nodes = list(graph.nodes)
        names = concat_inputs(graph, nodes[0]) if nodes else ()
        value = nodes.pop(0).outputs[0] if names else ""
        if not 1 <= len(nodes) <= 2:
            return None
        node, *rest = nodes
        found = _of_constants(graph, node) or gate_of(graph, node)
        activation = _activation(node, rest)
        if found is None or activation not in ACTIVATIONS or graph.outputs != nodes[-1].outputs:
            return None
        x, gate = found
        if x != value:
            names = () if names else (x,)
        if not names or not {*names, *filter(None, [gate])} <= set(graph.inputs):
            return None
        specs, args = (graph.values[name].spec for name in names), (graph.inputs.index(name) for name in names)
        return Scaling(tuple(specs), tuple(args), graph.inputs.index(gate) if gate else -1, activation)


def _of_constants(graph: Graph, node: Node) -> tuple[str, str] | None:
    """The value that a node multiplies with a constant and adds to one, each of a value a channel; None for any other."""
    names = [arg.name for arg in node.args if isinstance(arg, Ref)]
    if node.op != "aten.addcmul.default" or node.kwargs or not len(names) == len(node.args) == 3:
        return None
    shift, x, scale = names
    shape = graph.values[x].spec.shape
    known = [constant.name for constant in graph.constants()]
    fits = all(graph.values[name].spec.shape == (1, *shape[1:2], 1, 1) for name in (shift, scale))
    return (x, "") if len(shape) == 4 and known == [shift, scale] and fits else None


def gate_of(graph: Graph, node: Node) -> tuple[str, str] | None:
    """The value that a node multiplies with another of one value for each image and channel, and that one; None for any other."""
    names = [arg.name for arg in node.args if isinstance(arg, Ref)]
    if node.op != "aten.mul.Tensor" or node.kwargs or not len(names) == len(node.args) == 2:
        return None
    made = graph.values[node.outputs[0]].spec.shape
    for x, gate in (names, names[::-1]):
        shapes = graph.values[x].spec.shape, graph.values[gate].spec.shape
        if len(made) == 4 and shapes == (made, (*made[:2], 1, 1)):
            return x, gate
    return None


def _activation(node: Node, rest: Sequence[Node]) -> str:
    """The activation that is a node's only user; empty if there is none."""
    if not rest:
        return "none"
    return activation_of(rest[0]) if tuple(rest[0].refs()) == node.outputs else ""


class _Scale(NativeExecutable):
    def __init__(self, scaling: Scaling) -> None:
        n, _, h, w = scaling.specs[0].shape
        channels = [spec.shape[1] for spec in scaling.specs]
        activation, own = ACTIVATIONS.index(scaling.activation), scaling.gate >= 0
        settings = (n, h * w, own, len(channels), torch.get_num_threads(), activation, *channels)
        self._scaling, self._empty = scaling, n * h * w == 0
        self._settings = (ctypes.c_int64 * len(settings))(*settings)
        self.use(storage_kernel(SOURCE, ScaleCpu.id, "convoy_scale", scaling.specs[0].dtype))

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Shift and scale, a value a channel."""
        return tuple(constant.detach().flatten().contiguous() for constant in constants)

    def native(self, constants: Packed) -> Native | None:
        """Multiply, add, activate."""
        scaling = self._scaling
        scale: Operand = ("arg", scaling.gate)
        shift: Operand = None
        if scaling.gate < 0:
            shift, scale = constants
        args: list[Operand] = [("arg", index) for index in scaling.args]
        tensors: tuple[Operand, ...] = (*args, scale, shift, ("result", 0))
        return None if self._empty else Native(self._settings, tensors)


class ScaleCpu(CpuSubgraphEngine):
    """Values with four dimensions, in fp32 or bf16."""

    id = "cpu.scale"
    devices = ("cpu",)
    native = True
    builds_in_threads = True
    does = "scales channels"
    layouts = ("nhwc",)

    def refusal(self, problem: SubgraphProblem) -> str:
        """It scales values in fp32 and bf16."""
        scaling = Scaling.of(problem)
        if scaling is None:
            allowed = "with a concatenation before or an activation after it"
            return f"computes a scale and shift per channel, {allowed}, got another subgraph"
        if scaling.specs[0].dtype not in STORED:
            return f"needs {' or '.join(STORED)}, got {scaling.specs[0].dtype}"
        dtypes = {value.spec.dtype for value in parse_subgraph(problem.text).values.values()}
        if len(dtypes) > 1:
            return f"needs values of one dtype, got {', '.join(sorted(dtypes))}"
        return ""

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """The library is compiled once for all problems."""
        del knobs, target
        assert isinstance(problem, SubgraphProblem)
        scaling = Scaling.of(problem)
        assert scaling is not None
        return _Scale(scaling)


ENGINE = ScaleCpu()
