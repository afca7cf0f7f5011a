"""cuda.implicit_gemm: convolution on Hopper's tensor cores with copies in im2col mode (docs/kernels/hopper.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from convoy.engines.base import Buffers, Executable, Packed
from convoy.engines.gpu.device_tensors import aligned, checked, fits_tma, pitch_of, round_tf32
from convoy.engines.hopper.hopper_support_checks import copied_product
from convoy.engines.hopper.igemm_tile_config import EXTRA_BYTES, MOST_STAGES, SHARED_BYTES, IgemmTile, iterations
from convoy.engines.hopper.nvrtc_kernel import Function, compile_cubin, pointer, structure
from convoy.engines.hopper.nvrtc_source import kernel_source, nvrtc_options, wgmma_function
from convoy.engines.hopper.tensor_maps import ROW_BYTES, FilterMap, PixelMap
from convoy.engines.tiled_kernel import TiledKernelEngine
from convoy.problem import ConvProblem, Problem
from convoy.problem.spec import DTYPE_BYTES
from convoy.support import Support
from convoy.target import Target

_FLOPS_NS_PER_SM = {2: 5200.0, 4: 2600.0}
_LOAD_BYTES_NS_PER_SM = 78.0
_STEP_NS = 120.0
_PAIR_NS = 175.0
_TILE_NS = 150.0
_STORE_BYTES_NS_PER_SM = 62.0
_START_NS = 1210.0
"""The rates and latencies above are those of operations, loads from L2, the shortest iteration, the extra wait in a cluster of
two, the gap between two tiles, stores, and the launch. Their ratios are fitted to 56 timings of plain layers on an H100, their
scale to 2118 rows of an H200 (root mean square error 18 %, batches of 1 to 128)."""

_PEER_BYTES_NS_PER_SM = 24.0
"""Rate of stores to the shared memory of another block: 3.2 TB/s over 132 multiprocessors (measured)."""

_MEETING_NS = 400.0
"""A barrier of a cluster, and the latency to another block's shared memory."""

_CACHED_BYTES = 24e6
_CACHE_BYTES_NS = 6000.0
_MEMORY_BYTES_NS = 3000.0
"""Bytes of a layer's tensors that stay in L2, and the rates of L2 and of memory; fitted to the same rows."""


def estimate_us(problem: ConvProblem, form: IgemmTile, units: int) -> float:
    """Estimated time in microseconds, from the busiest multiprocessor (products or loads, last store) and the memory traffic."""
    return _estimate_us(problem, form, units, problem.bytes_min)


