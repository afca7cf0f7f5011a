"""triton.dgrad: the data gradient as convolutions of dy with some of the taps, one for each parity of the stride.

How the kernel works: `kernels/gradient_kernels.py` and docs/kernels/training.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from convoy.engines.base import Buffers, Engine, Executable
from convoy.engines.gpu.device_tensors import dense_nhwc, descriptor, scratch, vector
from convoy.engines.gpu.gpu_support_checks import product_support
from convoy.engines.triton.igemm_swap_ab_launch import box_type
from convoy.engines.triton.persistent import PersistentTile, estimate_us
from convoy.engines.triton.triton_build import KernelBuild, TritonKernel, interpreting, shared_limit
from convoy.engines.triton.triton_tile_search import boxes
from convoy.engines.triton.triton_tiles import ConvView, TritonTile
from convoy.errors import LaunchError
from convoy.problem import ConvProblem, Knobs, Problem
from convoy.problem.spec import DTYPE_BYTES
from convoy.support import Support
from convoy.target import Target

_SIZES = ("n", "h", "width", "c", "k", "rows", "columns", "tiles_c", "tiles_h", "tiles_w", "k_blocks", "filter_h",
          "filter_w", "pad_h", "pad_w", "dilation_h", "dilation_w")  # fmt: skip
_SHARED_BYTES = 232448
_REGISTERS = 65536
_START_US = 1.5
_BUSY = 0.6
_MEMORY_BYTES_US = 2.0e6
"""Fixed time, factor on the persistent kernel's estimate, and memory bandwidth: fitted to 661 rows of an H200 (31 % root mean
square error; batch 32 and 128, bf16); the three terms add up."""

_GUESSED_START_US = 2.5
"""The fixed time in the persistent kernel's estimate."""


def is_flat(problem: ConvProblem) -> bool:
    """Whether pixels need no box: a 1x1 filter of stride 1."""
    return problem.is_pointwise and problem.stride_h == problem.stride_w == 1


