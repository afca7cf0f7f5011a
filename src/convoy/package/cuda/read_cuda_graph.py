"""Reads a captured CUDA graph through the driver: kernels with their arguments' bytes, copies, fills, and edges."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from convoy.engines.compilers.cuda_bindings import driver
from convoy.engines.compilers.loaded_kernels import LoadedKernel
from convoy.engines.gpu.library_calls import LibraryCall, NotedCall
from convoy.errors import CompileError, InputError
from convoy.package.cuda.recorded_graph import Edge

PROGRAMMATIC: Final = 1
"""CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC (CUDA Driver API, CUgraphDependencyType)."""

_MOST_ARGUMENTS: Final = 256


@dataclass(frozen=True, slots=True)
class RawKernel:
    """A kernel node with addresses of this process.

    Attributes:
        kernel: what was launched.
        grid: thread blocks in x, y and z.
        block: threads in x, y and z.
        shared_bytes: dynamic shared memory.
        cluster: thread blocks of a cluster in x, y and z.
        arguments: bytes of each argument.
    """

    kernel: LoadedKernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    cluster: tuple[int, int, int]
    arguments: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class RawCopy:
    """A copy between device addresses."""

    source: int
    target: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class RawFill:
    """Elements of 1, 2 or 4 bytes at a device address that get one value."""

    target: int
    value: int
    element_bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class RawJoin:
    """A node without work."""


RawNode = RawKernel | RawCopy | RawFill | LibraryCall | RawJoin


@dataclass(frozen=True, slots=True)
class RawGraph:
    """A graph with addresses of this process: nodes in the order of their capture, and edges. A library's call is one node."""

    nodes: tuple[RawNode, ...]
    edges: tuple[Edge, ...]


def read_cuda_graph(handle: int, kernels: dict[int, LoadedKernel], calls: Sequence[NotedCall] = ()) -> RawGraph:
    """The nodes and edges of a graph.

    Args:
        handle: a CUgraph that was not destroyed.
        kernels: Convoy's loaded kernels, by the driver's handle.
        calls: calls of a library that were captured, with the nodes that they added.

    Raises:
        InputError: the graph launches a kernel of a library outside of these calls, or a node that a package cannot hold.
        CompileError: the driver refuses.
    """
    cuda = driver()
    graph = cuda.CUgraph(handle)
    _, count = checked(cuda.cuGraphGetNodes(graph, 0), 2)
    nodes, _ = checked(cuda.cuGraphGetNodes(graph, count), 2)
    *_, count = checked(cuda.cuGraphGetEdges(graph, 0), 4)
    before, after, data, _ = checked(cuda.cuGraphGetEdges(graph, count), 4) if count else ((), (), (), 0)
    programmatic = [int(kind.type) == PROGRAMMATIC for kind in data]
    ends = [(int(a), int(b)) for a, b in zip(before, after, strict=True)]
    called, kept, edges = merged_calls([int(node) for node in nodes], list(zip(ends, programmatic, strict=True)), calls)
    by_handle = {int(node): node for node in nodes}
    return RawGraph(
        tuple(called[node] if node in called else _node(by_handle[node], kernels) for node in kept), tuple(edges)
    )


def merged_calls(
    nodes: Sequence[int], edges: Sequence[tuple[tuple[int, int], bool]], calls: Sequence[NotedCall]
) -> tuple[Mapping[int, LibraryCall], list[int], list[Edge]]:
    """Make one node of the nodes of each call: the first of them stands for all.

    Args:
        nodes: handles of all nodes, in the order of their capture.
        edges: (handles of two nodes, whether the edge is programmatic).
        calls: the calls.

    Returns:
        calls by the node that stands for them; the nodes that are left, in order; edges between these, by index. Edges from and
        to a call are full ones: the work behind it begins when it has ended.
    """
    order = {node: at for at, node in enumerate(nodes)}
    stands: dict[int, int] = {}
    called: dict[int, LibraryCall] = {}
    for noted in calls:
        if noted.nodes:
            first = min(noted.nodes, key=order.__getitem__)
            called[first] = noted.call
            stands.update(dict.fromkeys(noted.nodes, first))
    kept = [node for node in nodes if stands.get(node, node) == node]
    index = {node: at for at, node in enumerate(kept)}
    found: dict[tuple[int, int], bool] = {}
    for (a, b), programmatic in edges:
        ends = index[stands.get(a, a)], index[stands.get(b, b)]
        if ends[0] != ends[1]:
            early = programmatic and a not in stands and b not in stands
            found[ends] = early and found.get(ends, True)
    return called, kept, [Edge(a, b, programmatic) for (a, b), programmatic in found.items()]


