"""cuda.implicit_gemm: convolution on Hopper's tensor cores with copies in im2col mode (docs/kernels/hopper.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from convoy.engines.base import Buffers, Executable, Packed
from convoy.engines.gpu.device_tensors import checked, fits_tma, pitch_of, round_tf32
from convoy.engines.hopper.hopper_support_checks import copied_product
from convoy.engines.hopper.nvrtc_kernel import Function, compile_cubin, pointer, structure
from convoy.engines.hopper.nvrtc_source import ACTIVATIONS, kernel_source, nvrtc_options, reciprocal, wgmma_function
from convoy.engines.hopper.tensor_maps import ROW_BYTES, FilterMap, PixelMap
from convoy.engines.tiled_kernel import TiledKernelEngine
from convoy.errors import InputError
from convoy.problem import ConvProblem, Knobs, Problem
from convoy.problem.spec import DTYPE_BYTES
from convoy.support import Support
from convoy.target import Target

SHARED_BYTES = 232448
MOST_STAGES = 8
MOST_BLOCKS = 8
"""Of a cluster, on every device."""

_EXTRA_BYTES = 1024 + 32
"""What rounding the ring's start up may cost, and the barriers of those who take turns."""

REGISTERS = {1: (40, 232), 2: (40, 232), 3: (32, 160)}
"""Registers of a copying and of a multiplying thread, by the number of multiplying warpgroups: together the whole file."""

_FLOPS_NS_PER_SM = {2: 5200.0, 4: 2600.0}
_LOAD_BYTES_NS_PER_SM = 78.0
_STEP_NS = 120.0
_PAIR_NS = 175.0
_TILE_NS = 150.0
_STORE_BYTES_NS_PER_SM = 62.0
_START_NS = 1210.0
"""Operations, bytes from L2, an iteration at least, what waiting for each other adds in a pair, what lies between two tiles,
bytes stored, and what happens once: their ratios fitted to 56 timings of plain layers on an H100, their size to 2118 rows of an
H200 (18 % root mean square error, batches of 1 to 128)."""

_PEER_BYTES_NS_PER_SM = 24.0
"""To the shared memory of another block: 3.2 TB/s over 132 multiprocessors (measured)."""

_MEETING_NS = 400.0
"""A barrier of a cluster, and the way to another block."""

_CACHED_BYTES = 24e6
_CACHE_BYTES_NS = 6000.0
_MEMORY_BYTES_NS = 3000.0
"""What of a layer's tensors is still or stays in L2, and how fast it and the rest move: fitted to the same rows."""


