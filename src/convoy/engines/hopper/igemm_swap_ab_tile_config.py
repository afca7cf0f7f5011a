"""SwapAbTile: how `igemm_swap_ab.cu` tiles a convolution, the resources this takes, and the kernel's parameters."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Self

from convoy.engines.hopper.igemm_swap_ab_limits import (
    EXTRA_BYTES,
    HALOS,
    MOST_SPLIT,
    MOST_STAGES,
    REGISTERS,
    ROW_BYTES,
    SHARED_BYTES,
    TAPS,
)
from convoy.engines.hopper.nvrtc_source import ACTIVATIONS, reciprocal
from convoy.errors import InputError
from convoy.problem import ConvProblem, Knobs
from convoy.problem.spec import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class SwapAbTile:
    """A tile configuration of `igemm_swap_ab.cu`.

    Attributes:
        rows: filters of a consumer warpgroup, 64 or 128.
        pixels: of a tile, a multiple of 8 for each block of a cluster.
        stages: of the ring buffer.
        consumers: number of consumer warpgroups, which multiply.
        cluster: blocks with the same pixels and different filters.
        depth: blocks of 64 channels in one iteration, 1 or 2.
        split: blocks that share a tile, each with some of the taps and channels; 1 if `cluster` is larger than 1.
        blocks: per multiprocessor, 1 or 2. With 2, the next kernel can start before this one ends.
        staged: how results are stored. 0: by each lane. 1: by TMA, through shared memory of their own. 2: by TMA, through the
            ring buffer's memory, so a block computes one tile.
        halo: 0, or the columns of a tile's row, for 3x3 layers of stride 1. A tile is then some rows of one image, and all taps
            read one copy of its pixels; `depth` is 1 or 3 taps, and `cluster` is 1. With a split, TMA stores need rows whose
            columns are a multiple of eight.
    """

    sparse: ClassVar[bool] = False
    """Whether the weight is compressed (2:4)."""

    filter_bytes: ClassVar[int] = ROW_BYTES
    """Bytes of one filter's block of channels."""

    weights: ClassVar[int] = 0
    """Layout of the weight: 0 packed, 1 the user's [k, r, s, c], 2 the same for a gradient of x."""

    planes: ClassVar[int] = 1
    """Planes of x and of the weight: 2 for products that are split to be exact in fp32."""

    wide: ClassVar[bool] = False
    """Whether results are fp32."""

    splits: ClassVar[tuple[int, ...]] = (1, 2, 3, 4, 6, 8)
    """Values of `split` to try."""

    halos_of_split: ClassVar[int] = 2
    """Boxes of pixels in shared memory for a block of a split, which loads none ahead for a next tile."""

    odd_rows: ClassVar[bool] = True
    """Whether to try rows of one column more than the image, besides multiples of eight."""

    rows: int
    pixels: int
    stages: int
    consumers: int
    cluster: int
    depth: int = 1
    split: int = 1
    blocks: int = 1
    staged: int = 0
    halo: int = 0

    @property
    def knobs(self) -> Knobs:
        """As an engine's knobs."""
        return Knobs.of(**{field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def of(cls, knobs: Knobs) -> Self:
        """Inverse of `knobs`; raises InputError for knobs without a valid kernel."""
        form = cls(**{field.name: knobs.integer(field.name) for field in fields(cls)})
        right = form.rows in (64, 128) and (form.consumers, form.blocks) in REGISTERS and form.staged in (0, 1, 2)
        right &= form.depth in ((1, 3) if form.halo else (1, 2))
        if form.halo:
            right &= (
                (form.staged > 0 or form.split > 1 or cls.wide)
                and form.cluster == 1
                and 0 < form.halo <= form.pixels
                and form.pixels - form.kept < 8
                and (form.halo % 8 == 0 or form.split == 1 or not form.staged)
            )
        right &= not (cls.wide and form.staged) and (cls.planes == 1 or (form.depth == 1 and form.cluster == 1))
        right &= form.cluster in (1, 2, 4) and 1 <= form.split <= (MOST_SPLIT if form.cluster == 1 else 1)
        right &= 0 < form.pixels <= 256 and form.pixels % (8 * form.cluster) == 0 and 2 <= form.stages <= MOST_STAGES
        if form.staged == 2:
            right &= form.result_bytes <= form.stages * form.stage_bytes
        if not right or form.shared_bytes > SHARED_BYTES[form.blocks]:
            raise InputError(
                "knobs",
                str(knobs),
                "rows of 64 or 128, pixels up to 256, 1 to 3 consumers, 1 or 2 blocks that fit, depth 1 or 2, "
                "a cluster of 1, 2 or 4 or a split of up to 8; with a halo staged or split, cluster 1, depth 1 or 3, "
                "whole rows of pixels; fp32 results are not staged, planes have depth 1 and no cluster",
            )
        return form

    def filled(self, stages: int, staged: int) -> Self:
        """The same with these stages and this way of storing, in a third of the time that `replace` takes."""
        rest = (self.consumers, self.cluster, self.depth, self.split, self.blocks)
        return type(self)(self.rows, self.pixels, stages, *rest, staged, self.halo)

    @property
    def filters(self) -> int:
        """Filters of a tile."""
        return self.rows * self.consumers

    @property
    def sums(self) -> int:
        """Accumulators of a thread; with planes, those of the total, the main product and the correction."""
        return self.rows // 64 * self.pixels // 2 * (3 if self.planes > 1 else 1)

    @property
    def stage_bytes(self) -> int:
        """Bytes of both operands of one iteration; each stage starts at a multiple of 1024."""
        pixels = 0 if self.halo else self.depth * self.pixels * ROW_BYTES * self.planes
        return pixels + -(-self.depth * self.filters * self.filter_bytes // 1024) * 1024

    @property
    def pending(self) -> int:
        """Iterations whose products may be in flight, by the kernel's rule; their stages are not free."""
        if self.rows // 64 * self.pixels >= 384 or self.stages < 4:
            return 1
        return 3 if self.stages >= 6 else 2

    @property
    def inbox_bytes(self) -> int:
        """Bytes that a block of a split receives: the other blocks' sums of its share of a tile, in items of 16 pixels."""
        return self.consumers * self._owned * (self.split - 1) * 4096

    @property
    def _owned(self) -> int:
        """Most items of a warpgroup that a block of a split stores."""
        return -(-(self.rows // 64 * -(-self.pixels // 16)) // self.split)

    @property
    def staged_bytes(self) -> int:
        """Shared memory reserved for results."""
        return self.result_bytes if self.staged == 1 else 0

    @property
    def result_bytes(self) -> int:
        """Bytes of a tile's results, or of those that a block of a split stores, in whole items."""
        return self.consumers * self._owned * 2048 if self.split > 1 else self.filters * self.pixels * 2

    def halo_rows(self, width: int) -> int:
        """Rows of a box of pixels: those of the tile, one above and one below, and one more if the last tap wraps into it."""
        if not self.halo:
            return 0
        return self.pixels // self.halo + (2 if self.halo > width + 1 else 3)

    @property
    def kept(self) -> int:
        """Pixels of a tile that lie in whole rows."""
        return self.pixels // self.halo * self.halo if self.halo else self.pixels

    @property
    def halos(self) -> int:
        """Boxes of pixels in shared memory."""
        if not self.halo:
            return 0
        return HALOS if self.split == 1 else self.halos_of_split

    @property
    def fixed_bytes(self) -> int:
        """Shared memory without the ring buffer."""
        box = -(-self.halo_rows(self.halo - 1) * self.halo * ROW_BYTES // 1024) * 1024
        return self.halos * box * self.planes + self.staged_bytes + self.inbox_bytes + EXTRA_BYTES

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: ring buffer, boxes of pixels, results, sums from other blocks, barriers, alignment."""
        return self.stages * (self.stage_bytes + 16) + self.fixed_bytes

    @property
    def unit(self) -> int:
        """Pixels of one TMA store: a whole tile, or with a split those of its items that lie in whole rows or in one row."""
        if self.split == 1:
            return self.pixels
        return 16 if self.pixels % 16 == 0 and (self.halo in (0, 8) or self.halo % 16 == 0) else 8

    def fits(self, problem: ConvProblem) -> bool:
        """Whether the configuration suits the problem: with a halo, taps must be adjacent and rows wider than the image."""
        if not self.halo:
            return True
        ones = (
            problem.stride_h,
            problem.stride_w,
            problem.dilation_h,
            problem.dilation_w,
            problem.pad_h,
            problem.pad_w,
        )
        return problem.r == problem.s == 3 and set(ones) == {1} and problem.w < self.halo

    def parameters(self, problem: ConvProblem) -> dict[str, int]:
        """The values of `igemm/igemm_swap_ab_config.cuh`."""
        fewer, more = REGISTERS[self.consumers, self.blocks]
        epilogue = problem.epilogue
        return {
            "WARPGROUP_M": self.rows, "TILE_N": self.pixels, "STAGES": self.stages, "CONSUMERS": self.consumers,
            "CLUSTER": self.cluster, "SPLIT": self.split, "DEPTH": self.depth, "MIN_BLOCKS_PER_SM": self.blocks,
            "STAGED_STORE": self.staged, "STORE_PIXELS": self.unit, "HALO_PITCH": self.halo, "HALO_PIXELS": self.kept,
            "HALO_ROWS": self.halo_rows(problem.w), "HALO_STAGES": self.halos, "SPARSE": int(self.sparse),
            "PLANES": self.planes, "FP32_RESULTS": int(self.wide), "WEIGHT_LAYOUT": self.weights,
            "VALUE_BYTES": DTYPE_BYTES[problem.x_dtype], "BFLOAT": int(problem.x_dtype == "bf16"),
            "HAS_BIAS": int(epilogue.bias), "HAS_RESIDUAL": int(epilogue.residual),
            "ACTIVATION": ACTIVATIONS.index(epilogue.activation), "PRODUCER_REGISTERS": fewer,
            "CONSUMER_REGISTERS": more,
        }  # fmt: skip

    def tiles(self, problem: ConvProblem) -> tuple[int, int]:
        """Tiles along pixels, and along filters rounded up to whole clusters."""
        return self._along_pixels(problem), -(-problem.k // (self.filters * self.cluster)) * self.cluster

    def _along_pixels(self, problem: ConvProblem) -> int:
        if self.halo:
            return problem.n * self._of_image(problem)
        return -(-problem.n * problem.p * problem.q // self.pixels)

    def _of_image(self, problem: ConvProblem) -> int:
        """Tiles of one image, with a halo."""
        return -(-problem.p // (self.pixels // self.halo))

    def units(self, problem: ConvProblem) -> int:
        """Work items of the grid: groups of tiles that one cluster computes together."""
        along_pixels, along_filters = self.tiles(problem)
        return along_pixels * along_filters // self.cluster

    def product_clocks(self) -> float:
        """Clocks of the tensor cores for the products of one block of channels: half a clock a pixel for 64 filters, 16 channels.

        Shared memory delivers 128 bytes a clock, and such a product reads 32 bytes of each pixel and of each filter. With 2:4
        weights it reads 32 bytes of a filter and 64 of a pixel for 32 channels, which takes 16 clocks more than the products.
        """
        whole = 4 * max(self.pixels / 2, self.pixels / 4 + 16) * (3 if self.planes > 1 else 1)
        return self.filters / 64 * (2 * (self.pixels / 2 + 16) if self.sparse else whole)

    def steps(self, problem: ConvProblem) -> int:
        """Iterations of a tile."""
        return iterations(problem) // self.depth

    def each(self, problem: ConvProblem) -> int:
        """Iterations of a block for one tile. The last block of a split may have fewer, but at least one."""
        if self.halo:  # in whole boxes
            return -(-blocks_of_channels(problem) // self.split) * TAPS // self.depth
        return -(-self.steps(problem) // self.split)

    def resident(self, units: int) -> int:
        """Clusters, or single blocks, that run at one time. A cluster must fit into one GPC of the device.

        On 132 multiprocessors, forty clusters of three blocks, one block per multiprocessor, took up to 1.3 times as long as
        with two per multiprocessor, as if every fourth multiprocessor of a GPC stood idle.
        """
        size = self.cluster * self.split
        size += size % 2 if size > 1 and self.blocks == 1 else 0
        return max(1, units // size if size <= 2 else units * 10 // (size * 11))

    def sizes(self, problem: ConvProblem, pitch: int) -> dict[str, int]:
        """The kernel's run-time sizes, in the order of its structure."""
        sizes = {
            "pixels": problem.n * problem.p * problem.q, "k": problem.k, "pitch": pitch, "p": problem.p,
            "q": problem.q, "pq": self._of_image(problem) if self.halo else problem.p * problem.q,
            "groups": self.tiles(problem)[1] // self.cluster, "units": self.units(problem),
            "channels": problem.c, "iterations": self.steps(problem), "each": self.each(problem), "s": problem.s,
            "c_blocks": blocks_of_channels(problem), "span_w": problem.s * problem.dilation_w,
            "stride_h": problem.stride_h, "stride_w": problem.stride_w, "pad_h": problem.pad_h, "pad_w": problem.pad_w,
            "dilation_h": problem.dilation_h, "dilation_w": problem.dilation_w,
        }  # fmt: skip
        sizes |= {} if self.sparse else {"images": problem.n}
        sizes |= {"taps": problem.r * problem.s} if self.weights else {}
        for name in ("q", "pq", "groups", "s", "c_blocks"):
            sizes[f"{name}_factor"], sizes[f"{name}_shift"] = reciprocal(sizes[name])
        return sizes


def iterations(problem: ConvProblem) -> int:
    """Iterations of a tile of depth 1: blocks of channels times taps."""
    return problem.r * problem.s * blocks_of_channels(problem)


def blocks_of_channels(problem: ConvProblem) -> int:
    """Blocks of channels of one tap."""
    return -(-problem.c * DTYPE_BYTES[problem.x_dtype] // ROW_BYTES)
