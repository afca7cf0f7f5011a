"""cpu.banded: convolutions that follow each other, a band of rows at a time, in NHWC, fp32, in C (banded.c; docs/kernels/cpu.md).

    for some rows of the last result:
        for every convolution, the first one first:
            the rows of its result that the next one reads, and that are not there yet

Each convolution is done by the kernel that does it alone (`cpu.direct`, `cpu.depthwise`), and its sums are the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final

import torch

from convoy.engines.base import Engine, Executable, Packed
from convoy.engines.cost_model import KernelWork, estimate_us
from convoy.engines.cpu.chains.layer_call import ANY_CPU, LAYER_H, LayerCall, layer_call
from convoy.engines.cpu.cpu_depthwise import ENGINE as DEPTHWISE
from convoy.engines.cpu.cpu_direct import ENGINE as DIRECT
from convoy.engines.cpu.cpu_direct import DirectPartition
from convoy.engines.cpu.native_launch import PARALLEL_H, KernelSource, Native, NativeExecutable, Operand
from convoy.engines.cpu.weight_tiles import FLAGS
from convoy.engines.cpu_subgraph import CpuSubgraphEngine
from convoy.engines.subgraph import parse_subgraph
from convoy.problem import ConvProblem, Knobs, Problem, SubgraphProblem
from convoy.regions.banded import LAYOUT
from convoy.regions.conv import conv_region
from convoy.regions.epilogue import chains
from convoy.target import Target

SOURCE: Final = Path(__file__).with_name("banded.c")

MOST_STAGES: Final = 4
STATE_FLOATS: Final = 32
"""As in banded.c."""

SLOT_BYTES: Final = (384 << 10, 192 << 10, 768 << 10)
"""KiB of intermediate rows that a thread may hold, the default first: an L2 cache of 1 MB must hold weights too."""

ROWS: Final = (16, 8, 4, 2, 1)
"""Rows of a band."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One convolution of a chain.

    Attributes:
        problem: the convolution alone, with its epilogue.
        constants: indices of its constants among the subgraph's.
    """

    problem: ConvProblem
    constants: tuple[int, ...]

    @property
    def engine(self) -> Engine:
        """Who does it."""
        return DEPTHWISE if self.problem.groups > 1 else DIRECT


@dataclass(frozen=True, slots=True)
class BandPlan:
    """A chain of convolutions.

    Attributes:
        stages: the convolutions, in order.
        x: index of the input that the first one reads.
        residual: index of the input that the last one adds; -1 if none.
    """

    stages: tuple[Stage, ...]
    x: int
    residual: int

    def windows(self, rows: int) -> list[int]:
        """Rows of each intermediate result that are held at a time, for a band of `rows` rows of the last result."""
        found: list[int] = []
        for before, stage in reversed(list(pairwise(stage.problem for stage in self.stages))):
            rows = min(before.p, (rows - 1) * stage.stride_h + (stage.r - 1) * stage.dilation_h + 1)
            found.insert(0, rows)
        return found

    def slot_floats(self, rows: int) -> list[int]:
        """Offset of each intermediate result in a thread's buffer, then the buffer's size: floats, in whole cache lines.

        The first `STATE_FLOATS` of the buffer hold its state (`State` of banded.c).
        """
        inner = [stage.problem for stage in self.stages[:-1]]
        sizes = (
            -(-count * problem.q * problem.k // 16) * 16
            for count, problem in zip(self.windows(rows), inner, strict=True)
        )
        return list(accumulate(sizes, initial=STATE_FLOATS))


@lru_cache(maxsize=256)
def plan_of(text: str) -> BandPlan | str:
    """The chain of convolutions that a subgraph computes, or the reason why it is none.

    Raises:
        InputError: text that is no graph.
    """
    graph = parse_subgraph(text)
    layers = [node for node in graph.nodes if node.op == "conv2d"]
    own = [chains(graph, node) for node in layers]
    if not 2 <= len(layers) <= MOST_STAGES or not all(own):
        return f"computes a chain of 2 to {MOST_STAGES} convolutions with constant weights, got another subgraph"
    regions = [conv_region(graph, found[-1], (LAYOUT,), "strict") for found in own]
    reads, adds = [region.args[0] for region in regions], [region.args[1:] for region in regions]
    follow = reads[1:] == [region.results[0] for region in regions[:-1]] and not any(adds[:-1])
    given = {reads[0], *adds[-1]} <= set(graph.inputs)
    whole = len(graph.nodes) == sum(len(region.nodes) for region in regions)
    if not (follow and given and whole and graph.outputs == regions[-1].results):
        return "needs convolutions that each read the result before them and nothing else, got another subgraph"
    names = [constant.name for constant in graph.constants()]
    stages = [
        Stage(problem, tuple(names.index(name) for name in region.constants))
        for region in regions
        for problem in region.problems
        if isinstance(problem, ConvProblem)
    ]
    residual = graph.inputs.index(adds[-1][0]) if adds[-1] else -1
    return BandPlan(tuple(stages), graph.inputs.index(reads[0]), residual)


class _Stage(ctypes.Structure):
    """`Stage` of banded.c."""

    _fields_ = (("layer", LayerCall), ("offset", ctypes.c_int64))


class _Bands(ctypes.Structure):
    """`Bands` of banded.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("images", "bands", "threads", "slot_floats", "stages")),
        ("stage", _Stage * MOST_STAGES),
    )


