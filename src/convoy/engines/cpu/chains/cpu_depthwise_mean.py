"""cpu.depthwise_mean: a depthwise convolution and the mean of its result over each image, in NHWC, in C (depthwise_mean.c).

    %y = conv2d(%x, %w, %b, ...)                                one filter a channel
    %a = aten.silu.default(%y)                                  or another activation, or nothing
    %m = aten.adaptive_avg_pool2d.default(%a, (1, 1))           or the same as aten.mean.dim

Both are results: squeeze-and-excitation reads both (Hu, Shen, Sun, CVPR 2018), in MobileNetV3 and EfficientNet.
Each row is done by the kernel that does the convolution alone (`cpu.depthwise`), and then added, while a cache holds it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Final

import torch

from convoy.engines.base import Executable, Packed
from convoy.engines.cost_model import KernelWork, estimate_us
from convoy.engines.cpu.chains.layer_call import ANY_CPU, LAYER_H, LayerCall, layer_call
from convoy.engines.cpu.cpu_depthwise import ENGINE as DEPTHWISE
from convoy.engines.cpu.native_launch import Native, NativeExecutable, Operand
from convoy.engines.cpu.weight_tiles import STORED, storage_kernel
from convoy.engines.cpu_subgraph import CpuSubgraphEngine
from convoy.engines.subgraph import averages_images, parse_subgraph
from convoy.graph.ir import Graph
from convoy.graph.layers import conv_problem
from convoy.problem import ConvProblem, Knobs, Problem, SubgraphProblem
from convoy.regions.conv import conv_region
from convoy.regions.epilogue import LayerChain, chains
from convoy.target import Target

SOURCE: Final = Path(__file__).with_name("depthwise_mean.c")

LAYOUT: Final = "nhwc"


def averaged_groups(graph: Graph) -> Iterator[tuple[LayerChain, str]]:
    """Each depthwise convolution's chain whose result another node averages and others read, and that node."""
    for node in graph.nodes:
        if node.op != "conv2d" or any(graph.values[name].kind != "constant" for name in list(node.refs())[1:]):
            continue
        problem = conv_problem(graph, node)
        if not 1 < problem.c == problem.k == problem.groups:
            continue
        for chain in chains(graph, node):
            means = [user for user in graph.users(chain.result) if averages_images(graph, user)]
            if means and not chain.residual:
                yield chain, means[0].name


@lru_cache(maxsize=256)
def convolution_of(text: str) -> ConvProblem | None:
    """The convolution of a subgraph that is such a group, with both results; None if it is another subgraph.

    Raises:
        InputError: text that is no graph.
    """
    graph = parse_subgraph(text)
    for chain, mean in averaged_groups(graph):
        region = conv_region(graph, chain, (LAYOUT,), "strict")
        problem = region.problems[0]
        whole = {node.name for node in graph.nodes} == {*chain.names, mean}
        both = graph.outputs == (chain.result, graph.node(mean).outputs[0])
        names = [constant.name for constant in graph.constants()]
        if whole and both and [*graph.inputs] == [region.args[0]] and names == [*region.constants]:
            return problem if isinstance(problem, ConvProblem) else None
    return None


class _Mean(ctypes.Structure):
    """`Mean` of depthwise_mean.c."""

    _fields_ = (("images", ctypes.c_int64), ("threads", ctypes.c_int64), ("layer", LayerCall))


_CALL_WORD: Final = _Mean.layer.offset // 8
"""Index of the word that holds the convolution's kernel."""


class _AveragedDepthwise(NativeExecutable):
    """One call, which makes those of the convolution."""

    def __init__(self, problem: ConvProblem, target: Target) -> None:
        kernel = DEPTHWISE.build(problem, Knobs(), target)
        assert isinstance(kernel, NativeExecutable)
        self._kernel, self._problem = kernel, problem
        self.workspace_bytes = _sums_bytes(problem)
        source = storage_kernel(SOURCE, CpuDepthwiseMean.id, "convoy_depthwise_mean", problem.x_dtype)
        *before, own = source.parts
        self.use(replace(source, parts=(*before, LAYER_H, own)))

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """As the convolution's kernel packs its own."""
        return self._kernel.pack(constants)

    def native(self, constants: Packed) -> Native | None:
        """Convolve and add row by row, then add the rows."""
        launch = self._kernel.native(constants)
        if launch is None:
            return None
        settings = _Mean(self._problem.n, torch.get_num_threads(), layer_call(self._kernel, launch, 1))
        given: list[Operand] = [("arg", 0), ("result", 0), ("result", 1), ("workspace", 0)]
        own = [operand if isinstance(operand, torch.Tensor) else None for operand in launch.tensors]
        return Native(settings, (*given, *own), ((_CALL_WORD, self._kernel.kernel),))


class CpuDepthwiseMean(CpuSubgraphEngine):
    """Depthwise convolutions whose result is averaged, in fp32 or bf16."""

    id = "cpu.depthwise_mean"
    devices = ("cpu",)
    native = True
    builds_in_threads = True
    does = "computes a depthwise convolution and its result's mean"
    layouts = (LAYOUT,)

    def samples(self) -> Sequence[Problem]:
        """The first one of EfficientNet-B0."""
        image, places = "fp32[1,32,112,112]", "(1, 1), (1, 1), (1, 1), 32)"
        text = (
            f"graph 1\ninput %v0: {image}\nconstant %c0: fp32[32,1,3,3]\n"
            f"%v1: {image} = conv2d(%v0, %c0, None, {places}\n%v2: {image} = aten.silu.default(%v1)\n"
            "%v3: fp32[1,32,1,1] = aten.adaptive_avg_pool2d.default(%v2, (1, 1))\nreturn %v2, %v3\n"
        )
        return (SubgraphProblem(text, LAYOUT),)

    def fusions(self, graph: Graph) -> Iterable[Sequence[str]]:
        """Each depthwise convolution with its activation, and the mean of the result."""
        return ((*chain.names, mean) for chain, mean in averaged_groups(graph))

    def refusal(self, problem: SubgraphProblem) -> str:
        """Refuses what `cpu.depthwise` refuses, and values of several dtypes."""
        convolution = convolution_of(problem.text)
        if convolution is None:
            return f"{self.does}, got another subgraph"
        dtypes = {value.spec.dtype for value in parse_subgraph(problem.text).values.values()}
        if len(dtypes) > 1 or not dtypes <= set(STORED):
            return f"needs values of one dtype, {' or '.join(STORED)}, got {', '.join(sorted(dtypes))}"
        support = DEPTHWISE.supports(convolution, ANY_CPU)
        return "" if support else support.reason

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """The sums of all rows."""
        del knobs
        return _sums_bytes(_convolution(problem))

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float | None:
        """The multiplications, and each tensor outside once."""
        del knobs
        return estimate_us(KernelWork(_convolution(problem).flops, problem.bytes_min, 1), target)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """The libraries are compiled once for all problems."""
        del knobs
        return _AveragedDepthwise(_convolution(problem), target)


def _convolution(problem: Problem) -> ConvProblem:
    assert isinstance(problem, SubgraphProblem)
    found = convolution_of(problem.text)
    assert found is not None
    return found


def _sums_bytes(problem: ConvProblem) -> int:
    return 4 * problem.n * problem.p * problem.c


ENGINE = CpuDepthwiseMean()
