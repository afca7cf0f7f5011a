"""Shapes and tile configurations of `bottleneck.cu`: residual blocks of three convolutions in one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from convoy.engines.hopper.nvrtc_source import ACTIVATIONS, reciprocal
from convoy.engines.hopper.tensor_maps import ROW_BYTES, BoxMap
from convoy.errors import InputError
from convoy.problem import Knobs
from convoy.problem.spec import DTYPE_BYTES

CHANNELS: Final = 64
"""Channels of a block: 128 bytes of half values."""

SHARED_BYTES: Final = 227 << 10
"""Shared memory that one block of threads may have."""

REGISTERS: Final = {1: (40, 232), 2: (40, 232), 3: (32, 160)}
"""Multiplying warpgroups → registers of a thread that copies and of one that multiplies."""

MOST_SUMS: Final = {1: 160, 2: 160, 3: 96}
"""Multiplying warpgroups → sums that a thread may hold; it needs other registers too."""

MOST_COLUMNS: Final = 256
"""Columns of a product."""

_BARRIER_BYTES: Final = 8
_ALIGNMENT: Final = 1024


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """y = act3(conv1x1(act2(conv3x3(act1(conv1x1(x))))) + residual), stride 1, NHWC.

    Attributes:
        n: images.
        h: height of x and y.
        w: width.
        c: channels of x.
        mid: channels between the convolutions.
        k: channels of y.
        dtype: fp16 or bf16, of every tensor.
        activations: behind each convolution.
        residual: what is added to the last convolution's result: `x`, `other` for another tensor like y, or `none`.
    """

    n: int
    h: int
    w: int
    c: int
    mid: int
    k: int
    dtype: str
    activations: tuple[str, str, str]
    residual: str

    @property
    def flops(self) -> int:
        """Operations; a multiply-add counts as two."""
        return 2 * self.n * self.h * self.w * (self.c * self.mid + 9 * self.mid * self.mid + self.mid * self.k)

    @property
    def weight_bytes(self) -> int:
        """Of the three weights."""
        each = DTYPE_BYTES[self.dtype]
        return each * (self.c * self.mid + 9 * self.mid * self.mid + self.mid * self.k)

    @property
    def bytes_min(self) -> int:
        """X and another residual read once, y written once, and the weights."""
        channels = self.c + self.k * (1 + (self.residual == "other"))
        return self.n * self.h * self.w * channels * DTYPE_BYTES[self.dtype] + self.weight_bytes


@dataclass(frozen=True, slots=True)
class BottleneckTile:
    """One way to cut a block's work.

    Attributes:
        rows: of the image, that a multiplying warpgroup computes in a pass.
        consumers: multiplying warpgroups.
        passes: of an item, one below the other.
        x_stages: stages of the ring of pixels.
        weight_stages: stages of the ring of weights; 0: a block of threads keeps all weights.
        cluster: blocks that copy weights for each other.
        ahead: whether the last convolution multiplies 64 filters while it stores the 64 before them.
    """

    rows: int
    consumers: int
    passes: int
    x_stages: int
    weight_stages: int = 0
    cluster: int = 1
    ahead: bool = False

    @property
    def knobs(self) -> Knobs:
        """The configuration as an engine's knobs."""
        return Knobs.of(
            rows=self.rows, consumers=self.consumers, passes=self.passes, x_stages=self.x_stages,
            weight_stages=self.weight_stages, cluster=self.cluster, ahead=self.ahead,
        )  # fmt: skip

    @classmethod
    def of(cls, knobs: Knobs) -> BottleneckTile:
        """Inverse of `knobs`; raises InputError for knobs that name no valid configuration."""
        names = ("rows", "consumers", "passes", "x_stages", "weight_stages", "cluster")
        tile = cls(*(knobs.integer(name) for name in names), ahead=bool(knobs["ahead"]))
        counts = tile.rows >= 1 and tile.consumers in REGISTERS and tile.passes >= 1 and 2 <= tile.x_stages <= 16
        if not (counts and (tile.weight_stages == 0 or 2 <= tile.weight_stages <= 64) and tile.cluster in (1, 2, 4)):
            expected = "1 to 3 consumers, 2 to 16 stages of pixels, 0 or 2 to 64 of weights, clusters of 1, 2 or 4"
            raise InputError("knobs", str(knobs), expected)
        return tile

    @property
    def pass_rows(self) -> int:
        """Rows of the image in a pass."""
        return self.rows * self.consumers

    @property
    def item_rows(self) -> int:
        """Rows of the image that a block computes before it goes to another place."""
        return self.pass_rows * self.passes

    def span(self, block: Bottleneck) -> int:
        """Columns of the 3x3 product: rows with a zero between them, in whole eights."""
        return -(-((self.rows - 1) * (block.w + 1) + block.w) // 8) * 8

    def stage_bytes(self, block: Bottleneck) -> int:
        """Bytes of a stage of pixels."""
        return self.pass_rows * block.w * ROW_BYTES

    def chunk_bytes(self, block: Bottleneck) -> int:
        """Bytes of a chunk of weights."""
        return block.mid * ROW_BYTES

    def held_chunks(self, block: Bottleneck) -> int:
        """Chunks of weights in shared memory."""
        return self.weight_stages or chunks_of(block)

    def shared_bytes(self, block: Bottleneck) -> int:
        """Shared memory of a block of threads: SmemLayout of bottleneck_layout.cuh."""
        first = ((self.pass_rows + 2) * (block.w + 1) + 9) * ROW_BYTES
        inside = -(-first // 1024) * 1024 + self.stage_bytes(block)
        held = self.held_chunks(block)
        barriers = 2 * _BARRIER_BYTES * (self.x_stages + held)
        rings = self.x_stages * self.stage_bytes(block) + held * self.chunk_bytes(block)
        return rings + block.mid // CHANNELS * inside + 1024 + barriers + _ALIGNMENT

    def refusal(self, block: Bottleneck) -> str:
        """Why the kernel cannot compute a block so; empty if it can."""
        own, parts = self.rows * block.w, block.mid // CHANNELS
        if self.pass_rows < 2:
            return "needs two rows in a pass: the window keeps two"
        if own % 8:
            return f"needs rows of a multiple of 8 pixels, got {own}"
        if max(own, self.span(block)) > MOST_COLUMNS or block.w > 256 or self.pass_rows > 256:
            return "has more columns than a product"
        if parts * self.span(block) // 2 > MOST_SUMS[self.consumers]:
            return "has more sums than registers"
        if self.ahead and own > MOST_SUMS[self.consumers]:
            return "has more sums of two blocks than registers"
        if self.shared_bytes(block) > SHARED_BYTES:
            return f"needs {self.shared_bytes(block)} bytes of shared memory, of {SHARED_BYTES}"
        return ""

    def segments(self, block: Bottleneck) -> int:
        """Items of an image."""
        return -(-block.h // self.item_rows)

    def rounds(self, block: Bottleneck) -> int:
        """Items of each block of a cluster, all clusters together."""
        return -(-block.n * self.segments(block) // self.cluster)

    def parameters(self, block: Bottleneck) -> dict[str, int]:
        """The values of `bottleneck/bottleneck_config.cuh`."""
        fewer, more = REGISTERS[self.consumers]
        first, second, last = (ACTIVATIONS.index(word) for word in block.activations)
        return {
            "WIDTH": block.w, "ROWS": self.rows, "CONSUMERS": self.consumers, "IN_BLOCKS": block.c // CHANNELS,
            "MID_BLOCKS": block.mid // CHANNELS, "OUT_BLOCKS": block.k // CHANNELS, "X_STAGES": self.x_stages,
            "WEIGHT_STAGES": self.held_chunks(block), "RESIDENT": int(not self.weight_stages),
            "AHEAD": int(self.ahead), "CLUSTER": self.cluster, "HAS_RESIDUAL": int(block.residual != "none"),
            "BFLOAT": int(block.dtype == "bf16"), "FIRST_ACTIVATION": first, "SECOND_ACTIVATION": second,
            "LAST_ACTIVATION": last, "PRODUCER_REGISTERS": fewer, "CONSUMER_REGISTERS": more,
        }  # fmt: skip

    def sizes(self, block: Bottleneck) -> dict[str, int]:
        """The kernel's run-time sizes, in the order of its structure."""
        segments = self.segments(block)
        factor, shift = reciprocal(segments)
        return {
            "rounds": self.rounds(block), "passes": self.passes, "segments": segments, "height": block.h,
            "segments_factor": factor, "segments_shift": shift,
        }  # fmt: skip

    def pixel_map(self, block: Bottleneck) -> BoxMap:
        """Descriptor of x: 64 channels of a pass's rows."""
        return _rows_map(block, block.c, self.pass_rows)

    def residual_map(self, block: Bottleneck) -> BoxMap:
        """Descriptor of the residual: boxes as those of x."""
        return _rows_map(block, block.k, self.pass_rows)

    def result_map(self, block: Bottleneck, pitch: int) -> BoxMap:
        """Descriptor of y, whose pixels are `pitch` elements apart: 64 channels of a warpgroup's rows."""
        return _rows_map(block, block.k, self.rows, pitch)


def chunks_of(block: Bottleneck) -> int:
    """Chunks of a block's weights, each of `mid` rows of 64 channels."""
    return block.c // CHANNELS + 9 * block.mid // CHANNELS + block.k // CHANNELS


def _rows_map(block: Bottleneck, channels: int, rows: int, pitch: int = 0) -> BoxMap:
    each = DTYPE_BYTES[block.dtype]
    step = (pitch or channels) * each
    return BoxMap(
        (channels, block.w, block.h, block.n),
        (step, block.w * step, block.h * block.w * step),
        (CHANNELS, block.w, rows, 1),
    )