_STAGE_WORDS: Final = ctypes.sizeof(_Stage) // 8
_CALL_WORD: Final = _Bands.stage.offset // 8
"""Index of the word that holds the first stage's kernel."""


class _Banded(NativeExecutable):
    """One call, which makes the others."""

    def __init__(self, plan: BandPlan, rows: int, target: Target) -> None:
        self._plan = plan
        self._rows = rows
        self._threads = torch.get_num_threads()
        self._kernels = [_kernel(stage, target) for stage in plan.stages]
        self._counts = [0] * len(self._kernels)
        self.workspace_bytes = 4 * self._threads * plan.slot_floats(rows)[-1]
        self.use(KernelSource((PARALLEL_H, LAYER_H, SOURCE), FLAGS, CpuBanded.id, "convoy_banded"))

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """As each kernel packs its own, one after the other."""
        packed = [
            kernel.pack([constants[index] for index in stage.constants])
            for kernel, stage in zip(self._kernels, self._plan.stages, strict=True)
        ]
        self._counts = [len(own) for own in packed]
        return tuple(tensor for own in packed for tensor in own)

    def native(self, constants: Packed) -> Native | None:
        """Go through the bands."""
        plan, images = self._plan, self._plan.stages[0].problem.n
        if not images:
            return None
        offsets = plan.slot_floats(self._rows)
        bands = _Bands(
            images=images,
            bands=-(-plan.stages[-1].problem.p // self._rows),
            threads=self._threads,
            slot_floats=offsets[-1],
            stages=len(plan.stages),
        )
        residual: Operand = ("arg", plan.residual) if plan.residual >= 0 else None
        tensors: list[Operand] = [("arg", plan.x), residual, ("result", 0), ("workspace", 0)]
        ends = list(accumulate(self._counts, initial=0))
        windows = [*plan.windows(self._rows), self._rows]
        for index, (kernel, window) in enumerate(zip(self._kernels, windows, strict=True)):
            one = kernel.native(constants[ends[index] : ends[index + 1]])
            assert one is not None
            bands.stage[index] = _Stage(layer_call(kernel, one, window), offsets[index])
            tensors += [operand if isinstance(operand, torch.Tensor) else None for operand in one.tensors]
        calls = [(_CALL_WORD + i * _STAGE_WORDS, kernel.kernel) for i, kernel in enumerate(self._kernels)]
        return Native(bands, tuple(tensors), tuple(calls))


def _kernel(stage: Stage, target: Target) -> NativeExecutable:
    built = stage.engine.build(stage.problem, Knobs(), target)
    assert isinstance(built, NativeExecutable)
    return built


class CpuBanded(CpuSubgraphEngine):
    """Convolutions in fp32 whose inner values are large."""

    id = "cpu.banded"
    devices = ("cpu",)
    native = True
    builds_in_threads = True
    patterns = ("banded",)
    does = "computes chains of convolutions"
    layouts = (LAYOUT,)

    def refusal(self, problem: SubgraphProblem) -> str:
        """Refuses what the convolutions' own engines refuse, and weights too large for one thread's L2 cache."""
        plan = plan_of(problem.text)
        if isinstance(plan, str):
            return plan
        for stage in plan.stages:
            if stage.problem.x_dtype != "fp32":
                return f"needs fp32, got {stage.problem.x_dtype}"
            support = stage.engine.supports(stage.problem, ANY_CPU)
            if not support:
                return support.reason
            if stage.engine is DIRECT and DirectPartition.of(stage.problem, 1).slot_floats:
                return (
                    f"needs weights of whole tiles, got {stage.problem.c} input and {stage.problem.k} output channels"
                )
        return ""

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """As many rows as fit into slots of some sizes."""
        del target
        plan = _plan(problem)
        return [Knobs.of(rows=rows) for rows in dict.fromkeys(_rows(plan, size) for size in SLOT_BYTES)]

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """Rows of what lies inside, for each thread."""
        return 4 * torch.get_num_threads() * _plan(problem).slot_floats(knobs.integer("rows"))[-1]

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float | None:
        """The multiplications, and each tensor outside once."""
        del knobs
        flops = sum(stage.problem.flops for stage in _plan(problem).stages)
        return estimate_us(KernelWork(flops, problem.bytes_min, 1), target)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """The libraries are compiled once for all problems."""
        return _Banded(_plan(problem), knobs.integer("rows"), target)


def _plan(problem: Problem) -> BandPlan:
    assert isinstance(problem, SubgraphProblem)
    plan = plan_of(problem.text)
    assert isinstance(plan, BandPlan)
    return plan


def _rows(plan: BandPlan, most_bytes: int) -> int:
    """The longest band of `ROWS` whose slot is no larger; the shortest where none is."""
    return next((rows for rows in ROWS if 4 * plan.slot_floats(rows)[-1] <= most_bytes), ROWS[-1])


ENGINE = CpuBanded()
