"""Tiles of one thread block: which are worth trying, and an estimate of each one's time.

The estimate counts, for one multiprocessor, tensor-core cycles, bytes from L2 and bytes in flight, and for the whole device
the bytes from memory and the fixed costs of launches. Its constants were fitted to 3,130 timings of the swap-AB kernel on an
H100, fp16 and TF32, batch 1 and 32 (docs/kernels/triton.md): 12 % root mean square error. On average the first tile is 3 %
behind the best candidate of its problem, and the best of the first four 1 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

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
_SHARED_BYTES = 232448


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


def estimate_us(view: ConvView, tile: TritonTile, units: int, planes: int = 1) -> float:
    """Estimated microseconds of the kernel; `planes` is 3 for a product of split operands."""
    splits, each = tile.splits(view)
    blocks = math.prod(tile.tiles(view)) * splits
    row_bytes = tile.block_c * view.bytes_each * (1 if planes == 1 else 2)
    stage_bytes = (tile.block_k + tile.pixels) * row_bytes
    registers = min(255, 40 + 1.5 * tile.block_k * tile.pixels / (32 * tile.warps) * (1 if planes == 1 else 2))
    resident = min(
        _SHARED_BYTES // (tile.stages * stage_bytes + 1024),
        2048 // (32 * tile.warps),
        int(65536 // (registers * 32 * tile.warps)),
    )
    if resident < 1:
        return math.inf
    a_rows = max(1.0, tile.block_k / 64)
    k_steps = tile.block_c * view.bytes_each / 32 * planes
    products_ns = a_rows * k_steps * max(tile.pixels / 2, 16 + tile.pixels / 4) / _CLOCK_GHZ
    if tile.block_k < 64 or tile.pixels < 16:
        products_ns *= 2  # mma instead of wgmma
    a_sm = -(-blocks // units)
    waiting_ns = _LATENCY_NS / (tile.stages * max(1, min(a_sm, resident)))
    step_ns = max(products_ns, stage_bytes / _LOAD_BYTES_NS_PER_SM) + waiting_ns + _STEP_NS
    weight_bytes = view.k * view.c * view.r * view.s * view.bytes_each
    x_bytes = view.n * view.h * view.w * view.c * view.bytes_each
    y_bytes = view.pixels * view.k * view.bytes_each
    time = _LAUNCH_US + a_sm * each * step_ns / 1000 + _FILL_US * math.sqrt(-(-a_sm // resident))
    time += (weight_bytes + x_bytes + y_bytes) / _MEMORY_BYTES_NS / 1000
    time += _STORE_US * max(0, a_sm - 1) * tile.block_k * tile.pixels - _AHEAD_US * tile.pdl
    if splits == 1:
        time -= _FETCHED_US * tile.prefetch
    else:
        time += _REDUCE_US + 8.0 * splits * view.pixels * view.k / _PARTIAL_BYTES_NS / 1000
    return time


def boxes(view: ConvView, sizes: Iterable[int], whole_images: bool = False) -> Iterator[tuple[int, int, int]]:
    """For each number of pixels the box (images, rows, columns) that covers the output with the fewest tiles.

    Of equals, the squarest: it reads the smallest halo. With `whole_images` a box's images divide the batch.
    """
    for pixels in sizes:
        found: list[tuple[int, int, int, int, int, int]] = []
        for bits_w in range(pixels.bit_length()):
            for bits_h in range(pixels.bit_length() - bits_w):
                b_w, b_h = 1 << bits_w, 1 << bits_h
                b_n = pixels // (b_w * b_h)
                if b_n > 1 and (b_n > view.n or (whole_images and view.n % b_n)):
                    continue
                tiles = -(-view.n // b_n) * -(-view.p // b_h) * -(-view.q // b_w)
                overhang = (b_h >= 2 * view.p) + (b_w >= 2 * view.q)
                found.append((tiles, overhang, (b_h + 2) * (b_w + 2) * b_n, b_n, b_h, b_w))
        if found:
            yield min(found)[3:]


_SPLITS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 24, 32, 36)


@lru_cache(maxsize=1024)
def candidate_tiles(view: ConvView, *, block_cs: tuple[int, ...], pixels: tuple[int, ...], ks: tuple[int, ...], units: int,
                    planes: int = 1, limit: int = 32, splits: tuple[int, ...] = _SPLITS,
                    shared: int = _SHARED_BYTES) -> tuple[TritonTile, ...]:  # fmt: skip
    """The tiles with the best estimates, best first; at most `limit`, with different shapes, in `shared` bytes of shared memory.

    Of tiles that differ only in stages or split the best four are kept, so that the list holds different shapes. Results are
    cached for problems that differ only in their epilogue.
    """
    guesses: list[tuple[float, TritonTile]] = []
    for block_k in ks:
        if block_k > min(ks) and block_k >= 2 * view.k:
            continue
        for split in splits:
            for box in boxes(view, pixels, whole_images=split > 1):
                for block_c in block_cs:
                    guesses += _staged(view, block_k, box, block_c, min(block_cs), split, units, planes, shared)
    guesses.sort(key=lambda pair: pair[0])
    kept: dict[tuple[int, ...], int] = {}
    chosen: list[TritonTile] = []
    for guess, tile in guesses:
        shape = (tile.block_k, tile.pixels, tile.block_c)
        if math.isinf(guess) or kept.get(shape, 0) >= 4 or len(chosen) >= limit:
            continue
        kept[shape] = kept.get(shape, 0) + 1
        chosen.append(tile)
    return tuple(chosen)


def _staged(
    view: ConvView,
    block_k: int,
    box: tuple[int, int, int],
    block_c: int,
    least_c: int,
    split: int,
    units: int,
    planes: int,
    shared_bytes: int,
) -> list[tuple[float, TritonTile]]:
    found: list[tuple[float, TritonTile]] = []
    pixels = math.prod(box)
    if block_c > least_c and block_c >= 2 * view.c:
        return found
    probe = TritonTile(block_k, *box, block_c, split=split)
    splits, each = probe.splits(view)
    if splits != split:
        return found
    for warps in _warps(block_k * pixels, block_c * view.bytes_each, planes):
        stage_bytes = (block_k + pixels) * block_c * view.bytes_each * (1 if planes == 1 else 2)
        fitting = [n for n in (2, 3, 4, 6, 8) if n * stage_bytes < shared_bytes - 1024 and n <= max(3, each + 1)]
        if not fitting:
            continue
        # As deep as a block can be, and as two blocks of one multiprocessor can: one computes while the other starts or ends.
        shared = [n for n in fitting if 2 * (n * stage_bytes + 1024) <= shared_bytes]
        for stages in sorted({min(4, fitting[-1]), fitting[-1], (shared or fitting)[-1]}):
            tile = TritonTile(block_k, *box, block_c, stages, warps, split)
            found.append((estimate_us(view, tile, units, planes), tile))
    return found


def _warps(area: int, row_bytes: int, planes: int) -> tuple[int, ...]:
    """Warps that a tile may have: of the rest ptxas spills registers or serialises wgmma (C7515, docs/kernels/triton.md)."""
    if planes > 1:
        return (4,) if area < 64 * 128 else (4, 8) if area == 64 * 128 else (8,) if area == 128 * 128 else ()
    if area > 128 * 128:
        return ()
    return (4, 8) if area == 128 * 128 and row_bytes == 256 else (4,)
