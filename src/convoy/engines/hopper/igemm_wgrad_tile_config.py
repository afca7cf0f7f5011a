"""IgemmWgradTile: how `igemm_wgrad.cu` tiles a weight's gradient, the resources this takes, and the kernel's parameters."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, Self

from convoy.engines.hopper.igemm_swap_ab_limits import (
    EXTRA_BYTES,
    MOST_SPLIT,
    MOST_STAGES,
    REGISTERS,
    ROW_BYTES,
    SHARED_BYTES,
)
from convoy.engines.hopper.nvrtc_source import reciprocal
from convoy.engines.hopper.tensor_maps import BoxMap, PixelMap
from convoy.errors import InputError
from convoy.problem import ConvProblem, Knobs
from convoy.problem.spec import DTYPE_BYTES

GROUP: Final = 64
"""Filters or channels of one copy: as many half-type values as the widest swizzle spans."""

MOST_SHARES: Final = 64


@dataclass(frozen=True, slots=True)
class IgemmWgradTile:
    """A tile configuration of `igemm_wgrad.cu`.

    Attributes:
        rows: filters of a consumer warpgroup, 64 or 128.
        columns: of a tile, in groups of 64 channels of a tap; up to 256.
        pixels: of an iteration, 64 or 128.
        stages: of the ring buffer.
        consumers: number of consumer warpgroups, which multiply.
        split: blocks of a cluster that share a tile, each with some of the pixels.
        shares: clusters, or blocks, that share a tile; their sums go to memory, and another kernel adds them.
        blocks: per multiprocessor, 1 or 2.
    """

    rows: int
    columns: int
    pixels: int
    stages: int
    consumers: int
    split: int = 1
    shares: int = 1
    blocks: int = 1

    @property
    def knobs(self) -> Knobs:
        """As an engine's knobs."""
        return Knobs.of(**{field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def of(cls, knobs: Knobs) -> Self:
        """Inverse of `knobs`; raises InputError for knobs without a valid kernel."""
        form = cls(**{field.name: knobs.integer(field.name) for field in fields(cls)})
        right = form.rows in (64, 128) and form.columns in (64, 128, 192, 256)
        right &= (
            form.pixels in (64, 128) and (form.consumers, form.blocks) in REGISTERS and 2 <= form.stages <= MOST_STAGES
        )
        right &= 1 <= form.split <= MOST_SPLIT and 1 <= form.shares <= MOST_SHARES
        if not right or form.shared_bytes > SHARED_BYTES[form.blocks] or form.inbox_bytes > form.ring_bytes:
            raise InputError(
                "knobs",
                str(knobs),
                "rows of 64 or 128, 64 to 256 columns, 64 or 128 pixels, 1 to 3 consumers, 1 or 2 blocks that fit, "
                "a split of up to 8 whose sums fit the ring, and up to 64 shares",
            )
        return form

    @property
    def filters(self) -> int:
        """Filters of a tile."""
        return self.rows * self.consumers

    @property
    def stage_bytes(self) -> int:
        """Bytes of both operands of one iteration."""
        return (self.filters + self.columns) // GROUP * self.pixels * ROW_BYTES

    @property
    def ring_bytes(self) -> int:
        """Bytes of all stages."""
        return self.stages * self.stage_bytes

    @property
    def inbox_bytes(self) -> int:
        """Bytes that a block of a split receives: the other blocks' sums of its share of a tile, in items of 16 columns."""
        owned = -(-(self.rows // 64 * self.columns // 16) // self.split)
        return self.consumers * owned * (self.split - 1) * 4096

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the ring buffer, its barriers and the alignment of its start."""
        return self.stages * (self.stage_bytes + 16) + EXTRA_BYTES

    def parameters(self, problem: ConvProblem) -> dict[str, int]:
        """The values of `igemm/igemm_wgrad_config.cuh`."""
        fewer, more = REGISTERS[self.consumers, self.blocks]
        return {
            "WARPGROUP_M": self.rows, "TILE_N": self.columns, "PIXELS": self.pixels, "STAGES": self.stages,
            "CONSUMERS": self.consumers, "SPLIT": self.split, "MIN_BLOCKS_PER_SM": self.blocks,
            "FP32_SHARES": int(self.shares > 1), "X_HAS_PIXELS_OF_DY": int(flat(problem)),
            "BFLOAT": int(problem.x_dtype == "bf16"), "PRODUCER_REGISTERS": fewer, "CONSUMER_REGISTERS": more,
        }  # fmt: skip

    def tiles(self, problem: ConvProblem) -> tuple[int, int]:
        """Tiles along filters, and along the channels of all taps."""
        return -(-problem.k // self.filters), -(-groups(problem) // (self.columns // GROUP))

    def units(self, problem: ConvProblem) -> int:
        """Clusters, or blocks without a split, that have work."""
        along_filters, along_columns = self.tiles(problem)
        return along_filters * along_columns * self.shares

    def iterations(self, problem: ConvProblem) -> int:
        """Iterations over all pixels."""
        return -(-problem.n * problem.p * problem.q // self.pixels)

    def sizes(self, problem: ConvProblem) -> dict[str, int]:
        """The kernel's run-time sizes, in the order of its structure."""
        along_filters, along_columns = self.tiles(problem)
        each, more = divmod(self.iterations(problem), self.shares * self.split)
        sizes = {
            "k": problem.k, "c": problem.c, "row": problem.r * problem.s * problem.c, "q": problem.q,
            "pq": problem.p * problem.q, "units": self.units(problem),
            "tiles_k": along_filters, "tiles_n": along_columns, "columns": groups(problem),
            "c_blocks": -(-problem.c // GROUP), "s": problem.s, "each": each, "more": more,
            "stride_h": problem.stride_h, "stride_w": problem.stride_w, "pad_h": problem.pad_h, "pad_w": problem.pad_w,
            "dilation_h": problem.dilation_h, "dilation_w": problem.dilation_w,
        }  # fmt: skip
        for name in ("q", "pq", "tiles_k", "tiles_n", "c_blocks", "s"):
            sizes[f"{name}_factor"], sizes[f"{name}_shift"] = reciprocal(sizes[name])
        return sizes

    def x_map(self, problem: ConvProblem) -> PixelMap | BoxMap:
        """Descriptor of x: a copy is a run of pixels at one tap."""
        return self._rows(problem, problem.c) if flat(problem) else PixelMap.of(problem, self.pixels)

    def dy_map(self, problem: ConvProblem) -> BoxMap:
        """Descriptor of dy: a copy has as many pixels as one of x."""
        return self._rows(problem, problem.k)

    def _rows(self, problem: ConvProblem, channels: int) -> BoxMap:
        """A tensor with the pixels of dy as consecutive rows."""
        pixels, pitch = problem.n * problem.p * problem.q, channels * DTYPE_BYTES[problem.x_dtype]
        return BoxMap((channels, pixels, 1, 1), (pitch, pixels * pitch, pixels * pitch), (GROUP, self.pixels, 1, 1))


def flat(problem: ConvProblem) -> bool:
    """Whether the pixels of x are those of dy."""
    return problem.is_pointwise and problem.stride_h == problem.stride_w == 1


def groups(problem: ConvProblem) -> int:
    """Groups of 64 channels, over all taps."""
    return problem.r * problem.s * -(-problem.c // GROUP)
