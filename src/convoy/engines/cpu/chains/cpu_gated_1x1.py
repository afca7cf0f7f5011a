"""cpu.gated_1x1: a 1x1 convolution of values times a gate, in NHWC, in C (gated_1x1.c; docs/kernels/cpu.md).

    %s = aten.mul.Tensor(%x, %gate)                  gate: [n, c, 1, 1]
    %y = conv2d(%s, %w, %b, ...)                     1x1, and what may follow a convolution

So squeeze-and-excitation ends (Hu, Shen, Sun, CVPR 2018), as in EfficientNet, MobileNetV3 and RegNetY. The product is made a band
of pixels at a time, and read from the cache by the kernel that does the convolution alone (`cpu.direct`).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final

import torch

from convoy.engines.base import Executable, Packed
from convoy.engines.cost_model import KernelWork, estimate_us
from convoy.engines.cpu.chains.layer_call import ANY_CPU, LAYER_H, LayerCall, layer_call
from convoy.engines.cpu.cpu_direct import ENGINE as DIRECT
from convoy.engines.cpu.cpu_direct import PIXELS, DirectPartition
from convoy.engines.cpu.cpu_scale import gate_of
from convoy.engines.cpu.native_launch import Native, NativeExecutable, Operand
from convoy.engines.cpu.weight_tiles import STORED, storage_kernel
from convoy.engines.cpu_subgraph import CpuSubgraphEngine
from convoy.engines.subgraph import parse_subgraph
from convoy.graph.ir import Graph
from convoy.graph.layers import conv_problem
from convoy.problem import DTYPE_BYTES, ConvProblem, Knobs, Problem, SubgraphProblem
from convoy.regions.conv import conv_region
from convoy.regions.epilogue import LayerChain, chains, only_reader
from convoy.target import Target

SOURCE: Final = Path(__file__).with_name("gated_1x1.c")

LAYOUT: Final = "nhwc"

SLOT_BYTES: Final = (128 << 10, 256 << 10, 64 << 10)
"""Bytes of a band's products that a thread holds, the default first: its second cache holds the weights too."""


