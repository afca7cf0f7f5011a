"""How `swapped.cu` cuts a convolution, what that takes of a multiprocessor, and what the kernel is told of it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Final, Self

from convoy.engines.hopper.nvrtc_source import ACTIVATIONS, reciprocal
from convoy.errors import InputError
from convoy.problem import ConvProblem, Knobs
from convoy.problem.spec import DTYPE_BYTES

ROW_BYTES: Final = 128
"""What the widest swizzle spans: a block's channels of a pixel or a filter."""

CHANNELS: Final = 64
"""Of a block, in half types."""

SHARED_BYTES: Final = {1: 232448, 2: 115712}
"""Of a block, by the number of blocks that a multiprocessor has room for: of its 228 KB, each block costs one more."""

MOST_STAGES: Final = 12
"""770 ns from a stage's release to its next full one, and small tiles' iterations of 76 ns: with more, loads are no faster."""

MOST_SPLIT: Final = 8
EXTRA_BYTES: Final = 1024 + 96
"""What rounding the ring's start up may cost, and barriers that are no stage's."""

HALOS: Final = 3
"""Boxes of pixels in shared memory, where all taps read one: each is there for nine iterations."""

TAPS: Final = 9

REGISTERS: Final = {(1, 1): (40, 232), (2, 1): (40, 232), (3, 1): (32, 160), (1, 2): (40, 216), (2, 2): (32, 104)}
"""Registers of a copying and of a multiplying thread, by the numbers of multiplying warpgroups and of blocks."""

MOST_SUMS: Final = {(1, 1): 192, (2, 1): 192, (3, 1): 96, (1, 2): 128, (2, 2): 48}
"""Sums of a thread, by the same: beyond, the assembler spills or refuses."""

SPLIT_PLANES: Final = 24
"""Of these, fewer where planes are split among blocks."""

MOST_SHARED_PIXELS: Final = 200
"""Of a product with two blocks: its sums and operands must fit the 128 registers that a thread starts with."""


