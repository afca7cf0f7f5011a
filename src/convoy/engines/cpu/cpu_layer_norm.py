"""cpu.layer_norm: layer norm over the channels of each pixel, in C (layer_norm.c; docs/kernels/cpu.md).

    %l = aten.permute.default(%x, (0, 2, 3, 1))               x: [n, c, h, w], in nhwc or nchw
    %n = aten.layer_norm.default(%l, (c,), %scale, %shift, 1e-06, False)
    %y = aten.permute.default(%n, (0, 3, 1, 2))
    %z = aten.view.default(%y, (n, c))                        or none; of one pixel

and a layer norm by itself, over the last dimensions of a contiguous value.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from convoy.engines.base import Executable, Packed
from convoy.engines.cpu.native_launch import Native, NativeExecutable
from convoy.engines.cpu.weight_tiles import STORED, storage_kernel
from convoy.engines.cpu_subgraph import CpuSubgraphEngine
from convoy.engines.subgraph import parse_subgraph
from convoy.graph.ir import Graph, Node, Ref
from convoy.problem import Knobs, Problem, SubgraphProblem
from convoy.regions.epilogue import only_reader
from convoy.regions.pool import flattens
from convoy.target import Target

SOURCE: Final = Path(__file__).with_name("layer_norm.c")

_PERMUTE: Final = "aten.permute.default"
_NORM: Final = "aten.layer_norm.default"
_DEFAULTS: Final = (None, None, None, None, 1e-5)
"""Of a layer norm's arguments; it has at least two."""

_TO_LAST: Final = (0, 2, 3, 1)
_TO_FIRST: Final = (0, 3, 1, 2)


@dataclass(frozen=True, slots=True)
class ChannelNorm:
    """The computation of a subgraph.

    Attributes:
        images: images.
        pixels: pixels of an image; each is normalised by itself.
        channels: values of a pixel.
        planes: whether the channels of a pixel lie a plane of pixels apart.
        scale: whether there is a factor for each channel, the first constant.
        shift: whether there is a summand for each channel, the last constant.
        eps: added to the variance.
        dtype: of all values.
    """

    images: int
    pixels: int
    channels: int
    planes: bool
    scale: bool
    shift: bool
    eps: float
    dtype: str

    @staticmethod
    def of(problem: SubgraphProblem) -> ChannelNorm | None:
        """The computation of a subgraph; None if it is no such layer norm."""
        graph = parse_subgraph(problem.text)
        nodes = list(graph.nodes)
        if len(nodes) == 4 and flattens(graph, nodes[3]) and nodes[3].args[0] == Ref(nodes[2].outputs[0]):
            *nodes, view = nodes
            if graph.values[nodes[2].outputs[0]].spec.shape[2:] != (1, 1) or graph.outputs != view.outputs:
                return None
        elif not nodes or graph.outputs != nodes[-1].outputs:
            return None
        if len(graph.inputs) != 1 or len(nodes) not in (1, 3):
            return None
        permuted = len(nodes) == 3
        norm = nodes[1] if permuted else nodes[0]
        if permuted and not _are_permutes(nodes):
            return None
        return _norm(graph, norm, problem.layout, permuted=permuted)


def _are_permutes(nodes: Sequence[Node]) -> bool:
    """Whether the channels are moved last before, and back after a node that reads and makes one value."""
    before, norm, after = nodes
    orders = [node.args[1:] if node.op == _PERMUTE and not node.kwargs else () for node in (before, after)]
    linked = norm.args[:1] == (Ref(before.outputs[0]),) and after.args[:1] == (Ref(norm.outputs[0]),)
    return linked and orders == [(_TO_LAST,), (_TO_FIRST,)]


def _norm(graph: Graph, node: Node, layout: str, *, permuted: bool) -> ChannelNorm | None:
    if node.op != _NORM or node.kwargs or not isinstance(node.args[0], Ref):
        return None
    x, shape, scale, shift, eps = (*node.args, *_DEFAULTS[len(node.args) :])[:5]
    assert isinstance(x, Ref)
    spec = graph.values[x.name].spec
    if not isinstance(shape, tuple) or not isinstance(eps, float) or spec.shape[-len(shape) :] != shape:
        return None
    given = [arg for arg in (scale, shift) if arg is not None]
    constants = [value.name for value in graph.constants()]
    if [arg.name for arg in given if isinstance(arg, Ref)] != constants:
        return None
    if any(graph.values[name].spec.shape != shape or graph.values[name].spec.dtype != spec.dtype for name in constants):
        return None
    if permuted and (len(shape) != 1 or layout not in ("nhwc", "nchw")):
        return None
    if not permuted and layout == "nhwc":
        return None
    channels = math.prod(spec.shape[-len(shape) :])
    images = spec.shape[0] if permuted else 1
    pixels = math.prod(spec.shape[1:3]) if permuted else math.prod(spec.shape[: -len(shape)])
    planes = permuted and layout == "nchw"
    return ChannelNorm(images, pixels, channels, planes, scale is not None, shift is not None, eps, spec.dtype)


class _LayerNorm(NativeExecutable):
    def __init__(self, norm: ChannelNorm) -> None:
        (bits,) = struct.unpack("i", struct.pack("f", norm.eps))
        settings = (norm.images, norm.pixels, norm.channels, norm.planes, torch.get_num_threads(), bits)
        self._norm, self._settings = norm, (ctypes.c_int64 * len(settings))(*settings)
        self.use(storage_kernel(SOURCE, LayerNormCpu.id, "convoy_layer_norm", norm.dtype))

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Scale and shift, in order of the channels, in fp32."""
        return tuple(constant.detach().flatten().float().contiguous() for constant in constants)

    def native(self, constants: Packed) -> Native | None:
        """Mean, variance, and the normalised values."""
        norm = self._norm
        scale = constants[0] if norm.scale else None
        shift = constants[-1] if norm.shift else None
        if norm.images * norm.pixels * norm.channels == 0:
            return None
        return Native(self._settings, (("arg", 0), scale, shift, ("result", 0)))


class LayerNormCpu(CpuSubgraphEngine):
    """Values in fp32 or bf16: 4-D ones with the channels anywhere, others over their last dimensions."""

    id = "cpu.layer_norm"
    devices = ("cpu",)
    native = True
    builds_in_threads = True
    does = "computes layer norms"
    layouts = ("nhwc", "nchw", "any")

    def fusions(self, graph: Graph) -> Iterable[Sequence[str]]:
        """Each layer norm with the permutes around it, and with a view that flattens one pixel."""
        for node in graph.nodes:
            if node.op != _NORM or not isinstance(node.args[0], Ref):
                continue
            before, after = graph.producer(node.args[0].name), only_reader(graph, node.outputs[0])
            if before is None or after is None or only_reader(graph, before.outputs[0]) is not node:
                continue
            if _are_permutes((before, node, after)):
                group = (before.name, node.name, after.name)
                yield group
                view = only_reader(graph, after.outputs[0])
                if view is not None and flattens(graph, view):
                    yield (*group, view.name)

    def refusal(self, problem: SubgraphProblem) -> str:
        """It normalises values in fp32 and bf16."""
        norm = ChannelNorm.of(problem)
        if norm is None:
            return "computes a layer norm over the channels, got another subgraph or memory format"
        return "" if norm.dtype in STORED else f"needs {' or '.join(STORED)}, got {norm.dtype}"

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """The library is compiled once for all problems."""
        del knobs, target
        assert isinstance(problem, SubgraphProblem)
        norm = ChannelNorm.of(problem)
        assert norm is not None
        return _LayerNorm(norm)


ENGINE = LayerNormCpu()