@dataclass(frozen=True, slots=True)
class GatedPlan:
    """The computation of a subgraph.

    Attributes:
        convolution: the convolution alone, with its epilogue.
        x: index of the input that is multiplied.
        gate: index of the input with a value for each image and channel.
        residual: index of the input that is added; -1 if none.
    """

    convolution: ConvProblem
    x: int
    gate: int
    residual: int

    @property
    def pixels(self) -> int:
        """Of an image."""
        return self.convolution.h * self.convolution.w

    @property
    def rows(self) -> ConvProblem:
        """The convolution of one image, whose pixels are rows of one."""
        return replace(self.convolution, n=1, h=self.pixels, w=1)

    def bands(self, slot_bytes: int, threads: int) -> int:
        """Parts of an image's pixels: as many as slots of this size ask for, rounded up so that threads get as many each."""
        blocks = -(-self.pixels // PIXELS)
        wanted = -(-self.pixels * self._pixel_bytes // slot_bytes)
        shares = threads // math.gcd(threads, self.convolution.n)
        return min(blocks, max(1, -(-wanted // shares)) * shares)

    def slot_values(self, slot_bytes: int, threads: int) -> int:
        """Values of a slot, in whole cache lines."""
        blocks = -(-self.pixels // PIXELS)
        pixels = -(-blocks // self.bands(slot_bytes, threads)) * PIXELS
        return -(-pixels * self.convolution.c // 32) * 32

    def workspace_bytes(self, slot_bytes: int, threads: int) -> int:
        """Slots of all threads."""
        if not self.convolution.n:
            return 0
        return threads * self.slot_values(slot_bytes, threads) * DTYPE_BYTES[self.convolution.x_dtype]

    @property
    def _pixel_bytes(self) -> int:
        return self.convolution.c * DTYPE_BYTES[self.convolution.x_dtype]


def gated_groups(graph: Graph) -> Iterator[tuple[str, LayerChain, str, str]]:
    """Each product with a gate that a 1x1 convolution alone reads: its node, the convolution's longest chain, x and the gate."""
    for node in graph.nodes:
        found = gate_of(graph, node)
        reader = only_reader(graph, node.outputs[0]) if found else None
        if found is None or reader is None or reader.op != "conv2d":
            continue
        own = chains(graph, reader)
        x, *rest = reader.refs()
        constant = all(graph.values[name].kind == "constant" for name in rest)
        if own and constant and x == node.outputs[0] and _is_1x1(conv_problem(graph, reader)):
            yield node.name, own[-1], *found


def _is_1x1(problem: ConvProblem) -> bool:
    return problem.is_pointwise and problem.groups == 1 and (problem.p, problem.q) == (problem.h, problem.w)


@lru_cache(maxsize=256)
def plan_of(text: str) -> GatedPlan | None:
    """The computation of a subgraph; None if it is another one.

    Raises:
        InputError: text that is no graph.
    """
    graph = parse_subgraph(text)
    for product, chain, x, gate in gated_groups(graph):
        region = conv_region(graph, chain, (LAYOUT,), "strict")
        convolution = region.problems[0]
        names = [constant.name for constant in graph.constants()]
        inputs = [x, gate, *region.args[1:]]
        if {node.name for node in graph.nodes} != {product, *chain.names} or graph.outputs != (chain.result,):
            return None
        if not isinstance(convolution, ConvProblem) or names != [*region.constants] or {*graph.inputs} != {*inputs}:
            return None
        places = [graph.inputs.index(name) for name in inputs]
        return GatedPlan(convolution, places[0], places[1], places[2] if len(places) > 2 else -1)
    return None


class _Gated(ctypes.Structure):
    """`Gated` of gated_1x1.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("images", "pixels", "bands", "threads", "slot_values")),
        ("layer", LayerCall),
    )


class _GatedConvolution(NativeExecutable):
    """One call, which makes those of the convolution."""

    def __init__(self, plan: GatedPlan, slot_bytes: int, target: Target) -> None:
        self._plan, self._slot_bytes, self._threads = plan, slot_bytes, torch.get_num_threads()
        kernel = DIRECT.build(plan.rows, Knobs(), target)
        assert isinstance(kernel, NativeExecutable)
        self._kernel = kernel
        self.workspace_bytes = plan.workspace_bytes(slot_bytes, self._threads)
        source = storage_kernel(SOURCE, CpuGated1x1.id, "convoy_gated_1x1", plan.convolution.x_dtype)
        *before, own = source.parts
        self.use(replace(source, parts=(*before, LAYER_H, own)))

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """As the convolution's kernel packs its own."""
        return self._kernel.pack(constants)

    def native(self, constants: Packed) -> Native | None:
        """Multiply and convolve, band by band."""
        plan = self._plan
        if not plan.convolution.n or not plan.pixels:
            return None
        launch = self._kernel.native(constants)
        assert launch is not None
        values = plan.slot_values(self._slot_bytes, self._threads)
        settings = _Gated(
            images=plan.convolution.n,
            pixels=plan.pixels,
            bands=plan.bands(self._slot_bytes, self._threads),
            threads=self._threads,
            slot_values=values,
            layer=layer_call(self._kernel, launch, values // plan.convolution.c),
        )
        residual: Operand = ("arg", plan.residual) if plan.residual >= 0 else None
        given: list[Operand] = [("arg", plan.x), ("arg", plan.gate), residual, ("result", 0), ("workspace", 0)]
        own = [operand if isinstance(operand, torch.Tensor) else None for operand in launch.tensors]
        return Native(settings, (*given, *own), ((_CALL_WORD, self._kernel.kernel),))


_CALL_WORD: Final = _Gated.layer.offset // 8
"""Index of the word that holds the convolution's kernel."""


class CpuGated1x1(CpuSubgraphEngine):
    """Products with a gate and the 1x1 convolution that reads them, in fp32 or bf16."""

    id = "cpu.gated_1x1"
    devices = ("cpu",)
    native = True
    builds_in_threads = True
    does = "computes a 1x1 convolution of values times a gate"
    layouts = (LAYOUT,)

    def samples(self) -> Sequence[Problem]:
        """The first one of EfficientNet-B0."""
        text = (
            "graph 1\ninput %v0: fp32[1,32,112,112]\ninput %v1: fp32[1,32,1,1]\nconstant %c0: fp32[16,32,1,1]\n"
            "%v2: fp32[1,32,112,112] = aten.mul.Tensor(%v0, %v1)\n"
            "%v3: fp32[1,16,112,112] = conv2d(%v2, %c0, None, (1, 1), (0, 0), (1, 1), 1)\nreturn %v3\n"
        )
        return (SubgraphProblem(text, LAYOUT),)

    def fusions(self, graph: Graph) -> Iterable[Sequence[str]]:
        """Each product with a gate, the 1x1 convolution behind it, and that convolution's epilogue."""
        return ((product, *chain.names) for product, chain, _, _ in gated_groups(graph))

    def refusal(self, problem: SubgraphProblem) -> str:
        """Refuses what `cpu.direct` refuses, values of several dtypes, and weights that it would use in parts."""
        plan = plan_of(problem.text)
        if plan is None:
            return f"{self.does}, got another subgraph"
        dtypes = {value.spec.dtype for value in parse_subgraph(problem.text).values.values()}
        if len(dtypes) > 1 or not dtypes <= set(STORED):
            return f"needs values of one dtype, {' or '.join(STORED)}, got {', '.join(sorted(dtypes))}"
        support = DIRECT.supports(plan.convolution, ANY_CPU)
        if not support:
            return support.reason
        if DirectPartition.of(plan.rows, 1).slot_floats:
            return f"needs weights of whole tiles, got {plan.convolution.c} input channels"
        return ""

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Slots of some sizes, where one thread would cut the pixels differently."""
        del target
        plan = _plan(problem)
        by_bands = {plan.bands(size, 1): size for size in reversed(SLOT_BYTES)}
        return [Knobs.of(slot_bytes=size) for size in SLOT_BYTES if size in by_bands.values()]

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """A band's products, for each thread."""
        return _plan(problem).workspace_bytes(knobs.integer("slot_bytes"), torch.get_num_threads())

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float | None:
        """The multiplications, and each tensor outside once."""
        del knobs
        return estimate_us(KernelWork(_plan(problem).convolution.flops, problem.bytes_min, 1), target)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """The libraries are compiled once for all problems."""
        return _GatedConvolution(_plan(problem), knobs.integer("slot_bytes"), target)


def _plan(problem: Problem) -> GatedPlan:
    assert isinstance(problem, SubgraphProblem)
    plan = plan_of(problem.text)
    assert plan is not None
    return plan


ENGINE = CpuGated1x1()
