"""pruned.sparse24: convolutions whose weights are 2:4 sparse, on Hopper's sparse tensor cores (docs/kernels/sparse24.md).

    y = activation(conv(x, weight) + bias + residual)    -->    half the products, 0.56 of the weight's bytes

A mask will do where of every four neighbouring channels at most two have values, for each filter and tap. Values may change under
one mask; a value where the mask has none is refused when weights are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Final

import torch

from convoy.engines.base import Buffers, Executable, Packed
from convoy.engines.cuda.compiled import Function, absence, compile_cubin, pointer, structure
from convoy.engines.cuda.implicit_gemm import reciprocal
from convoy.engines.cuda.maps import PixelMap
from convoy.engines.cuda.source import ACTIVATIONS, DIVIDING, masked_source, options
from convoy.engines.formed import FormedEngine
from convoy.engines.pruned.pairs import CHANNELS, ROW_BYTES, Packing, crowded
from convoy.engines.pruned.requirements import hopper_convolution
from convoy.engines.pruned.values import check_zeros
from convoy.engines.pruned.walk import positions
from convoy.engines.triton.tensors import checked, fits_tma, pitch_of
from convoy.errors import InputError
from convoy.problem import ConvProblem, Knobs, Problem, WeightMask
from convoy.support import Support
from convoy.target import Target

SHARED_BYTES: Final = {1: 232448, 2: 115712}
"""Of a block, by the number of blocks that a multiprocessor has room for: of its 228 KB, each block costs one more."""

MOST_STAGES: Final = 8
MOST_SPLIT: Final = 8
_PIXEL_BYTES: Final = 128
_EXTRA_BYTES: Final = 1024 + 16
"""What rounding the ring's start up may cost, and the barrier of a split's sums."""

REGISTERS: Final = {(1, 1): (40, 232), (2, 1): (40, 232), (3, 1): (32, 160), (1, 2): (40, 216), (2, 2): (32, 104)}
"""Registers of a copying and of a multiplying thread, by the numbers of multiplying warpgroups and of blocks."""

MOST_SUMS: Final = {(1, 1): 192, (2, 1): 192, (3, 1): 96, (1, 2): 128, (2, 2): 48}
"""Sums of a thread, by the same: beyond, the assembler spills or refuses."""

MOST_SHARED_PIXELS: Final = 200
"""Of a product with two blocks: its sums and operands must fit the 128 registers that a thread starts with."""

_TORCH: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}
_CLOCK_GHZ: Final = 1.7
_LOAD_BYTES_NS_PER_SM: Final = 108.0
"""64 bytes a clock, which is all that reaches a multiprocessor, whether a copy is its own or comes to a cluster."""

_STEP_NS: Final = 120.0
_COPY_NS: Final = 45.0
"""Of a copying thread: to wait for a stage, and for each copy; two threads copy pixels in turn."""

_TOGETHER_NS: Final = {1: 0.0, 2: 800.0, 4: 1200.0}
"""What a cluster with the same pixels costs, as `cuda.implicit_gemm` shows it for two; for four a guess."""

_MEETING_NS: Final = {1: 0.0, 2: 500.0, 3: 500.0, 4: 900.0}
"""What a split costs beside the way of its sums; more for larger ones. From splits of `cuda.implicit_gemm`."""

_PEER_BYTES_NS_PER_SM: Final = 24.0
"""To the shared memory of another block: 3.2 TB/s over 132 multiprocessors (measured)."""

_TILE_NS: Final = 150.0
_STORE_BYTES_NS_PER_SM: Final = 33.0
_MEMORY_BYTES_NS: Final = 4000.0
_HOPEFUL: Final = 1.35
"""A kind of cluster, split and room is tried where its best guess comes within this factor of the best of all."""

_START_NS: Final = {1: 3600.0, 2: 2700.0}
"""Everything that happens once: 4000 of the first version, less what is now done before the kernel in front has ended."""


@dataclass(frozen=True, slots=True)
class Form:
    """How the work is cut.

    Attributes:
        rows: filters of a multiplying warpgroup, 64 or 128.
        pixels: of a tile, a multiple of 8 for each block of a cluster.
        stages: depth of the ring.
        consumers: multiplying warpgroups.
        cluster: blocks with the same pixels and different filters.
        depth: blocks of 64 channels of an iteration, 1 or 2.
        split: blocks that share a tile, each with some of the taps and channels; 1 where `cluster` is more.
        blocks: that a multiprocessor has room for, 1 or 2: with room, the next kernel begins while this one ends.
    """

    rows: int
    pixels: int
    stages: int
    consumers: int
    cluster: int
    depth: int = 1
    split: int = 1
    blocks: int = 1

    @property
    def knobs(self) -> Knobs:
        """As an engine's knobs."""
        return Knobs.of(**{name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def of(cls, knobs: Knobs) -> Form:
        """Inverse of `knobs`; raises InputError for what no kernel can be made of."""
        form = cls(**{name: knobs.integer(name) for name in cls.__slots__})
        right = form.rows in (64, 128) and (form.consumers, form.blocks) in REGISTERS and form.depth in (1, 2)
        right &= form.cluster in (1, 2, 4) and 1 <= form.split <= (MOST_SPLIT if form.cluster == 1 else 1)
        right &= 0 < form.pixels <= 256 and form.pixels % (8 * form.cluster) == 0 and 2 <= form.stages <= MOST_STAGES
        if not right or form.shared_bytes > SHARED_BYTES[form.blocks]:
            raise InputError(
                "knobs",
                str(knobs),
                "rows of 64 or 128, pixels up to 256, 1 to 3 consumers, 1 or 2 blocks with room, depth 1 or 2, "
                "a cluster of 1, 2 or 4 or a split of up to 8",
            )
        return form

    @property
    def filters(self) -> int:
        """Of a tile."""
        return self.rows * self.consumers

    @property
    def stage_bytes(self) -> int:
        """Both operands of one iteration; each stage begins at a multiple of 1024."""
        return self.depth * self.pixels * _PIXEL_BYTES + -(-self.depth * self.filters * ROW_BYTES // 1024) * 1024

    @property
    def inbox_bytes(self) -> int:
        """What a block of a split gets from the others: its share of a tile's sums, in items of sixteen pixels."""
        items = self.rows // 64 * -(-self.pixels // 16)
        return self.consumers * -(-items // self.split) * (self.split - 1) * 4096

    @property
    def shared_bytes(self) -> int:
        """The ring, sums from other blocks, barriers, and what rounding the ring's start up costs."""
        return self.stages * (self.stage_bytes + 16) + self.inbox_bytes + _EXTRA_BYTES

    def macros(self, problem: ConvProblem) -> dict[str, int]:
        """The kernel's settings."""
        fewer, more = REGISTERS[self.consumers, self.blocks]
        epilogue = problem.epilogue
        return {
            "ROWS": self.rows, "BN": self.pixels, "STAGES": self.stages, "CONSUMERS": self.consumers,
            "CLUSTER": self.cluster, "SPLIT": self.split, "DEPTH": self.depth, "BLOCKS": self.blocks,
            "BF16": int(problem.x_dtype == "bf16"), "BIAS": int(epilogue.bias),
            "RESIDUAL": int(epilogue.residual), "ACTIVATION": ACTIVATIONS.index(epilogue.activation),
            "PRODUCER_REGISTERS": fewer, "CONSUMER_REGISTERS": more,
        }  # fmt: skip

    def tiles(self, problem: ConvProblem) -> tuple[int, int]:
        """Tiles along pixels, and along filters up to whole clusters."""
        pixels = problem.n * problem.p * problem.q
        return -(-pixels // self.pixels), -(-problem.k // (self.filters * self.cluster)) * self.cluster

    def units(self, problem: ConvProblem) -> int:
        """Tiles of a whole cluster."""
        along_pixels, along_filters = self.tiles(problem)
        return along_pixels * along_filters // self.cluster

    def steps(self, problem: ConvProblem) -> int:
        """Iterations of a tile."""
        return iterations(problem) // self.depth

    def each(self, problem: ConvProblem) -> int:
        """Iterations of a block for one tile; of a split's last block perhaps fewer, but never none."""
        return -(-self.steps(problem) // self.split)

    def resident(self, units: int) -> int:
        """Clusters, or single blocks, of one to a multiprocessor: larger ones have to lie in one part of the device."""
        size = self.cluster * self.split
        return max(1, units // size if size <= 2 else units * 10 // (size * 11))

    def sizes(self, problem: ConvProblem, pitch: int) -> dict[str, int]:
        """The kernel's run-time sizes, in the order of its structure."""
        sizes = {
            "pixels": problem.n * problem.p * problem.q, "k": problem.k, "pitch": pitch, "q": problem.q,
            "pq": problem.p * problem.q, "groups": self.tiles(problem)[1] // self.cluster,
            "units": self.units(problem), "channels": problem.c, "iterations": self.steps(problem),
            "each": self.each(problem), "s": problem.s, "c_blocks": -(-problem.c // CHANNELS),
            "span_w": problem.s * problem.dilation_w,
            "stride_h": problem.stride_h, "stride_w": problem.stride_w, "pad_h": problem.pad_h, "pad_w": problem.pad_w,
            "dilation_h": problem.dilation_h, "dilation_w": problem.dilation_w,
        }  # fmt: skip
        for name in ("q", "pq", "groups", "s", "c_blocks"):
            sizes[f"{name}_factor"], sizes[f"{name}_shift"] = reciprocal(sizes[name])
        return sizes


def iterations(problem: ConvProblem) -> int:
    """Blocks of channels, over all taps."""
    return problem.r * problem.s * -(-problem.c // CHANNELS)


def estimate_us(problem: ConvProblem, form: Form, units: int) -> float:
    """A guess in microseconds: the busiest multiprocessor's products or loads with its stores, or the memory's bytes.

    A product of 64 filters and 32 channels takes half a clock a pixel, and 16 more: shared memory gives 128 bytes a clock, and
    64 of each pixel and 32 of each filter are read for it.
    """
    blocks = form.each(problem) * form.depth
    tiles = -(-form.units(problem) // form.resident(units))
    products = 2 * form.filters / 64 * (form.pixels / 2 + 16) / _CLOCK_GHZ
    weight = form.filters * ROW_BYTES / _LOAD_BYTES_NS_PER_SM
    loads = weight + form.pixels * _PIXEL_BYTES / _LOAD_BYTES_NS_PER_SM
    copies = max((_STEP_NS / form.depth + _COPY_NS) / 2, (_STEP_NS + _COPY_NS) / 2 / form.depth)
    store = form.filters * form.pixels * 2 / form.split / _STORE_BYTES_NS_PER_SM
    if form.split > 1:
        sent = 4 * form.filters * form.pixels * (form.split - 1) / form.split
        store += sent / _PEER_BYTES_NS_PER_SM + _MEETING_NS.get(form.split, 1500.0)
    loop = blocks * max(products, loads, copies)
    # Of two tiles in turn, one's stores hide the next one's loads: as many as the ring has room for, or a second block's all.
    hidden = min(store, loop if form.blocks > 1 else form.stages * form.depth * loads)
    busy = tiles * (loop + store + _TILE_NS) - (tiles - 1) * hidden
    if form.blocks > 1:  # the ring's first round of weights is there before the kernel in front has ended
        busy -= 0.7 * min(blocks, form.stages * form.depth) * weight
    memory = _bytes(problem) / _MEMORY_BYTES_NS
    start = _START_NS[form.blocks] + _TOGETHER_NS[form.cluster]
    return (max(busy, memory) + 0.1 * min(busy, memory) + start) / 1000


def _bytes(problem: ConvProblem) -> float:
    """What comes from memory and goes there: of x only what taps reach."""
    reached = min(1.0, problem.r / problem.stride_h) * min(1.0, problem.s / problem.stride_w)
    return problem.bytes_min - 2 * problem.n * problem.c * problem.h * problem.w * (1 - reached)


def forms(problem: ConvProblem, units: int, limit: int = 14) -> list[Form]:
    """Forms worth trying, by their guess: of each kind of cluster, split and room the best, then what is best beside them."""
    found = [(estimate_us(problem, form, units), index, form) for index, form in enumerate(_candidates(problem, units))]
    ordered = {form: guess for guess, _, form in sorted(found, key=lambda entry: entry[:2])}
    # What sharing, splitting and room bring is the least certain: each is tried where it might win.
    most = _HOPEFUL * min(ordered.values())
    hopeful = [form for form, guess in ordered.items() if guess <= most]
    chosen = _first(hopeful, lambda form: (form.cluster, form.split, form.blocks))
    tiles = _first(ordered, lambda form: (form.cluster, form.split, form.blocks, form.pixels, form.filters))
    kept = set(list(dict.fromkeys([*chosen, *tiles, *ordered]))[:limit])
    return [form for form in ordered if form in kept]


def _first(ordered: Iterable[Form], kind: Callable[[Form], tuple[int, ...]]) -> list[Form]:
    """The first one of each kind."""
    return list({kind(form): form for form in reversed(list(ordered))}.values())[::-1]


_SHAPES: Final = ((64, 1), (64, 2), (64, 3), (128, 1), (128, 2))
"""(rows, consumers) of the forms."""

_TOGETHER: Final = ((1, 1), (2, 1), (4, 1), (1, 2), (1, 3), (1, 4))
"""(cluster, split) of the forms."""


def _widths(total: int, groups: int, form: Form, units: int) -> list[int]:
    """Pixels of a tile: some round numbers, and those that fill one to three rounds of the device with nothing left over."""
    whole = 8 * form.cluster
    even = (-(-total // max(1, rounds * form.resident(units) // groups)) for rounds in (1, 2, 3))
    found = {-(-width // whole) * whole for width in (32, 64, 96, 128, 160, 192, 224, 256, *even)}
    return sorted(width for width in found if width <= 256)


def _candidates(problem: ConvProblem, units: int) -> Iterator[Form]:
    total = problem.n * problem.p * problem.q
    for (rows, consumers), (cluster, split) in product(_SHAPES, _TOGETHER):
        filters = rows * consumers
        if (filters > 64 and filters >= problem.k + 64) or (cluster > 1 and filters * (cluster - 1) >= problem.k):
            continue  # a warpgroup, or a block of the cluster, would have no filters
        shape = Form(rows, 8, 2, consumers, cluster, split=split)
        for pixels in _widths(total, -(-problem.k // (filters * cluster)), shape, units):
            for depth, blocks in product((1, 2) if iterations(problem) % 2 == 0 else (1,), (1, 2)):
                fits = rows // 64 * pixels // 2 <= _most_sums(consumers, blocks, problem.epilogue.activation)
                if fits and pixels < total + 32 and (blocks == 1 or pixels <= MOST_SHARED_PIXELS):
                    form = Form(rows, pixels, 2, consumers, cluster, depth, split, blocks)
                    if form.units(problem) <= form.resident(units) or split == 1:
                        yield from _deep(form, problem, units)


def _most_sums(consumers: int, blocks: int, activation: str) -> int:
    """`MOST_SUMS`; none where there are no registers for so many, fewer where an activation's division wants some."""
    most = MOST_SUMS.get((consumers, blocks), 0)
    return most - 8 if consumers == blocks == 2 and activation in DIVIDING else most


def _deep(form: Form, problem: ConvProblem, units: int) -> Iterator[Form]:
    """The form with as many stages as there is room and work for; none where three do not fit or a block has no work."""
    if form.split > 1 and (form.split - 1) * form.each(problem) >= form.steps(problem):
        return
    room = SHARED_BYTES[form.blocks] - form.inbox_bytes - _EXTRA_BYTES
    work = form.each(problem) * -(-form.units(problem) // form.resident(units))
    stages = min(MOST_STAGES, room // (form.stage_bytes + 16), max(3, work))
    if form.cluster > 1 and stages > 3:
        stages -= stages % 2  # with an odd number, one thread alone copies a cluster's pixels
    if stages >= 3:
        yield replace(form, stages=stages)


@lru_cache(maxsize=256)
def _crowded(mask: WeightMask) -> int:
    return crowded(positions(mask))


class SparseExecutable(Executable):
    """One form for one problem."""

    def __init__(self, problem: ConvProblem, form: Form, target: Target) -> None:
        assert problem.mask is not None
        self.problem, self.form, self.units = problem, form, target.units
        text = masked_source("sparse24", form.macros(problem), problem.x_dtype, sparse=True)
        chosen = options(problem.epilogue.activation, problem.x_dtype)
        cubin, self.log = compile_cubin(Sparse24Engine.id, text, target, chosen)
        self.function = Function(Sparse24Engine.id, cubin, "sparse24", form.shared_bytes)
        self.pixel_map = PixelMap.of(problem, form.pixels // form.cluster)
        mask = positions(problem.mask)
        self._mask = torch.from_numpy(mask)
        self.packing = Packing(mask, form.filters, form.cluster)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Values and metadata in the order in which they are copied; the bias as it is."""
        weight = constants[0].detach()
        check_zeros(weight, self._mask)
        return (self.packing.pack(weight), *(bias.detach().contiguous() for bias in constants[1:]))

    def accept_slice(self, result: int, pitch: int, offset: int) -> bool:
        """Where the slice keeps to sixteen bytes."""
        return fits_tma(_TORCH[self.problem.y_dtype], pitch, offset)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One launch."""
        del workspace
        problem, form = self.problem, self.form
        x, y, residual = checked(buffers, problem.epilogue.residual, slices=True)
        weight, bias = buffers.constants[0], buffers.constants[1] if problem.epilogue.bias else None
        arguments = [
            self.pixel_map.encode(problem.x_dtype, x), pointer(weight), pointer(y), pointer(residual), pointer(bias),
            structure("Sizes", form.sizes(problem, pitch_of(y))),
        ]  # fmt: skip
        device, threads, size = x.device.index or 0, 128 * (form.consumers + 1), form.cluster * form.split
        clusters = form.units(problem)
        if form.split == 1:  # a split's sums have room for one tile
            clusters = min(clusters, self.function.clusters(device, threads, size))
        self.function.launch(device, clusters * size, threads, arguments, cluster=size, dependent=True)


class Sparse24Engine(FormedEngine[Form]):
    """Sparse products of compressed weights; see `cuda/sparse24.cu`."""

    id = "pruned.sparse24"
    version = 2
    quick_settings = 28
    """All of a space: half of these are tried before any is taken for the best."""

    family = "implicit_gemm"
    trusted = False
    reads_mask = True
    form = Form

    def supports(self, problem: Problem, target: Target) -> Support:
        """Forward convolutions on Hopper in fp16 or bf16 and NHWC, c and k multiples of 8, whose mask is 2:4 along c."""
        if not (support := hopper_convolution(problem, target)):
            return support
        assert isinstance(problem, ConvProblem)
        assert problem.mask is not None
        if not PixelMap.of(problem, 64).fits(problem):
            return Support.no("needs padding and filter under 128, and strides up to 8")
        if found := _crowded(problem.mask):
            return Support.no(f"needs at most two values in every four channels, got more in {found} fours")
        return Support.no(absence()) if absence() else Support.yes()

    def forms(self, problem: ConvProblem, units: int) -> Sequence[Form]:
        """See the function of this name."""
        return forms(problem, units)

    def guess_us(self, problem: ConvProblem, form: Form, units: int) -> float:
        """See `estimate_us` above."""
        return estimate_us(problem, form, units)

    def executable(self, problem: ConvProblem, form: Form, target: Target) -> Executable:
        """Compile one form; no GPU is needed."""
        return SparseExecutable(problem, form, target)


ENGINE = Sparse24Engine()