def _estimate_us(problem: ConvProblem, form: IgemmTile, units: int, bytes_min: int) -> float:
    each = DTYPE_BYTES[problem.x_dtype]
    steps = form.each(problem)
    rounds = -(-form.units(problem) // form.resident(units))
    columns = max(form.filters, 64)  # narrower products run no faster: the first operand's reads bind
    products = 2 * form.pixels * columns * (ROW_BYTES // each) / _FLOPS_NS_PER_SM[each]
    loads = (form.pixels + form.filters / form.cluster) * ROW_BYTES / _LOAD_BYTES_NS_PER_SM
    step = max(products, loads, _STEP_NS) + (_PAIR_NS if form.cluster > 1 else 0.0)
    store = form.pixels * form.filters * each / form.split / _STORE_BYTES_NS_PER_SM
    if form.split > 1:
        store += _MEETING_NS + 4 * form.pixels * form.filters / _PEER_BYTES_NS_PER_SM
    hidden = min(store, steps * step) if form.turns and form.consumers > 1 else 0.0
    busy = rounds * (steps * step + store - hidden + _TILE_NS) + hidden
    # Both add to the time where they are of about the same size.
    cached = min(bytes_min, _CACHED_BYTES)
    moved = cached / _CACHE_BYTES_NS + (bytes_min - cached) / _MEMORY_BYTES_NS
    return (math.hypot(busy**2, moved**2) ** 0.5 + _START_NS) / 1000


def forms(problem: ConvProblem, units: int, limit: int = 28) -> list[IgemmTile]:
    """Configurations worth measuring, by rising estimate; at most three for each tile size."""
    bytes_min = problem.bytes_min  # hundreds of estimates need it
    found = sorted(
        (
            (_estimate_us(problem, form, units, bytes_min), index, form)
            for index, form in enumerate(_candidates(problem))
        ),
        key=lambda entry: entry[:2],
    )
    kept: dict[tuple[int, int], int] = {}
    chosen: list[IgemmTile] = []
    for _, _, form in found:
        tile = (form.pixels, form.filters)
        if kept.get(tile, 0) < 3 and len(chosen) < limit:
            kept[tile] = kept.get(tile, 0) + 1
            chosen.append(form)
    return chosen


_SHAPES = ((64, 2, False), (128, 2, False), (64, 3, False), (64, 2, True), (128, 2, True), (64, 1, False))
"""(rows, consumers, turns) to try."""


def _candidates(problem: ConvProblem) -> Iterator[IgemmTile]:
    widths: set[int] = set()
    for parts in range(1, 9):  # equal parts of the filters waste no columns
        share = math.ceil(problem.k / parts)
        width = -(-share // 16) * 16
        if 32 <= width <= 256 or (parts == 1 and width < 32):
            widths.add(width)
    widths |= {w for w in (32, 64, 128, 256) if w < 2 * problem.k}
    for width in sorted(widths):
        for rows, consumers, turns in _SHAPES:
            if rows // 64 * width > (192 if consumers == 3 else 384) or rows // 64 * width // 2 > 192:
                continue  # more accumulators than a thread has registers for
            for cluster, split in ((1, 1), (2, 1), *((1, split) for split in (2, 3, 4, 6, 8) if not turns)):
                form = IgemmTile(rows, width, 2, consumers, turns, cluster, split)
                if form.cluster > 1 and form.units(problem) == 1:
                    continue
                if (split - 1) * form.each(problem) < iterations(problem):
                    form = replace(form, stages=_depth(form, problem))
                    if split == 1 or form.sum_bytes <= form.ring_bytes:
                        yield form


def _depth(form: IgemmTile, problem: ConvProblem) -> int:
    """The most stages that fit. A split needs no more than its iterations, but enough to hold the other blocks' sums."""
    deep = min(MOST_STAGES, (SHARED_BYTES - EXTRA_BYTES) // (form.stage_bytes + 16))
    if form.split == 1:
        return deep
    return min(deep, max(2, form.each(problem), -(-form.sum_bytes // form.stage_bytes)))


class ImplicitGemmExecutable(Executable):
    """The kernel of one tile configuration for one problem."""

    def __init__(self, engine: str, problem: ConvProblem, form: IgemmTile, target: Target) -> None:
        self.problem, self.form, self.units = problem, form, target.units
        source = kernel_source("igemm", form.parameters(problem), wgmma_function(form.filters, problem.x_dtype))
        options = nvrtc_options(problem.epilogue.activation, problem.x_dtype)
        cubin, self.log = compile_cubin(engine, source, target, options)
        self.function = Function(engine, cubin, "igemm", form.shared_bytes)
        self.pixel_map = PixelMap.of(problem, form.pixels)
        self.filter_map = FilterMap.of(problem, form.filters // form.cluster)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The weight as [k, r, s, c], fp32 rounded to TF32; and the bias."""
        weight = round_tf32(constants[0].detach()).permute(0, 2, 3, 1).contiguous()
        return (weight, *(aligned(bias.detach().contiguous()) for bias in constants[1:]))

    def accept_slice(self, result: int, pitch: int, offset: int) -> bool:
        """Whether pixels and the slice start at multiples of 16 bytes."""
        return fits_tma({2: torch.float16, 4: torch.float32}[DTYPE_BYTES[self.problem.y_dtype]], pitch, offset)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Launch the kernel; an empty batch needs none."""
        del workspace
        if self.problem.n:
            self.multiply(buffers.args[0], buffers)

    def multiply(self, pixels: torch.Tensor, buffers: Buffers) -> None:
        """Launch the kernel with `pixels` as the tensor that the pixel map describes."""
        problem, form = self.problem, self.form
        x, y, residual = checked(buffers, problem.epilogue.residual, slices=True)
        weight, bias = buffers.constants[0], buffers.constants[1] if problem.epilogue.bias else None
        units, size = form.units(problem), form.cluster * form.split
        most = (
            units if form.split > 1 else self.units // size
        )  # a split's sums use the ring buffer, so a cluster has one tile
        arguments = [
            self.pixel_map.encode(problem.x_dtype, pixels), self.filter_map.encode(problem.weight_dtype, weight),
            pointer(y), pointer(residual), pointer(bias), structure("Sizes", form.sizes(problem, pitch_of(y))),
        ]  # fmt: skip
        self.function.launch(
            x.device.index or 0, min(units, most) * size, 128 * (form.consumers + 1), arguments, cluster=size,
            dependent=True,
        )  # fmt: skip


class ImplicitGemmEngine(TiledKernelEngine[IgemmTile]):
    """TMA copies in im2col mode, producer and consumer warpgroups, tiles that fit the problem; see `igemm.cu`."""

    id = "cuda.implicit_gemm"
    devices = ("cuda",)
    writes_slices = True
    version = 3
    family = "implicit_gemm"
    trusted = False
    builds_in_threads = True
    quick_settings = 3
    tile_config = IgemmTile

    def supports(self, problem: Problem, target: Target) -> Support:
        """Dense NHWC convolutions on Hopper, with c and k multiples of 16 bytes; fp32 as TF32 if the numerics allow it."""
        return copied_product(problem, target)

    def tile_configs(self, problem: ConvProblem, units: int) -> Sequence[IgemmTile]:
        """See `forms` above."""
        return forms(problem, units)

    def estimate_tile_us(self, problem: ConvProblem, form: IgemmTile, units: int) -> float:
        """See `estimate_us` above."""
        return estimate_us(problem, form, units)

    def build_tile(self, problem: ConvProblem, form: IgemmTile, target: Target) -> Executable:
        """Compile one configuration; needs no GPU."""
        return ImplicitGemmExecutable(self.id, problem, form, target)


ENGINE = ImplicitGemmEngine()