@dataclass(frozen=True, slots=True)
class SwapAbTile:
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
        staged: 0 where each lane stores its own results; where they go through shared memory and by tensor copies 1 if some is
            kept for them, 2 if it is the ring's: then a block has one tile.
        halo: 0, or columns of a row of a tile, for 3x3 layers of stride 1: a tile is some rows of one image, and all taps read
            the same copy of their pixels; `depth` is 1 or 3 taps then, and `cluster` 1. Of a split, rows of columns that are no
            multiple of eight have no tensor copies.
    """

    sparse: ClassVar[bool] = False
    """Whether the weight is compressed (2:4)."""

    filter_bytes: ClassVar[int] = ROW_BYTES
    """Of a filter's block."""

    weights: ClassVar[int] = 0
    """0 where the weight is packed, 1 where it is read as it lies, 2 the same for a gradient of x."""

    planes: ClassVar[int] = 1
    """Of x and of the weight."""

    wide: ClassVar[bool] = False
    """Whether results are fp32."""

    splits: ClassVar[tuple[int, ...]] = (1, 2, 3, 4, 6, 8)
    """That are tried."""

    halos_of_split: ClassVar[int] = 2
    """Boxes of pixels of a block of a split, which has few of them and no next tile's."""

    odd_rows: ClassVar[bool] = True
    """Whether rows of one column more than the image's are tried, beside those of whole eights."""

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
        """Inverse of `knobs`; raises InputError for what no kernel can be made of."""
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
                "rows of 64 or 128, pixels up to 256, 1 to 3 consumers, 1 or 2 blocks with room, depth 1 or 2, "
                "a cluster of 1, 2 or 4 or a split of up to 8; with a halo staged or split, cluster 1, depth 1 or 3, "
                "whole rows of pixels; fp32 results are not staged, planes have depth 1 and no cluster",
            )
        return form

    @property
    def filters(self) -> int:
        """Of a tile."""
        return self.rows * self.consumers

    @property
    def sums(self) -> int:
        """Of a thread: of planes the total, the body and the correction."""
        return self.rows // 64 * self.pixels // 2 * (3 if self.planes > 1 else 1)

    @property
    def stage_bytes(self) -> int:
        """Both operands of one iteration; each stage begins at a multiple of 1024."""
        pixels = 0 if self.halo else self.depth * self.pixels * ROW_BYTES * self.planes
        return pixels + -(-self.depth * self.filters * self.filter_bytes // 1024) * 1024

    @property
    def pending(self) -> int:
        """Iterations whose products may be under way, as the kernel chooses it: their stages are not free."""
        if self.rows // 64 * self.pixels >= 384 or self.stages < 4:
            return 1
        return 3 if self.stages >= 6 else 2

    @property
    def inbox_bytes(self) -> int:
        """What a block of a split gets from the others: its share of a tile's sums, in items of sixteen pixels."""
        return self.consumers * self._owned * (self.split - 1) * 4096

    @property
    def _owned(self) -> int:
        """Items of a warpgroup that a block of a split stores, at most."""
        return -(-(self.rows // 64 * -(-self.pixels // 16)) // self.split)

    @property
    def staged_bytes(self) -> int:
        """What is kept for results."""
        return self.result_bytes if self.staged == 1 else 0

    @property
    def result_bytes(self) -> int:
        """A tile's results, or those of a block of a split, in whole items."""
        return self.consumers * self._owned * 2048 if self.split > 1 else self.filters * self.pixels * 2

    def halo_rows(self, width: int) -> int:
        """Rows of a box of pixels: a tile's, their neighbours, and one more where the last one's last neighbour lies in it."""
        if not self.halo:
            return 0
        return self.pixels // self.halo + (2 if self.halo > width + 1 else 3)

    @property
    def kept(self) -> int:
        """Pixels of a tile that lie in its rows."""
        return self.pixels // self.halo * self.halo if self.halo else self.pixels

    @property
    def halos(self) -> int:
        """Boxes of pixels in shared memory."""
        if not self.halo:
            return 0
        return HALOS if self.split == 1 else self.halos_of_split

    @property
    def fixed_bytes(self) -> int:
        """All shared memory but the ring."""
        box = -(-self.halo_rows(self.halo - 1) * self.halo * ROW_BYTES // 1024) * 1024
        return self.halos * box * self.planes + self.staged_bytes + self.inbox_bytes + EXTRA_BYTES

    @property
    def shared_bytes(self) -> int:
        """The ring, boxes of pixels, results, sums from other blocks, barriers, and what rounding the ring's start up costs."""
        return self.stages * (self.stage_bytes + 16) + self.fixed_bytes

    @property
    def unit(self) -> int:
        """Pixels of one copy of results: a tile's, or of a split's items as many as lie in whole rows or in one."""
        if self.split == 1:
            return self.pixels
        return 16 if self.pixels % 16 == 0 and (self.halo in (0, 8) or self.halo % 16 == 0) else 8

    def fits(self, problem: ConvProblem) -> bool:
        """Whether the form can do the problem: a halo's taps must be neighbours, and its rows as wide as the image."""
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
        """The values of `igemm_swap_ab_config.cuh`."""
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
        """Tiles along pixels, and along filters up to whole clusters."""
        return self._along_pixels(problem), -(-problem.k // (self.filters * self.cluster)) * self.cluster

    def _along_pixels(self, problem: ConvProblem) -> int:
        if self.halo:
            return problem.n * self._of_image(problem)
        return -(-problem.n * problem.p * problem.q // self.pixels)

    def _of_image(self, problem: ConvProblem) -> int:
        """A halo's tiles of one image."""
        return -(-problem.p // (self.pixels // self.halo))

    def units(self, problem: ConvProblem) -> int:
        """Tiles of a whole cluster."""
        along_pixels, along_filters = self.tiles(problem)
        return along_pixels * along_filters // self.cluster

    def product_clocks(self) -> float:
        """Of a multiprocessor's tensor cores, for a block's products: half a clock a pixel for 64 filters and 16 channels.

        Shared memory gives 128 bytes a clock, and 32 of each pixel and of each filter are read for it; of 2:4 weights
        32 of a filter for 32 channels, and 64 of a pixel: 16 clocks more than the products.
        """
        whole = 4 * max(self.pixels / 2, self.pixels / 4 + 16) * (3 if self.planes > 1 else 1)
        return self.filters / 64 * (2 * (self.pixels / 2 + 16) if self.sparse else whole)

    def steps(self, problem: ConvProblem) -> int:
        """Iterations of a tile."""
        return iterations(problem) // self.depth

    def each(self, problem: ConvProblem) -> int:
        """Iterations of a block for one tile; of a split's last block perhaps fewer, but never none."""
        if self.halo:  # of whole boxes
            return -(-blocks_of_channels(problem) // self.split) * TAPS // self.depth
        return -(-self.steps(problem) // self.split)

    def resident(self, units: int) -> int:
        """Clusters, or single blocks, of one to a multiprocessor: larger ones have to lie in one part of the device.

        On 132, forty clusters of three that fill a multiprocessor each took up to 1.3 times as long as with room for two: as if
        the fourth of two pairs of multiprocessors stood idle.
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
    """Blocks of channels, over all taps."""
    return problem.r * problem.s * blocks_of_channels(problem)


def blocks_of_channels(problem: ConvProblem) -> int:
    """As many channels as an iteration has of one tap."""
    return -(-problem.c * DTYPE_BYTES[problem.x_dtype] // ROW_BYTES)