@dataclass(frozen=True, slots=True)
class IgemmTile:
    """How the work is cut.

    Attributes:
        rows: pixels of a warpgroup's tile, or share of one: 64 or 128.
        filters: of a tile, a multiple of 8.
        stages: depth of the ring.
        consumers: multiplying warpgroups.
        turns: whether each has tiles of its own.
        cluster: blocks that share their filters.
        split: blocks that share a tile, each with some of the taps and channels; 1 where `cluster` is more.
    """

    rows: int
    filters: int
    stages: int
    consumers: int
    turns: bool
    cluster: int
    split: int = 1

    @property
    def knobs(self) -> Knobs:
        """As an engine's knobs."""
        return Knobs.of(**{name: getattr(self, name) for name in self.__slots__})

    @staticmethod
    def of(knobs: Knobs) -> IgemmTile:
        """Inverse of `knobs`; raises InputError for what no kernel can be made of."""
        turns = bool(knobs["turns"])
        form = IgemmTile(**{name: knobs.integer(name) for name in IgemmTile.__slots__ if name != "turns"}, turns=turns)
        whole = 8 * form.cluster
        right = form.rows in (64, 128) and form.consumers in REGISTERS and form.cluster in (1, 2)
        right &= 1 <= form.split <= MOST_BLOCKS and (form.split == 1 or (form.cluster == 1 and not turns))
        right &= 0 < form.filters <= 256 and form.filters % whole == 0 and 2 <= form.stages <= MOST_STAGES
        right &= form.shared_bytes <= SHARED_BYTES and (form.split == 1 or form.sum_bytes <= form.ring_bytes)
        if not right:
            raise InputError(
                "knobs",
                str(knobs),
                "rows of 64 or 128, filters up to 256, 1 to 3 consumers, clusters of 1 or 2 or a split, with room",
            )
        return form

    @property
    def pixels(self) -> int:
        """Of a tile."""
        return self.rows if self.turns else self.rows * self.consumers

    @property
    def stage_bytes(self) -> int:
        """Both operands of one iteration."""
        return (self.pixels + self.filters) * ROW_BYTES

    @property
    def ring_bytes(self) -> int:
        """All stages."""
        return self.stages * self.stage_bytes

    @property
    def sum_bytes(self) -> int:
        """What a block of a split gets from the others, in the room of the ring: its share of a tile's sums in fp32."""
        items = self.rows // 64 * 2 * -(-self.filters // 32)
        return -(-items // self.split) * self.split * self.consumers * 128 * 32

    @property
    def shared_bytes(self) -> int:
        """The ring, its barriers, and what rounding its start up costs."""
        return self.ring_bytes + 16 * self.stages + _EXTRA_BYTES

    def parameters(self, problem: ConvProblem) -> dict[str, int]:
        """The values of `igemm_config.cuh`."""
        fewer, more = REGISTERS[self.consumers]
        epilogue = problem.epilogue
        return {
            "WARPGROUP_M": self.rows, "TILE_N": self.filters, "STAGES": self.stages, "CONSUMERS": self.consumers,
            "PINGPONG": int(self.turns), "CLUSTER": self.cluster, "SPLIT": self.split,
            "VALUE_BYTES": DTYPE_BYTES[problem.x_dtype], "BFLOAT": int(problem.x_dtype == "bf16"),
            "HAS_BIAS": int(epilogue.bias), "HAS_RESIDUAL": int(epilogue.residual),
            "ACTIVATION": ACTIVATIONS.index(epilogue.activation), "PRODUCER_REGISTERS": fewer,
            "CONSUMER_REGISTERS": more,
        }  # fmt: skip

    def tiles(self, problem: ConvProblem) -> tuple[int, int]:
        """Tiles along pixels and filters."""
        pixels = problem.n * problem.p * problem.q
        return -(-pixels // self.pixels), -(-problem.k // self.filters)

    def units(self, problem: ConvProblem) -> int:
        """Tiles of a whole cluster."""
        rows, columns = self.tiles(problem)
        return -(-rows // self.cluster) * columns

    def each(self, problem: ConvProblem) -> int:
        """Iterations of a block for one tile; of a split's last block perhaps fewer, but never none."""
        return -(-iterations(problem) // self.split)

    def resident(self, units: int) -> int:
        """Clusters, or single blocks, that a device has room for at a time: larger ones have to lie in one part of it.

        An H100 with 132 multiprocessors takes 66 of two blocks, 30 of four and 15 of eight (measured).
        """
        size = self.cluster * self.split
        return max(1, units // size if size <= 2 else units * 10 // (size * 11))

    def sizes(self, problem: ConvProblem, pitch: int) -> dict[str, int]:
        """The kernel's run-time sizes, in the order of its structure."""
        sizes = {
            "pixels": problem.n * problem.p * problem.q, "k": problem.k, "pitch": pitch, "q": problem.q,
            "pq": problem.p * problem.q, "tiles_n": self.tiles(problem)[1], "units": self.units(problem),
            "channels": problem.c, "iterations": iterations(problem), "each": self.each(problem), "s": problem.s,
            "c_blocks": iterations(problem) // (problem.r * problem.s), "span_w": problem.s * problem.dilation_w,
            "stride_h": problem.stride_h, "stride_w": problem.stride_w, "pad_h": problem.pad_h, "pad_w": problem.pad_w,
            "dilation_h": problem.dilation_h, "dilation_w": problem.dilation_w,
        }  # fmt: skip
        for name in ("q", "pq", "tiles_n", "s", "c_blocks"):
            sizes[f"{name}_factor"], sizes[f"{name}_shift"] = reciprocal(sizes[name])
        return sizes


def iterations(problem: ConvProblem) -> int:
    """Blocks of channels, over all taps."""
    return problem.r * problem.s * -(-problem.c * DTYPE_BYTES[problem.x_dtype] // ROW_BYTES)


def estimate_us(problem: ConvProblem, form: IgemmTile, units: int) -> float:
    """A guess in microseconds: the busiest multiprocessor's products or loads with its last store, or the memory's bytes."""
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
    # Where both take about the same, both are felt.
    cached = min(problem.bytes_min, _CACHED_BYTES)
    moved = cached / _CACHE_BYTES_NS + (problem.bytes_min - cached) / _MEMORY_BYTES_NS
    return (math.hypot(busy**2, moved**2) ** 0.5 + _START_NS) / 1000


def forms(problem: ConvProblem, units: int, limit: int = 28) -> list[IgemmTile]:
    """Forms worth trying, the best guess first; of each tile the best three."""
    found = sorted(
        ((estimate_us(problem, form, units), index, form) for index, form in enumerate(_candidates(problem))),
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
"""(rows, consumers, turns) of the forms."""


def _candidates(problem: ConvProblem) -> Iterator[IgemmTile]:
    widths: set[int] = set()
    for parts in range(1, 9):  # the filters in equal parts: no column is wasted
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
    """Stages: as many as fit; of one tile's share no more than it has, but room for the sums that a split leaves there."""
    deep = min(MOST_STAGES, (SHARED_BYTES - _EXTRA_BYTES) // (form.stage_bytes + 16))
    if form.split == 1:
        return deep
    return min(deep, max(2, form.each(problem), -(-form.sum_bytes // form.stage_bytes)))


class ImplicitGemmExecutable(Executable):
    """One form for one problem."""

    def __init__(self, engine: str, problem: ConvProblem, form: IgemmTile, target: Target) -> None:
        self.problem, self.form, self.units = problem, form, target.units
        source = kernel_source("igemm", form.parameters(problem), wgmma_function(form.filters, problem.x_dtype))
        options = nvrtc_options(problem.epilogue.activation, problem.x_dtype)
        cubin, self.log = compile_cubin(engine, source, target, options)
        self.function = Function(engine, cubin, "igemm", form.shared_bytes)
        self.pixel_map = PixelMap.of(problem, form.pixels)
        self.filter_map = FilterMap.of(problem, form.filters // form.cluster)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The weight as [k, r, s, c], rounded where TF32 would cut it; the bias as it is."""
        weight = round_tf32(constants[0].detach()).permute(0, 2, 3, 1).contiguous()
        return (weight, *(_aligned(bias.detach().contiguous()) for bias in constants[1:]))

    def accept_slice(self, result: int, pitch: int, offset: int) -> bool:
        """Where the slice keeps to sixteen bytes."""
        return fits_tma({2: torch.float16, 4: torch.float32}[DTYPE_BYTES[self.problem.y_dtype]], pitch, offset)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One launch."""
        del workspace
        if self.problem.n:
            self.multiply(buffers.args[0], buffers)

    def multiply(self, pixels: torch.Tensor, buffers: Buffers) -> None:
        """The kernel, on what the map of the pixels describes."""
        problem, form = self.problem, self.form
        x, y, residual = checked(buffers, problem.epilogue.residual, slices=True)
        weight, bias = buffers.constants[0], buffers.constants[1] if problem.epilogue.bias else None
        units, size = form.units(problem), form.cluster * form.split
        most = units if form.split > 1 else self.units // size  # a split's sums lie in the ring: one tile a cluster
        arguments = [
            self.pixel_map.encode(problem.x_dtype, pixels), self.filter_map.encode(problem.weight_dtype, weight),
            pointer(y), pointer(residual), pointer(bias), structure("Sizes", form.sizes(problem, pitch_of(y))),
        ]  # fmt: skip
        self.function.launch(
            x.device.index or 0, min(units, most) * size, 128 * (form.consumers + 1), arguments, cluster=size,
            dependent=True,
        )  # fmt: skip


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same, from a multiple of sixteen bytes on: two values of a bias are read at once."""
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


class ImplicitGemmEngine(TiledKernelEngine[IgemmTile]):
    """Copies in im2col mode, warpgroups that copy or multiply, tiles that fit the problem; see `implicit_gemm.cu`."""

    id = "cuda.implicit_gemm"
    devices = ("cuda",)
    writes_slices = True
    version = 3
    family = "implicit_gemm"
    trusted = False
    quick_settings = 3
    tile_config = IgemmTile

    def supports(self, problem: Problem, target: Target) -> Support:
        """Dense NHWC convolutions on Hopper, c and k multiples of 16 bytes; fp32 as TF32 where the numerics allow."""
        return copied_product(problem, target)

    def tile_configs(self, problem: ConvProblem, units: int) -> Sequence[IgemmTile]:
        """See the function of this name."""
        return forms(problem, units)

    def estimate_tile_us(self, problem: ConvProblem, form: IgemmTile, units: int) -> float:
        """See `estimate_us` above."""
        return estimate_us(problem, form, units)

    def build_tile(self, problem: ConvProblem, form: IgemmTile, target: Target) -> Executable:
        """Compile one form; no GPU is needed."""
        return ImplicitGemmExecutable(self.id, problem, form, target)


ENGINE = ImplicitGemmEngine()