def checked(answer: tuple[Any, ...], results: int = 1) -> Any:
    """The results of a driver's call; raises CompileError if it failed."""
    error, *rest = answer
    if int(error):
        raise CompileError("package", f"the CUDA driver refused: {error.name}")
    return rest[0] if results == 1 and rest else rest


def _node(node: Any, kernels: dict[int, LoadedKernel]) -> RawNode:
    cuda = driver()
    kinds = cuda.CUgraphNodeType
    kind = checked(cuda.cuGraphNodeGetType(node))
    if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
        return _kernel(node, kernels)
    if kind == kinds.CU_GRAPH_NODE_TYPE_MEMCPY:
        return _copy(checked(cuda.cuGraphMemcpyNodeGetParams(node)))
    if kind == kinds.CU_GRAPH_NODE_TYPE_MEMSET:
        found = checked(cuda.cuGraphMemsetNodeGetParams(node))
        if int(found.height) > 1:
            raise _unpackable("a fill of several rows")
        return RawFill(int(found.dst), int(found.value), int(found.elementSize), int(found.width))
    if kind == kinds.CU_GRAPH_NODE_TYPE_EMPTY:
        return RawJoin()
    raise _unpackable(f"a node of kind {kind.name}")


def _unpackable(what: str) -> InputError:
    todo = (
        "Export without a plan, or with portable=True (--portable), or tune with only_engines of Convoy's own kernels and "
        "cuDNN's (cuda.*, triton.*, cudnn)."
    )
    return InputError("plan", what, "launches of Convoy's own kernels, runs of cuDNN, copies and fills", todo)


def _copy(found: Any) -> RawCopy:
    memory = driver().CUmemorytype
    device = (memory.CU_MEMORYTYPE_DEVICE, memory.CU_MEMORYTYPE_UNIFIED)
    if found.srcMemoryType not in device or found.dstMemoryType not in device or found.Height > 1 or found.Depth > 1:
        raise _unpackable("a copy that is not one row of device memory")
    source = int(found.srcDevice) + int(found.srcXInBytes)
    return RawCopy(source, int(found.dstDevice) + int(found.dstXInBytes), int(found.WidthInBytes))


def _kernel(node: Any, kernels: dict[int, LoadedKernel]) -> RawKernel:
    cuda = driver()
    found = checked(cuda.cuGraphKernelNodeGetParams(node))
    function = found.func
    known = kernels.get(int(function))
    if known is None:
        raise _unpackable(f"kernel {_name(function)}")
    ids = cuda.CUlaunchAttributeID
    sides = checked(cuda.cuGraphKernelNodeGetAttribute(node, ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)).clusterDim
    cluster = (max(1, int(sides.x)), max(1, int(sides.y)), max(1, int(sides.z)))
    if int(checked(cuda.cuGraphKernelNodeGetAttribute(node, ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE)).cooperative):
        raise _unpackable(f"a cooperative launch of kernel {known.name}")
    return RawKernel(
        known,
        (int(found.gridDimX), int(found.gridDimY), int(found.gridDimZ)),
        (int(found.blockDimX), int(found.blockDimY), int(found.blockDimZ)),
        int(found.sharedMemBytes),
        cluster,
        _arguments(function, int(found.kernelParams)),
    )


def _name(function: Any) -> str:
    error, name = driver().cuFuncGetName(function)
    return "of a library" if int(error) else name.decode(errors="replace")[:120]


def _arguments(function: Any, pointers: int) -> tuple[bytes, ...]:
    """The bytes of each argument, whose sizes the driver knows from the binary."""
    cuda = driver()
    found: list[bytes] = []
    for index in range(_MOST_ARGUMENTS):
        error, *place = cuda.cuFuncGetParamInfo(function, index)
        if int(error):
            break
        address = ctypes.c_void_p.from_address(pointers + index * ctypes.sizeof(ctypes.c_void_p)).value
        assert address is not None
        found.append(ctypes.string_at(address, int(place[1])))
    return tuple(found)
