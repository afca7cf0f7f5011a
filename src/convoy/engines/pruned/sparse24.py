"""pruned.sparse24: convolutions whose weights are 2:4 sparse, on Hopper's sparse tensor cores (docs/kernels/sparse24.md).

    y = activation(conv(x, weight) + bias + residual)    -->    half the products, 0.56 of the weight's bytes

A mask will do where of every four neighbouring channels at most two have values, for each filter and tap. Values may change under
one mask; a value where the mask has none is refused when weights are packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch

from convoy.engines.base import Buffers, Executable, Packed
from convoy.engines.cuda.compiled import Function, absence, compile_cubin, pointer, structure
from convoy.engines.cuda.implicit_gemm import reciprocal
from convoy.engines.cuda.maps import PixelMap
from convoy.engines.cuda.source import ACTIVATIONS, masked_source
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

SHARED_BYTES: Final = 232448
MOST_STAGES: Final = 8
_PIXEL_BYTES: Final = 128
_EXTRA_BYTES: Final = 1024
"""What rounding the ring's start up may cost."""

REGISTERS: Final = {1: (40, 232), 2: (40, 232), 3: (32, 160)}
"""Registers of a copying and of a multiplying thread, by the number of multiplying warpgroups."""

MOST_SUMS: Final = {1: 192, 2: 192, 3: 96}
"""Sums of a thread, by the number of multiplying warpgroups: beyond, the assembler spills or refuses."""

_TORCH: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}
_CLOCK_GHZ: Final = 1.7
_LOAD_BYTES_NS_PER_SM: Final = 90.0
_STEP_NS: Final = 130.0
_COPY_NS: Final = 40.0
"""Of a copying thread: to wait for a stage, and for each copy. Both as `cuda.implicit_gemm` has them together."""

_TOGETHER_NS: Final = {1: 0.0, 2: 150.0, 4: 200.0}
"""What blocks of a cluster wait for each other in an iteration: of two, as `cuda.implicit_gemm` does; of four a guess."""

