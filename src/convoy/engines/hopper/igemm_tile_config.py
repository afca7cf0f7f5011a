"""IgemmTile: how `igemm.cu` tiles a convolution, the shared memory and registers this takes, and the kernel's parameters."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.engines.hopper.nvrtc_source import ACTIVATIONS, reciprocal
from convoy.engines.hopper.tensor_maps import ROW_BYTES
from convoy.errors import InputError
from convoy.problem import ConvProblem, Knobs
from convoy.problem.spec import DTYPE_BYTES

SHARED_BYTES = 232448
MOST_STAGES = 8
MOST_BLOCKS = 8
"""Most blocks of a cluster, on every device."""

EXTRA_BYTES = 1024 + 32
"""Bytes to align the start of the ring buffer, and the barriers between consumers that take turns (ping-pong)."""

REGISTERS = {1: (40, 232), 2: (40, 232), 3: (32, 160)}
"""Registers of a producer and of a consumer thread, by the number of consumer warpgroups: together the whole register file."""


@dataclass(frozen=True, slots=True)
class IgemmTile:
    """A tile configuration of `igemm.cu`.

    Attributes:
        rows: pixels that a consumer warpgroup computes of a tile, 64 or 128.
        filters: of a tile, a multiple of 8.
        stages: of the ring buffer.
        consumers: number of consumer warpgroups, which multiply.
        turns: whether each consumer computes tiles of its own (ping-pong).
        cluster: blocks of a cluster, which share the filters that they load.
        split: blocks that share a tile, each with some of the taps and channels; 1 if `cluster` is larger than 1.
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
        """Inverse of `knobs`; raises InputError for knobs without a valid kernel."""
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
                "rows of 64 or 128, filters up to 256, 1 to 3 consumers, clusters of 1 or 2 or a split, within 227 KB",
            )
        return form

    @property
    def pixels(self) -> int:
        """Pixels of a tile."""
        return self.rows if self.turns else self.rows * self.consumers

    @property
    def stage_bytes(self) -> int:
        """Bytes of both operands of one iteration."""
        return (self.pixels + self.filters) * ROW_BYTES

    @property
    def ring_bytes(self) -> int:
        """Bytes of all stages."""
        return self.stages * self.stage_bytes

    @property
    def sum_bytes(self) -> int:
        """Bytes that a block of a split receives into the ring buffer: the other blocks' fp32 sums of its share of a tile."""
        items = self.rows // 64 * 2 * -(-self.filters // 32)
        return -(-items // self.split) * self.split * self.consumers * 128 * 32

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the ring buffer, its barriers and the alignment of its start."""
        return self.ring_bytes + 16 * self.stages + EXTRA_BYTES

    def parameters(self, problem: ConvProblem) -> dict[str, int]:
        """The values of `igemm/igemm_config.cuh`."""
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
        """Work items of the grid: groups of tiles that one cluster computes together."""
        rows, columns = self.tiles(problem)
        return -(-rows // self.cluster) * columns

    def each(self, problem: ConvProblem) -> int:
        """Iterations of a block for one tile. The last block of a split may have fewer, but at least one."""
        return -(-iterations(problem) // self.split)

    def resident(self, units: int) -> int:
        """Clusters, or single blocks, that run at one time. A cluster must fit into one GPC of the device.

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
    """Iterations of a tile: blocks of channels times taps."""
    return problem.r * problem.s * -(-problem.c * DTYPE_BYTES[problem.x_dtype] // ROW_BYTES)