def dgrad_view(problem: ConvProblem) -> ConvView:
    """The convolution over dy that computes the largest parity of dx: `c` is summed over (k), `k` is the output (c)."""
    each = DTYPE_BYTES[problem.x_dtype]
    if is_flat(problem):
        pixels = problem.n * problem.h * problem.w
        return ConvView(1, 1, pixels, problem.k, problem.c, 1, pixels, bytes_each=each)
    rows, columns = -(-problem.h // problem.stride_h), -(-problem.w // problem.stride_w)
    taps_h, taps_w = -(-problem.r // problem.stride_h), -(-problem.s // problem.stride_w)
    return ConvView(
        problem.n, problem.p, problem.q, problem.k, problem.c, rows, columns, taps_h, taps_w, bytes_each=each,
        dilation_h=problem.dilation_h, dilation_w=problem.dilation_w, pad_h=problem.pad_h, pad_w=problem.pad_w,
    )  # fmt: skip


def tiles(problem: ConvProblem, units: int, limit: int = 20, shared: int = _SHARED_BYTES) -> list[TritonTile]:
    """Tiles worth trying, by rising estimated time, in `shared` bytes of shared memory."""
    view = dgrad_view(problem)
    found: list[tuple[float, int, TritonTile]] = []
    for block_out in (64, 128, 256):
        if block_out > 64 and block_out >= 2 * view.k:
            continue
        for box in boxes(view, (32, 64, 128, 256)):
            for block_in in _reductions(problem):
                for tile in _staged(view, TritonTile(block_out, *box, block_in, pdl=True), shared):
                    found.append((guess_us(problem, tile, units), len(found), tile))
    found.sort(key=lambda entry: entry[:2])
    kept: dict[tuple[int, ...], int] = {}
    chosen: list[TritonTile] = []
    for _, _, tile in found:
        shape = (tile.block_k, tile.pixels, tile.block_c)
        if kept.get(shape, 0) < 3 and len(chosen) < limit:
            kept[shape] = kept.get(shape, 0) + 1
            chosen.append(tile)
    return chosen


def _reductions(problem: ConvProblem) -> tuple[int, ...]:
    """Channels of dy an iteration; with a repacked weight a divisor of k."""
    each = DTYPE_BYTES[problem.x_dtype]
    if each == 4:
        return tuple(b for b in (64, 32, 16) if problem.k % b == 0)[:2]
    return tuple(b for b in (128, 64, 32) if b == 32 or b < 2 * problem.k)[:2]


def _staged(view: ConvView, tile: TritonTile, shared: int) -> list[TritonTile]:
    """A tile as deep as one block can be, and as two of one multiprocessor can; those that do not spill or serialise."""
    found: dict[TritonTile, None] = {}
    area = tile.block_k * tile.pixels
    for warps in (4, 8):
        if area > warps * 32 * 128 or (warps == 8 and (area < 128 * 128 or tile.block_k < 128)):
            continue
        if warps == 8 and view.bytes_each == 4 and tile.block_c < 64:  # ptxas serialises wgmma there (C7515)
            continue
        for blocks in (1, 2):
            deep = (replace(tile, stages=n, warps=warps) for n in (8, 6, 4, 3, 2))
            found |= dict.fromkeys([t for t in deep if _resident(view, t, shared) >= blocks][:1])
    return list(found)


def _resident(view: ConvView, tile: TritonTile, shared_bytes: int = _SHARED_BYTES) -> int:
    """Blocks that fit a multiprocessor, at most two."""
    shared = tile.stages * (tile.block_k + tile.pixels) * tile.block_c * view.bytes_each + 1024
    registers = tile.warps * 32 * (tile.block_k * tile.pixels // (tile.warps * 32) + 48)
    return min(2, shared_bytes // shared, _REGISTERS // registers)


def guess_us(problem: ConvProblem, tile: TritonTile, units: int) -> float:
    """The estimate of the persistent kernel, with all parities counted as that many more images.

    Together the parities have every tap once; the view counts the largest parity's taps for each.
    """
    view, parities = dgrad_view(problem), problem.stride_h * problem.stride_w
    wide = replace(view, n=view.n * parities)
    guess = estimate_us(wide, PersistentTile(tile, 1, max(1, _resident(view, tile)), True), units) - _GUESSED_START_US
    share = problem.r * problem.s / (parities * view.r * view.s)
    return _START_US + _BUSY * guess * share + problem.bytes_min / _MEMORY_BYTES_US


class DgradExecutable(Executable):
    """One tile for one problem."""

    def __init__(self, engine: str, problem: ConvProblem, tile: TritonTile, target: Target) -> None:
        self.problem, self.tile, self.view = problem, tile, dgrad_view(problem)
        self.repacks = problem.x_dtype == "fp32"  # the tensor core transposes half types alone
        self.workspace_bytes = repacked_bytes(problem)
        self.vector = vector(problem.c)
        if problem.n == 0:
            return
        self.kernel = TritonKernel(self._build(engine), target)

    def _build(self, engine: str) -> KernelBuild:
        import triton.language as tl

        from convoy.engines.triton.kernels.gradient_kernels import dgrad_conv  # pyright: ignore[reportUnknownVariableType]

        problem, tile, dtype = self.problem, self.tile, self.problem.x_dtype
        signature = {
            "dy": box_type(dtype, self._dy_box), "w": box_type(dtype, self._w_box), "dx": f"*{dtype}",
        } | dict.fromkeys(_SIZES, "i32")  # fmt: skip
        constants: dict[str, Any] = {
            "STRIDE_H": problem.stride_h, "STRIDE_W": problem.stride_w, "BLOCK_C": tile.block_k,
            "BLOCK_N": tile.block_n, "BLOCK_H": tile.block_h, "BLOCK_W": tile.block_w, "BLOCK_K": tile.block_c,
            "K_MAJOR": self.repacks, "PRECISION": "tf32", "VECTOR": self.vector,
            "DTYPE": {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}[dtype],
            "WAIT": tile.pdl and not interpreting(),
        }  # fmt: skip
        rounded = ["dy", "w"] if dtype == "fp32" else []
        return KernelBuild(engine, dgrad_conv, signature, constants, ["dx"], tile.warps, tile.stages, tile.pdl, rounded)

    @property
    def _dy_box(self) -> list[int]:
        tile = self.tile
        return [tile.block_n, tile.block_h, tile.block_w, tile.block_c]

    @property
    def _w_box(self) -> list[int]:
        out, summed = self.tile.block_k, self.tile.block_c
        return [out, summed] if self.repacks else [summed, out]

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One launch, and before it a copy of the weight where the tensor core could not transpose it."""
        problem, view, tile = self.problem, self.view, self.tile
        if problem.n == 0:
            return
        dy, weight = dense_nhwc("dy", buffers.args[0]), dense_nhwc("weight", buffers.args[1])
        dx = buffers.results[0]
        if dx is None:
            raise LaunchError("dx: no tensor was given to write to")
        dx = dense_nhwc("dx", dx)
        k, c, r, s = weight.shape
        room = scratch(workspace, self.workspace_bytes)
        if room is not None:
            packed = room[: self.workspace_bytes].view(torch.float32).view(c, r, s, k)
            packed.copy_(weight.permute(1, 2, 3, 0))
            matrix = descriptor(packed, [c, r * s * k], self._w_box)
        else:
            matrix = descriptor(weight, [k, r * s * c], self._w_box)
        tiles_c, tiles_n, tiles_h, tiles_w = tile.tiles(view)
        flat = is_flat(problem)
        sizes = [1, 1, view.q] if flat else [problem.n, problem.h, problem.w]
        padding = [problem.pad_h, problem.pad_w, problem.dilation_h, problem.dilation_w]
        self.kernel(
            (tiles_c * tiles_n * tiles_h * tiles_w, problem.stride_h * problem.stride_w, 1),
            [
                descriptor(dy, [view.n, view.h, view.w, view.c], self._dy_box), matrix, dx, *sizes, c // self.vector, k,
                view.p, view.q, tiles_c, tiles_h, tiles_w, tile.c_blocks(view), r, s, *padding,
            ],
        )  # fmt: skip


def repacked_bytes(problem: ConvProblem) -> int:
    """Scratch bytes for the weight as [c, r, s, k] in fp32; half types need none."""
    return problem.weight_spec.size_bytes if problem.x_dtype == "fp32" and problem.n else 0


class DgradEngine(Engine):
    """dx from dy and the weight as it lies; see `kernels/gradient_kernels.py`."""

    id = "triton.dgrad"
    family = "implicit_gemm"
    devices = ("cuda",)
    trusted = False
    quick_settings = 3

    def supports(self, problem: Problem, target: Target) -> Support:
        """Data gradients without groups on Hopper, c and k multiples of 16 bytes; fp32 as TF32 where the numerics allow."""
        if not (found := product_support(problem, target, "dgrad")):
            return found
        assert isinstance(problem, ConvProblem)
        whole = 16 // DTYPE_BYTES[problem.x_dtype]
        if problem.c % whole or problem.k % whole:
            return Support.no(f"needs c and k as multiples of {whole}, got {problem.c} and {problem.k}")
        if problem.x_dtype == "fp32" and problem.k % 16:
            return Support.no(f"needs k as a multiple of 16 in fp32, got {problem.k}")
        sides = ((problem.stride_h, problem.dilation_h), (problem.stride_w, problem.dilation_w))
        if any(stride > 1 and dilation > 1 for stride, dilation in sides):
            return Support.no("needs dilation 1 where it has a stride")
        return Support.yes()

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Tiles by rising estimated time."""
        assert isinstance(problem, ConvProblem)
        return [tile.knobs for tile in tiles(problem, target.units, shared=shared_limit(target))]

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """The repacked weight of fp32."""
        assert isinstance(problem, ConvProblem)
        return repacked_bytes(problem)

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """See `guess_us`."""
        assert isinstance(problem, ConvProblem)
        return guess_us(problem, TritonTile.of(knobs), target.units)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile one tile."""
        assert isinstance(problem, ConvProblem)
        return DgradExecutable(self.id, problem, TritonTile.of(knobs), target)


ENGINE = DgradEngine()
