"""Tiles of one thread block, and an estimate of each one's time; `triton_tile_search` finds those worth trying.

The estimate counts, for one multiprocessor, tensor-core cycles, bytes from L2 and bytes in flight, and for the whole device
the bytes from memory and the fixed costs of launches. Its constants were fitted to 3,130 timings of the swap-AB kernel on an
H100, fp16 and TF32, batch 1 and 32 (docs/kernels/triton.md): 12 % root mean square error. On average the first tile is 3 %
behind the best candidate of its problem, and the best of the first four 1 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from convoy.problem import ConvProblem, Knobs, LinearProblem
from convoy.problem.spec import DTYPE_BYTES

_CLOCK_GHZ = 1.7
_LOAD_BYTES_NS_PER_SM = 497.0
_LATENCY_NS = 647.0
_STEP_NS = 34.0
_MEMORY_BYTES_NS = 4200.0
_PARTIAL_BYTES_NS = 3470.0
_LAUNCH_US = 0.56
_AHEAD_US = 0.54
_FETCHED_US = 0.19
_REDUCE_US = 0.60
_FILL_US = 1.94
_STORE_US = 0.18 / 8192
SHARED_BYTES = 232448


@dataclass(frozen=True, slots=True)
class ConvView:
    """Sizes of a convolution as the kernels see it: a linear layer or a 1x1 convolution is one row of pixels.

    Letters are cuDNN's; `bytes_each` is the size of one element of x and weight.
    """

    n: int
    h: int
    w: int
    c: int
    k: int
    p: int
    q: int
    r: int = 1
    s: int = 1
    stride_h: int = 1
    stride_w: int = 1
    pad_h: int = 0
    pad_w: int = 0
    dilation_h: int = 1
    dilation_w: int = 1
    bytes_each: int = 2

    @property
    def pixels(self) -> int:
        """Output pixels over all images."""
        return self.n * self.p * self.q

    @property
    def strided(self) -> bool:
        """Whether taps need the five-dimensional view of x."""
        return (self.stride_h > 1 or self.stride_w > 1) and not self.is_1x1

    @property
    def is_1x1(self) -> bool:
        """One tap, no padding: a stride is then only a matter of x's strides."""
        return self.r == self.s == 1 and self.pad_h == self.pad_w == 0


def conv_view(problem: ConvProblem) -> ConvView:
    """A convolution as it is."""
    return ConvView(
        problem.n, problem.h, problem.w, problem.c, problem.k, problem.p, problem.q, problem.r, problem.s,
        problem.stride_h, problem.stride_w, problem.pad_h, problem.pad_w, problem.dilation_h, problem.dilation_w,
        DTYPE_BYTES[problem.x_dtype],
    )  # fmt: skip


def row_view(problem: ConvProblem | LinearProblem) -> ConvView:
    """A linear layer, or a 1x1 convolution of stride 1, as one image of one row: its pixels need no box."""
    if isinstance(problem, LinearProblem):
        return ConvView(1, 1, problem.n, problem.c, problem.k, 1, problem.n, bytes_each=DTYPE_BYTES[problem.dtype])
    pixels = problem.n * problem.p * problem.q
    return ConvView(1, 1, pixels, problem.c, problem.k, 1, pixels, bytes_each=DTYPE_BYTES[problem.x_dtype])