_TILE_NS: Final = 150.0
_STORE_BYTES_NS_PER_SM: Final = 20.0
_MEMORY_BYTES_NS: Final = 2900.0
_START_NS: Final = 2500.0


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
    """

    rows: int
    pixels: int
    stages: int
    consumers: int
    cluster: int
    depth: int = 1

    @property
    def knobs(self) -> Knobs:
        """As an engine's knobs."""
        return Knobs.of(**{name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def of(cls, knobs: Knobs) -> Form:
        """Inverse of `knobs`; raises InputError for what no kernel can be made of."""
        form = cls(**{name: knobs.integer(name) for name in cls.__slots__})
        right = (
            form.rows in (64, 128)
            and form.consumers in REGISTERS
            and form.cluster in (1, 2, 4)
            and form.depth in (1, 2)
        )
        whole = 8 * form.cluster
        if not right or not 0 < form.pixels <= 256 or form.pixels % whole or not 2 <= form.stages <= MOST_STAGES:
            raise InputError(
                "knobs",
                str(knobs),
                "rows of 64 or 128, pixels up to 256, 1 to 3 consumers, clusters of 1, 2 or 4, depth 1 or 2",
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
    def shared_bytes(self) -> int:
        """The ring, its barriers, and what rounding its start up costs."""
        return self.stages * (self.stage_bytes + 16) + _EXTRA_BYTES

    def macros(self, problem: ConvProblem) -> dict[str, int]:
        """The kernel's settings."""
        fewer, more = REGISTERS[self.consumers]
        epilogue = problem.epilogue
        return {
            "ROWS": self.rows, "BN": self.pixels, "STAGES": self.stages, "CONSUMERS": self.consumers,
            "CLUSTER": self.cluster, "DEPTH": self.depth, "BF16": int(problem.x_dtype == "bf16"), "BIAS": int(epilogue.bias),
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

    def sizes(self, problem: ConvProblem, pitch: int) -> dict[str, int]:
        """The kernel's run-time sizes, in the order of its structure."""
        sizes = {
            "pixels": problem.n * problem.p * problem.q, "k": problem.k, "pitch": pitch, "q": problem.q,
            "pq": problem.p * problem.q, "groups": self.tiles(problem)[1] // self.cluster,
            "units": self.units(problem), "channels": problem.c, "iterations": iterations(problem) // self.depth,
            "span_w": problem.s * problem.dilation_w,
            "stride_h": problem.stride_h, "stride_w": problem.stride_w, "pad_h": problem.pad_h, "pad_w": problem.pad_w,
            "dilation_h": problem.dilation_h, "dilation_w": problem.dilation_w,
        }  # fmt: skip
        for name in ("q", "pq", "groups"):
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
    clusters = _clusters(units, form.cluster)
    work = form.units(problem)
    products = 2 * form.filters / 64 * (form.pixels / 2 + 16) / _CLOCK_GHZ
    loads = (form.filters * ROW_BYTES + form.pixels / form.cluster * _PIXEL_BYTES) / _LOAD_BYTES_NS_PER_SM
    copies = _STEP_NS / form.depth + _COPY_NS
    step = max(products, loads, copies) + _TOGETHER_NS[form.cluster] / form.depth
    store = form.filters * form.pixels * 2 / _STORE_BYTES_NS_PER_SM
    busy = -(-work // clusters) * (iterations(problem) * step + store + _TILE_NS)
    memory = problem.bytes_min / _MEMORY_BYTES_NS
    return (max(busy, memory) + 0.1 * min(busy, memory) + _START_NS) / 1000


def forms(problem: ConvProblem, units: int, limit: int = 24) -> list[Form]:
    """Forms worth trying, the best guess of each size of cluster first; of each tile the best two."""
    found = sorted(
        ((estimate_us(problem, form, units), index, form) for index, form in enumerate(_candidates(problem, units))),
        key=lambda entry: entry[:2],
    )
    kept: dict[tuple[int, int], int] = {}
    chosen: list[Form] = []
    for _, _, form in found:
        tile = (form.pixels, form.filters)
        if kept.get(tile, 0) < 2 and len(chosen) < limit:
            kept[tile] = kept.get(tile, 0) + 1
            chosen.append(form)
    # How much sharing pixels brings is the least certain: each size of cluster is tried before others of the same size.
    first = {form.cluster: form for form in reversed(chosen)}
    ahead = sorted(first.values(), key=chosen.index)
    return [*ahead, *(form for form in chosen if form not in ahead)]


def _clusters(units: int, cluster: int) -> int:
    """Clusters that run at one time: of four, only whole ones among the 16 or 18 multiprocessors that lie together."""
    return units // 16 * 4 if cluster == 4 else units // cluster


def _widths(total: int, groups: int, cluster: int, units: int) -> list[int]:
    """Pixels of a tile: some round numbers, and those that fill one to three rounds of the device with nothing left over."""
    whole = 8 * cluster
    even = (-(-total // max(1, rounds * _clusters(units, cluster) // groups)) for rounds in (1, 2, 3))
    found = {-(-width // whole) * whole for width in (32, 64, 96, 128, 160, 192, 224, 256, *even)}
    return sorted(width for width in found if width <= 256)


def _candidates(problem: ConvProblem, units: int) -> Iterator[Form]:
    total = problem.n * problem.p * problem.q
    for rows, consumers in ((64, 1), (64, 2), (64, 3), (128, 1), (128, 2)):
        filters = rows * consumers
        if filters > 64 and filters >= problem.k + 64:
            continue
        for cluster in (1, 2, 4):
            if cluster > 1 and filters * (cluster - 1) >= problem.k:
                continue  # a block of the cluster would have no filters
            for pixels in _widths(total, -(-problem.k // (filters * cluster)), cluster, units):
                if rows // 64 * pixels // 2 > MOST_SUMS[consumers] or pixels >= total + 32:
                    continue
                for depth in (1, 2) if iterations(problem) % 2 == 0 else (1,):
                    shallow = Form(rows, pixels, 2, consumers, cluster, depth)
                    stages = min(MOST_STAGES, (SHARED_BYTES - _EXTRA_BYTES) // (shallow.stage_bytes + 16))
                    if stages >= 3:
                        yield Form(rows, pixels, stages, consumers, cluster, depth)


@lru_cache(maxsize=256)
def _crowded(mask: WeightMask) -> int:
    return crowded(positions(mask))


class SparseExecutable(Executable):
    """One form for one problem."""

    def __init__(self, problem: ConvProblem, form: Form, target: Target) -> None:
        assert problem.mask is not None
        self.problem, self.form, self.units = problem, form, target.units
        text = masked_source("sparse24", form.macros(problem), problem.x_dtype, sparse=True)
        cubin, self.log = compile_cubin(Sparse24Engine.id, text, target)
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
        device, threads = x.device.index or 0, 128 * (form.consumers + 1)
        clusters = min(form.units(problem), self.function.clusters(device, threads, form.cluster))
        self.function.launch(device, clusters * form.cluster, threads, arguments, cluster=form.cluster, dependent=True)


class Sparse24Engine(FormedEngine[Form]):
    """Sparse products of compressed weights; see `cuda/sparse24.cu`."""

    id = "pruned.sparse24"
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
