"""A CUDA graph as plain values: memory blocks, kernel launches, copies, fills, runs of cuDNN, and the order between them.

Addresses are replaced by places, so that the graph can be built anew in another process, wherever its memory lies there.
"""

from __future__ import annotations

from dataclasses import dataclass

from convoy.capture.structure import Structure
from convoy.package.program_file import PackedTensor

TENSOR_MAP_BYTES = 128
"""Bytes of a CUtensorMap (CUDA Driver API)."""


@dataclass(frozen=True, slots=True)
class Block:
    """One allocation of device memory.

    Attributes:
        size_bytes: its size.
        constant: tensor of the package with its first values; empty: the graph writes before it reads.
    """

    size_bytes: int
    constant: str = ""


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """A device address: a block, and bytes from its beginning."""

    block: int
    offset: int


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a kernel.

    Attributes:
        data: its bytes; those of addresses are zero.
        addresses: (byte in `data`, place whose 64-bit address stands there).
        tensor_map: whether it is a CUtensorMap: its one address is set by cuTensorMapReplaceAddress.
    """

    data: bytes
    addresses: tuple[tuple[int, DevicePlace], ...] = ()
    tensor_map: bool = False


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """A kernel node.

    Attributes:
        kernel: index among the package's kernels.
        grid: thread blocks in x, y and z.
        block: threads of a thread block in x, y and z.
        shared_bytes: dynamic shared memory of a thread block.
        cluster: thread blocks of a cluster in x, y and z; (1, 1, 1): none.
        arguments: in the kernel's order.
    """

    kernel: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    cluster: tuple[int, int, int]
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class MemoryCopy:
    """A copy from device memory to device memory."""

    source: DevicePlace
    target: DevicePlace
    size_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryFill:
    """Elements of 1, 2 or 4 bytes that get one value."""

    target: DevicePlace
    value: int
    element_bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Join:
    """A node without work, which orders others."""


@dataclass(frozen=True, slots=True)
class CudnnRun:
    """One run of an execution plan of cuDNN's, which launches kernels that the package does not hold.

    Attributes:
        plan: member of the package with the plan, as cuDNN's JSON.
        operands: (uid of a tensor of the plan's graph, its place).
        workspace: its place; None: the plan needs none.
        workspace_bytes: its size.
    """

    plan: str
    operands: tuple[tuple[int, DevicePlace], ...]
    workspace: DevicePlace | None = None
    workspace_bytes: int = 0


Node = KernelLaunch | MemoryCopy | MemoryFill | CudnnRun | Join


@dataclass(frozen=True, slots=True)
class Edge:
    """An order between two nodes.

    Attributes:
        before: index of the node that comes first.
        after: index of the other.
        programmatic: whether `after` may start before `before` has ended (programmatic dependent launch).
    """

    before: int
    after: int
    programmatic: bool = False


@dataclass(frozen=True, slots=True)
class RecordedGraph:
    """A program of a package for a CUDA device.

    Attributes:
        inputs: tensors that a call copies into their places.
        outputs: tensors that a call copies out of theirs. `slot` of both is an index into `places`.
        places: of the inputs, then of the outputs.
        arguments: how a call's arguments nest.
        results: how its results nest.
        strides: strides of the results; None: as the layout says.
        blocks: device memory.
        nodes: the graph's work.
        edges: its order.
    """

    inputs: tuple[PackedTensor, ...]
    outputs: tuple[PackedTensor, ...]
    places: tuple[DevicePlace, ...]
    arguments: Structure
    results: Structure
    strides: tuple[tuple[int, ...] | None, ...]
    blocks: tuple[Block, ...]
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