@dataclass(frozen=True, slots=True)
class TritonTile:
    """A thread block's tile: `block_k` output channels by a box of pixels, `block_c` input channels an iteration.

    `pdl`: launched before the previous kernel has ended, and waits inside. `prefetch`: prefetches weights before that wait.
    """

    block_k: int
    block_n: int
    block_h: int
    block_w: int
    block_c: int
    stages: int = 4
    warps: int = 4
    split: int = 1
    pdl: bool = False
    prefetch: bool = False

    @property
    def pixels(self) -> int:
        """Pixels of the box."""
        return self.block_n * self.block_h * self.block_w

    @property
    def knobs(self) -> Knobs:
        """As an engine's knobs."""
        return Knobs.of(**{name: getattr(self, name) for name in self.__slots__})

    @staticmethod
    def of(knobs: Knobs) -> TritonTile:
        """Inverse of `knobs`; raises KeyError or InputError for knobs of another engine."""
        switches = {name: bool(knobs[name]) for name in ("pdl", "prefetch")}
        return TritonTile(
            **{name: knobs.integer(name) for name in TritonTile.__slots__ if name not in switches}, **switches
        )

    def tiles(self, view: ConvView) -> tuple[int, int, int, int]:
        """Tiles along k, n, p and q."""
        return (
            -(-view.k // self.block_k),
            -(-view.n // self.block_n),
            -(-view.p // self.block_h),
            -(-view.q // self.block_w),
        )

    def c_blocks(self, view: ConvView) -> int:
        """Iterations for one tap."""
        return -(-view.c // self.block_c)

    def iterations(self, view: ConvView) -> int:
        """Iterations of the whole reduction."""
        return view.r * view.s * self.c_blocks(view)

    def splits(self, view: ConvView) -> tuple[int, int]:
        """Shares of the reduction that are not empty, and iterations of each."""
        iterations = self.iterations(view)
        each = -(-iterations // self.split)
        return -(-iterations // each), each


class TileCosts:
    """The estimates of one view's tiles on one device; what tiles share is computed once.

    Args:
        view: the convolution.
        units: multiprocessors.
        planes: 3 for a product of split operands, else 1.
        groups: how many such convolutions one launch computes, each by tiles of its own.
    """

    def __init__(self, view: ConvView, units: int, planes: int, groups: int = 1) -> None:
        weight_bytes = view.k * view.c * view.r * view.s * view.bytes_each
        x_bytes = view.n * view.h * view.w * view.c * view.bytes_each
        y_bytes = view.pixels * view.k * view.bytes_each
        self._memory_us = groups * (weight_bytes + x_bytes + y_bytes) / _MEMORY_BYTES_NS / 1000
        self._partial_values, self._bytes_each = groups * view.pixels * view.k, view.bytes_each
        self._units, self._planes, self._groups = units, planes, groups
        self._double = 1 if planes == 1 else 2
        self._steps: dict[tuple[int, int, int], tuple[int, float]] = {}

    def step(self, block_k: int, pixels: int, block_c: int) -> tuple[int, float]:
        """Bytes of a stage, and nanoseconds of an iteration's products or loads."""
        key = (block_k, pixels, block_c)
        if key not in self._steps:
            stage_bytes = (block_k + pixels) * block_c * self._bytes_each * self._double
            k_steps = block_c * self._bytes_each / 32 * self._planes
            products_ns = max(1.0, block_k / 64) * k_steps * max(pixels / 2, 16 + pixels / 4) / _CLOCK_GHZ
            if block_k < 64 or pixels < 16:
                products_ns *= 2  # mma instead of wgmma
            self._steps[key] = stage_bytes, max(products_ns, stage_bytes / _LOAD_BYTES_NS_PER_SM)
        return self._steps[key]

    def us(
        self, block_k: int, pixels: int, block_c: int, stages: Sequence[int], warps: int, *, tiles: int, splits: int,
        each: int, pdl: bool = False, prefetch: bool = False,
    ) -> list[float]:  # fmt: skip
        """Estimated microseconds of a tile with each number of stages.

        `tiles` of them make a group, each in `splits` shares of `each` iterations.
        """
        stage_bytes, busy_ns = self.step(block_k, pixels, block_c)
        threads = 32 * warps
        registers = min(255, 40 + 1.5 * block_k * pixels / threads * self._double)
        most = min(2048 // threads, int(65536 // (registers * threads)))
        a_sm = -(-self._groups * tiles * splits // self._units)
        rounds = a_sm * each
        rest = _STORE_US * max(0, a_sm - 1) * block_k * pixels - _AHEAD_US * pdl
        last = (
            -(_FETCHED_US * prefetch)
            if splits == 1
            else _REDUCE_US + 8.0 * splits * self._partial_values / _PARTIAL_BYTES_NS / 1000
        )
        found: list[float] = []
        for depth in stages:
            resident = min(SHARED_BYTES // (depth * stage_bytes + 1024), most)
            if resident < 1:
                found.append(math.inf)
                continue
            step_ns = busy_ns + _LATENCY_NS / (depth * max(1, min(a_sm, resident))) + _STEP_NS
            filling = _FILL_US * math.sqrt(-(-a_sm // resident))
            found.append(_LAUNCH_US + rounds * step_ns / 1000 + filling + self._memory_us + rest + last)
        return found


def estimate_us(view: ConvView, tile: TritonTile, units: int, planes: int = 1, groups: int = 1) -> float:
    """Estimated microseconds of the kernel; `planes` is 3 for a product of split operands, `groups` as `TileCosts` has it."""
    splits, each = tile.splits(view)
    return TileCosts(view, units, planes, groups).us(
        tile.block_k, tile.pixels, tile.block_c, (tile.stages,), tile.warps, tiles=math.prod(tile.tiles(view)),
        splits=splits, each=each, pdl=tile.pdl, prefetch=tile.prefetch,
    )[0]  # fmt: skip
