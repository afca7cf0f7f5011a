"""triton.wgrad: the weight gradient, one product over pixels for each tap, its shares added in a fixed order.

How the kernel works: `kernels/gradient_kernels.py` and docs/kernels/gradients.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from convoy.engines.base import Buffers, Engine, Executable
from convoy.engines.gpu.device_tensors import as_floats, dense_nhwc, descriptor, scratch
from convoy.engines.gpu.gpu_support_checks import product_support
from convoy.engines.triton.igemm_swap_ab_launch import ReduceSplits, box_type
from convoy.engines.triton.triton_build import KernelBuild, TritonKernel, interpreting
from convoy.engines.triton.triton_igemm_swap_ab import tensor_support
from convoy.engines.triton.triton_tiles import ConvView, boxes, conv_view, row_view
from convoy.errors import LaunchError
from convoy.problem import ConvProblem, Epilogue, Knobs, Problem
from convoy.problem.spec import DTYPE_BYTES
from convoy.support import Support
from convoy.target import Target

_SIZES = ("tiles_c", "image_blocks", "tiles_h", "tiles_w", "blocks", "blocks_split", "taps", "c", "k", "channels",
          "pad_h", "pad_w", "dilation_h", "dilation_w")  # fmt: skip
_SHARED_BYTES = 232448
_PARTIAL_BYTES_NS = 3000.0
_FLOPS_NS_PER_SM = {2: 4096 * 1.6, 4: 2048 * 1.6}
_LOAD_BYTES_NS_PER_SM = 56.0
_MEMORY_BYTES_NS = 2900.0
_LATENCY_NS = 647.0
_STEP_NS = 34.0
"""Of the loads of an iteration, and of an iteration itself: as fitted for `triton.swapped` (`tiles`)."""

_MOST_SPLITS = 64


@dataclass(frozen=True, slots=True)
class Share:
    """A thread block's share: a tile of the gradient, the pixels of an iteration, and among how many its sum is split.

    `images`: the pixels are one of each of `block_n` images; else a box.
    """

    block_k: int
    block_c: int
    block_n: int
    block_h: int
    block_w: int
    stages: int
    warps: int
    split: int
    images: bool
    pdl: bool = True

    @property
    def knobs(self) -> Knobs:
        """As an engine's knobs."""
        return Knobs.of(**{name: getattr(self, name) for name in self.__slots__})

    @staticmethod
    def of(knobs: Knobs) -> Share:
        """Inverse of `knobs`."""
        switches = {name: bool(knobs[name]) for name in ("images", "pdl")}
        return Share(**{name: knobs.integer(name) for name in Share.__slots__ if name not in switches}, **switches)

    @property
    def pixels(self) -> int:
        """Pixels of an iteration."""
        return self.block_n * self.block_h * self.block_w

    @property
    def by_registers(self) -> bool:
        """Whether half types of dy reach the tensor core through registers: their tile is a box of more than one side."""
        return not self.images and self.block_n * self.block_h > 1

    def blocks(self, view: ConvView) -> int:
        """Iterations of the whole sum."""
        return -(-view.n // self.block_n) * -(-view.p // self.block_h) * -(-view.q // self.block_w)

    def splits(self, view: ConvView) -> tuple[int, int]:
        """Shares of the sum that are not empty, and iterations of each."""
        blocks = self.blocks(view)
        each = -(-blocks // self.split)
        return -(-blocks // each), each

    def tiles(self, view: ConvView) -> tuple[int, int]:
        """Tiles along k and c."""
        return -(-view.k // self.block_k), -(-view.c // self.block_c)


def wgrad_view(problem: ConvProblem) -> ConvView:
    """A 1x1 convolution of stride 1 is one row of pixels."""
    plain = problem.is_pointwise and problem.stride_h == problem.stride_w == 1
    return row_view(problem) if plain else conv_view(problem)


def estimate_us(view: ConvView, share: Share, units: int) -> float:
    """A guess in microseconds: the busiest multiprocessor's products or loads, the memory's bytes, and the shares' sum."""
    splits, each = share.splits(view)
    tiles = math.prod(share.tiles(view)) * view.r * view.s * splits
    stage = (share.block_k + share.block_c) * share.pixels * view.bytes_each
    resident = min(2 if share.warps == 4 else 1, _SHARED_BYTES // (share.stages * stage + 1024)) or 1
    rounds = -(-tiles // (units * resident)) * resident
    products = 2 * share.block_k * share.block_c * share.pixels / _FLOPS_NS_PER_SM[view.bytes_each]
    # A tile that goes through registers stalls the tensor core at every iteration.
    products *= 1.3 if share.by_registers else 1.0
    waiting = _LATENCY_NS / (share.stages * resident) + _STEP_NS
    busy = rounds * each * (max(products, stage / _LOAD_BYTES_NS_PER_SM) + waiting)
    moved = (view.n * view.h * view.w * view.c + view.pixels * view.k) * view.bytes_each / _MEMORY_BYTES_NS
    time = max(busy, moved) + 2500
    if splits > 1:
        time += 1000 + 8 * splits * view.k * view.c * view.r * view.s / _PARTIAL_BYTES_NS
    return time / 1000


def shares(view: ConvView, units: int, limit: int = 24) -> list[Share]:
    """Shares worth trying, the best guess first; the very first is one that ptxas never serialises (C7515)."""
    found: list[tuple[float, int, Share]] = []
    for block_k in (64, 128, 256):
        for block_c in (32, 64, 128, 256):
            least = (block_k > 64 and block_k >= 2 * view.k) or (block_c > 32 and block_c >= 2 * view.c)
            if least or block_k * block_c > 128 * 256:
                continue
            for pixels, images in _pixels(view):
                for share in _staged(view, block_k, block_c, pixels, images, units):
                    found.append((estimate_us(view, share, units), len(found), share))
    found.sort(key=lambda entry: entry[:2])
    kept: dict[tuple[object, ...], int] = {}
    chosen: list[Share] = []
    for _, _, share in found:
        shape = (share.block_k, share.block_c, share.pixels, share.images)
        if kept.get(shape, 0) < 3 and len(chosen) < limit:
            kept[shape] = kept.get(shape, 0) + 1
            chosen.append(share)
    safe = next((share for share in chosen if not share.by_registers), chosen[0])
    return [safe, *(share for share in chosen if share != safe)]


def _pixels(view: ConvView) -> Iterator[tuple[tuple[int, int, int], bool]]:
    """Pixels of an iteration: of one place in many images, or of a row or a box where TMA can take it."""
    boxed = bool(tensor_support(view, least=1))  # what is summed over here is pixels
    for size in (16, 32, 64):
        if view.n >= size or (size == 16 and (view.n > 8 or not boxed)):
            yield (size, 1, 1), True
    if view.n < 64 and boxed:
        rows = [(1, 1, width) for width in (16, 32, 64) if width < 2 * view.q and -view.q % width * 4 <= view.q]
        rows = rows or [(1, 1, 16)]
        for box in dict.fromkeys([*rows, *boxes(view, (32, 64))]):
            yield box, False


def _staged(
    view: ConvView, block_k: int, block_c: int, box: tuple[int, int, int], images: bool, units: int
) -> Iterator[Share]:
    area = block_k * block_c
    stage = (block_k + block_c) * math.prod(box) * view.bytes_each
    by_registers = not images and box[0] * box[1] > 1 and view.bytes_each == 2
    for warps in (4, 8):
        if area > warps * 32 * 128 or (warps == 8 and (area < 128 * 128 or block_k < 128)):
            continue
        if by_registers and area > 128 * 64:  # ptxas serialises wgmma there (C7515)
            continue
        resident = 2 if warps == 4 else 1
        deep = [n for n in (8, 6, 4, 3) if n * stage + 1024 <= _SHARED_BYTES // resident]
        if not deep:
            continue
        tiles = -(-view.k // block_k) * -(-view.c // block_c) * view.r * view.s
        blocks = -(-view.n // box[0]) * -(-view.p // box[1]) * -(-view.q // box[2])
        many = (units * resident * waves // tiles for waves in (1, 2))
        for split in sorted({min(max(1, n), max(1, blocks // 8), _MOST_SPLITS) for n in many}):
            yield Share(block_k, block_c, *box, deep[0], warps, split, images)


class WgradExecutable(Executable):
    """One share for one problem, whose x is dense, or lies as a view and pitches say.

    Args:
        engine: whose it is.
        problem: what is computed.
        share: how.
        target: where.
        view: the problem as the kernel sees it; `wgrad_view` where it is None.
        pitches: elements from an image, a row, a pixel of x to the next; those of a dense x where it is None.
    """

    def __init__(
        self, engine: str, problem: ConvProblem, share: Share, target: Target,
        view: ConvView | None = None, pitches: tuple[int, int, int] | None = None,
    ) -> None:  # fmt: skip
        self.problem, self.share, self.view = problem, share, view or wgrad_view(problem)
        self.workspace_bytes = partial_bytes(self.view, share)
        row = self.view.w * self.view.c
        self.pitches = pitches or (self.view.h * row, row, self.view.c)
        self.reduce = None
        if self.view.pixels == 0:
            return
        self.split_count, self.each = share.splits(self.view)
        self.kernel = TritonKernel(self._build(engine), target)
        if self.split_count > 1:
            elements = problem.weight_spec.elements
            self.reduce = ReduceSplits(
                engine, elements, problem.c, self.split_count, problem.weight_dtype, Epilogue(), target
            )

    def _build(self, engine: str) -> KernelBuild:
        import triton.language as tl

        from convoy.engines.triton.kernels.gradient_kernels import wgrad_conv  # pyright: ignore[reportUnknownVariableType]

        share, view, dtype = self.share, self.view, self.problem.x_dtype
        split = self.split_count > 1
        strided = view.strided or (view.is_1x1 and not share.images and view.stride_h * view.stride_w > 1)
        signature = {
            "x": box_type(dtype, self._x_box), "dy": box_type(dtype, self._dy_box),
            "out": "*fp32" if split else f"*{dtype}",
        } | dict.fromkeys(_SIZES, "i32")  # fmt: skip
        steps = (view.stride_h, view.stride_w) if share.images or (strided and not view.is_1x1) else (1, 1)
        kind = {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}[dtype]
        constants: dict[str, Any] = {
            "S": view.s, "STRIDE_H": steps[0], "STRIDE_W": steps[1], "BLOCK_K": share.block_k,
            "BLOCK_N": share.block_n, "BLOCK_H": share.block_h, "BLOCK_W": share.block_w, "BLOCK_C": share.block_c,
            "IMAGES": share.images, "PRECISION": "tf32", "DTYPE": tl.float32 if split else kind,
            "WAIT": share.pdl and not interpreting(),
        }  # fmt: skip
        rounded = ["x", "dy"] if dtype == "fp32" else []
        whole = ["c"] if self.problem.c % 16 == 0 else []
        return KernelBuild(
            engine, wgrad_conv, signature, constants, ["out", *whole], share.warps, share.stages, share.pdl, rounded
        )

    @property
    def _dy_box(self) -> list[int]:
        share = self.share
        if share.images:
            return [1, 1, share.block_n, share.block_k]
        return [share.block_n, share.block_h, share.block_w, share.block_k]

    @property
    def _x_box(self) -> list[int]:
        share = self.share
        if share.images:
            return [1, 1, share.block_n, share.block_c]
        if self.view.strided:
            return [share.block_n, share.block_h, 1, share.block_w, share.block_c]
        return [share.block_n, share.block_h, share.block_w, share.block_c]

    def _descriptors(self, x: torch.Tensor, dy: torch.Tensor) -> tuple[Any, Any]:
        view = self.view
        n, h, w, c, k = view.n, view.h, view.w, view.c, view.k
        image, row, pixel = self.pitches
        out_row = view.q * k
        if self.share.images:
            return (
                descriptor(x, [h, w, n, c], self._x_box, [row, pixel, image, 1]),
                descriptor(dy, [view.p, view.q, n, k], self._dy_box, [out_row, k, view.p * out_row, 1]),
            )
        high, wide = view.stride_h, view.stride_w
        if view.strided:
            shape = [n, h // high, high, w // wide, wide * c]
            strides = [image, high * row, row, wide * c, 1]
        elif view.is_1x1:
            shape, strides = [n, view.p, view.q, c], [image, high * row, wide * pixel, 1]
        else:
            shape, strides = [n, h, w, c], [image, row, pixel, 1]
        return descriptor(x, shape, self._x_box, strides), descriptor(dy, [n, view.p, view.q, k], self._dy_box)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One launch, a second where the sum is split; torch's sum over dy for the bias."""
        x, dy, dweight = asked(self.problem, buffers)
        if self.view.pixels == 0:
            dweight.zero_()
            return
        self.sum_products(x, dy, dweight, scratch(workspace, self.workspace_bytes))

    def sum_products(
        self, x: torch.Tensor, dy: torch.Tensor, dweight: torch.Tensor, partial: torch.Tensor | None
    ) -> None:
        """The launches, on an x that lies as `pitches` says."""
        view, share = self.view, self.share
        sums = None if partial is None else as_floats(partial, self.split_count * dweight.numel())
        tiles_k, tiles_c = share.tiles(view)
        taps = view.r * view.s
        tiles_h, tiles_w = -(-view.p // share.block_h), -(-view.q // share.block_w)
        self.kernel(
            (tiles_k * tiles_c * taps, self.split_count, 1),
            [
                *self._descriptors(x, dy), dweight if sums is None else sums, tiles_c, -(-view.n // share.block_n),
                tiles_h, tiles_w, share.blocks(view), self.each, taps, view.c, view.k, view.c,
                view.pad_h, view.pad_w, view.dilation_h, view.dilation_w,
            ],
        )  # fmt: skip
        if self.reduce is not None and sums is not None:
            self.reduce.launch(sums, dweight, None, None)


def asked(problem: ConvProblem, buffers: Buffers) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, dy and dweight of a launch, dense; where the bias's gradient is asked for, torch's sum over dy is begun."""
    x, dy = dense_nhwc("x", buffers.args[0]), dense_nhwc("dy", buffers.args[1])
    dweight = buffers.results[0]
    if dweight is None:
        raise LaunchError("dweight: no tensor was given to write to")
    if problem.epilogue.bias:
        dbias = buffers.results[1]
        if dbias is None:
            raise LaunchError("dbias: no tensor was given to write to")
        torch.sum(dy, (0, 2, 3), out=dbias)
    return x, dy, dense_nhwc("dweight", dweight)


def partial_bytes(view: ConvView, share: Share) -> int:
    """Room for the shares' sums in fp32; none where there is one."""
    if not view.pixels:
        return 0
    splits, _ = share.splits(view)
    return 4 * splits * view.k * view.c * view.r * view.s if splits > 1 else 0


class WgradEngine(Engine):
    """dweight from x and dy; see `kernels/gradient_kernels.py`."""

    id = "triton.wgrad"
    family = "implicit_gemm"
    devices = ("cuda",)
    trusted = False
    quick_settings = 3

    def supports(self, problem: Problem, target: Target) -> Support:
        """Weight gradients without groups on Hopper, c and k multiples of 16 bytes; fp32 as TF32 where the numerics allow."""
        if not (found := product_support(problem, target, "wgrad")):
            return found
        assert isinstance(problem, ConvProblem)
        whole = 16 // DTYPE_BYTES[problem.x_dtype]
        if problem.c % whole or problem.k % whole:
            return Support.no(f"needs c and k as multiples of {whole}, got {problem.c} and {problem.k}")
        return Support.yes()

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Shares by guessed time."""
        assert isinstance(problem, ConvProblem)
        return [share.knobs for share in shares(wgrad_view(problem), target.units)]

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """The shares' sums."""
        assert isinstance(problem, ConvProblem)
        return partial_bytes(wgrad_view(problem), Share.of(knobs))

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """The shares' cost model, less a fifth: by 406 rows of an H200 (20 %)."""
        assert isinstance(problem, ConvProblem)
        return 0.4 + 0.81 * estimate_us(wgrad_view(problem), Share.of(knobs), target.units)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile one share."""
        assert isinstance(problem, ConvProblem)
        return WgradExecutable(self.id, problem, Share.of(knobs), target)


ENGINE = WgradEngine()
