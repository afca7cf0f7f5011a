"""cpu.norm: a batch norm at inference in NHWC, fp32, with the concatenation before it and the activation behind, in C (norm.c).

%x = aten.cat.default((%a, %b), 1)                or any 4-D value
%n = aten.addcmul.default(%shift, %x, %scale)     one of each a channel
%y = aten.relu.default(%n)                        or relu6, or nothing
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from convoy.engines.base import Executable, Packed
from convoy.engines.cpu.native import Native, NativeExecutable, bound_call
from convoy.engines.cpu.piece import CpuPiece
from convoy.engines.cpu.tiles import ACTIVATIONS, FLAGS, VECTORS_H
from convoy.engines.host_compiler import lanes, library
from convoy.engines.piece import read
from convoy.graph.ir import Graph, Node, Ref, Value
from convoy.problem import Knobs, Problem, SubgraphProblem, TensorSpec
from convoy.regions.activation import activation_of
from convoy.regions.concat import pieces
from convoy.target import Target

SOURCE: Final = Path(__file__).with_name("norm.c")


@dataclass(frozen=True, slots=True)
class Norm:
    """What a piece of the graph norms.

    Attributes:
        specs: what is concatenated, one value or several.
        args: which input each of these is.
        shift, scale: which constant.
        activation: of `ACTIVATIONS`.
    """

    specs: tuple[TensorSpec, ...]
    args: tuple[int, ...]
    shift: int
    scale: int
    activation: str

    @staticmethod
    def of(problem: SubgraphProblem) -> Norm | None:
        """A piece that is one norm; None for any other."""
        graph = read(problem.text)
        nodes = list(graph.nodes)
        names = pieces(graph, nodes[0]) if nodes else ()
        value = nodes.pop(0).outputs[0] if names else ""
        if not 1 <= len(nodes) <= 2:
            return None
        norm, *rest = nodes
        found = _per_channel(graph, norm)
        activation = _activation(norm, rest)
        if found is None or activation not in ACTIVATIONS or graph.outputs != nodes[-1].outputs:
            return None
        shift, x, scale = found
        if x != value:
            names = () if names else (x,)
        if not names or not set(names) <= set(graph.inputs):
            return None
        constants = [constant.name for constant in graph.constants()]
        specs, args = (graph.values[name].spec for name in names), (graph.inputs.index(name) for name in names)
        return Norm(tuple(specs), tuple(args), constants.index(shift), constants.index(scale), activation)


def _per_channel(graph: Graph, node: Node) -> tuple[str, str, str] | None:
    """Shift, value and scale of a node that multiplies and adds, with constants of one value a channel; None for any other."""
    names = [arg.name for arg in node.args if isinstance(arg, Ref)]
    if node.op != "aten.addcmul.default" or node.kwargs or not len(names) == len(node.args) == 3:
        return None
    shift, x, scale = names
    spec = graph.values[x].spec
    if len(spec.shape) != 4:
        return None
    constant = Value("", TensorSpec((1, spec.shape[1], 1, 1), spec.dtype), "constant")
    fits = all(replace(graph.values[name], name="") == constant for name in (shift, scale))
    return (shift, x, scale) if fits else None


def _activation(norm: Node, rest: Sequence[Node]) -> str:
    """What follows a norm and nothing else; empty where that is no activation."""
    if not rest:
        return "none"
    return activation_of(rest[0]) if tuple(rest[0].refs()) == norm.outputs else ""


class _Norm(NativeExecutable):
    def __init__(self, norm: Norm) -> None:
        n, _, h, w = norm.specs[0].shape
        channels = [spec.shape[1] for spec in norm.specs]
        activation = ACTIVATIONS.index(norm.activation)
        settings = (n * h * w, len(channels), torch.get_num_threads(), activation, *channels)
        self._norm, self._empty = norm, n * h * w == 0
        self._settings = (ctypes.c_int64 * len(settings))(*settings)
        self.call = bound_call(library((VECTORS_H, SOURCE), (*FLAGS, f"-DLANES={lanes()}"), NormCpu.id), "convoy_norm")

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Scale and shift, a value a channel."""
        return tuple(constants[i].detach().flatten().contiguous() for i in (self._norm.scale, self._norm.shift))

    def native(self, constants: Packed) -> Native | None:
        """Multiply, add, activate."""
        args = (("arg", index) for index in self._norm.args)
        return None if self._empty else Native(self._settings, (*args, *constants, ("result", 0)))


class NormCpu(CpuPiece):
    """fp32 values with four dimensions."""

    id = "cpu.norm"
    does = "norms"
    layouts = ("nhwc",)

    def refusal(self, problem: SubgraphProblem) -> str:
        """It norms fp32 values."""
        norm = Norm.of(problem)
        if norm is None:
            return (
                "computes a batch norm with the concatenation before it and the activation behind it, got another piece"
            )
        if norm.specs[0].dtype != "fp32":
            return f"needs fp32, got {norm.specs[0].dtype}"
        return ""

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """The library is compiled once for all problems."""
        del knobs, target
        assert isinstance(problem, SubgraphProblem)
        norm = Norm.of(problem)
        assert norm is not None
        return _Norm(norm)


ENGINE = NormCpu()
