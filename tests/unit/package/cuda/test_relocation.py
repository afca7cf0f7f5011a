"""From two captures to a graph without addresses: what differs and is no address of the program's memory is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from convoy.engines.compilers.loaded_kernels import LoadedKernel
from convoy.engines.gpu.library_calls import LibraryCall
from convoy.errors import CompileError
from convoy.package.cuda.read_cuda_graph import RawCopy, RawFill, RawGraph, RawJoin, RawKernel, RawNode
from convoy.package.cuda.recorded_graph import (
    Argument,
    CudnnRun,
    DevicePlace,
    Edge,
    Join,
    KernelLaunch,
    MemoryCopy,
    MemoryFill,
)
from convoy.package.cuda.relocation import CapturedLaunches, DeviceMemory, Relocation

WEIGHTS = DeviceMemory(0x7F0000400000, 4096, keeps=True)
KERNEL = LoadedKernel(1, "k", b"cubin")


def tensor_map(address: int, rest: int = 7) -> bytes:
    return struct.pack("<2Q", address, rest) + bytes(112)


def replace(data: bytes, address: int) -> bytes:
    return struct.pack("<Q", address) + data[8:]


def member(text: str) -> str:
    return f"cudnn/{text}"


def capture(
    base: int,
    *,
    number: int = 5,
    rest: int = 7,
    grid: int = 1,
    fill: int = 0,
    plan: str = "p",
    uid: int = 103,
    size: int = 64,
) -> CapturedLaunches:
    """Launches with inner memory at `base`: a kernel with a structure of a number and an address, and a tensor map."""
    inner = DeviceMemory(base, 8192, keeps=False)
    structure = struct.pack("<qQ", number, base + 512)
    arguments = (
        structure,
        struct.pack("<Q", WEIGHTS.address + 64),
        tensor_map(base + 1024, rest),
        struct.pack("<i", -1),
    )
    nodes: tuple[RawNode, ...] = (
        RawFill(base, fill, 1, 16),
        RawKernel(KERNEL, (grid, 1, 1), (32, 1, 1), 0, (1, 1, 1), arguments),
        RawCopy(base, base + 4096, 32),
        RawJoin(),
        LibraryCall(plan, ((101, WEIGHTS.address), (uid, base + 256)), base + 4096 if size else 0, size),
    )
    return CapturedLaunches(RawGraph(nodes, (Edge(0, 1), Edge(1, 2))), (WEIGHTS, inner))


def test_addresses_become_places() -> None:
    relocation = Relocation(capture(0x7F0000000000), capture(0x7F0000800000), replace)
    fill, launch, copy, join, run = relocation.nodes(lambda raw: 3, member)
    assert fill == MemoryFill(DevicePlace(0, 0), 0, 1, 16)
    assert copy == MemoryCopy(DevicePlace(0, 0), DevicePlace(0, 4096), 32)
    assert join == Join()
    assert run == CudnnRun("cudnn/p", ((101, DevicePlace(1, 0)), (103, DevicePlace(0, 256))), DevicePlace(0, 4096), 64)
    assert isinstance(launch, KernelLaunch)
    assert launch.kernel == 3
    assert launch.arguments == (
        Argument(struct.pack("<qQ", 5, 0), ((8, DevicePlace(0, 512)),)),
        Argument(bytes(8), ((0, DevicePlace(1, 64)),)),
        Argument(tensor_map(0x7F0000000400), ((0, DevicePlace(0, 1024)),), tensor_map=True),
        Argument(struct.pack("<i", -1)),
    )
    assert [block.keeps for block in relocation.blocks] == [False, True]


def test_a_number_that_looks_like_an_address_of_one_capture_stays_a_number() -> None:
    """It lies in the first capture's memory, and the second one has the same number, where it has no memory."""
    first, second = capture(0x7F0000000000, number=0x7F0000000010), capture(0x7F0000800000, number=0x7F0000000010)
    launch = Relocation(first, second, replace).nodes(lambda raw: 0, member)[1]
    assert isinstance(launch, KernelLaunch)
    assert launch.arguments[0].addresses == ((8, DevicePlace(0, 512)),)
    assert launch.arguments[0].data == struct.pack("<qQ", 0x7F0000000010, 0)


@pytest.mark.parametrize(
    "second",
    [
        lambda: capture(0x7F0000800000, number=6),
        lambda: capture(0x7F0000800000, rest=8),
        lambda: capture(0x7F0000800000, grid=2),
        lambda: capture(0x7F0000800000, fill=1),
        lambda: capture(0x7F0000800000, plan="q"),
        lambda: capture(0x7F0000800000, uid=104),
        lambda: capture(0x7F0000800000, size=128),
    ],
    ids=["a number", "a tensor map", "a grid", "a fill", "a plan", "an operand", "a workspace"],
)
def test_captures_that_differ_are_refused(second: Callable[[], CapturedLaunches]) -> None:
    with pytest.raises(CompileError, match="two captures of the program differ"):
        Relocation(capture(0x7F0000000000), second(), replace).nodes(lambda raw: 0, member)


def test_an_address_outside_the_programs_memory_is_refused() -> None:
    one, two = capture(0x7F0000000000), capture(0x7F0000800000)
    outside = (CapturedLaunches(one.graph, (WEIGHTS,)), CapturedLaunches(two.graph, (WEIGHTS,)))
    with pytest.raises(CompileError, match="lies in no memory of the program"):
        Relocation(*outside, replace).nodes(lambda raw: 0, member)


def test_other_edges_are_refused() -> None:
    one, two = capture(0x7F0000000000), capture(0x7F0000800000)
    with pytest.raises(CompileError, match="other nodes or edges"):
        Relocation(one, CapturedLaunches(RawGraph(two.graph.nodes, ()), two.memory), replace).nodes(
            lambda raw: 0, member
        )
