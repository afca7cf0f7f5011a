"""From two captures of one program, at different addresses, to a graph without addresses.

A word of a kernel's argument is an address exactly where it lies in memory that the program uses, in both captures, with the same
distance from the beginning of the same block. All other bytes must be equal. What is neither is refused: no guess goes into a
package.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from convoy.engines.gpu.library_calls import LibraryCall
from convoy.errors import CompileError
from convoy.package.cuda.read_cuda_graph import RawCopy, RawFill, RawGraph, RawJoin, RawKernel, RawNode
from convoy.package.cuda.recorded_graph import (
    TENSOR_MAP_BYTES,
    Argument,
    CudnnRun,
    DevicePlace,
    Join,
    KernelLaunch,
    MemoryCopy,
    MemoryFill,
    Node,
)

_WORD: Final = 8

Replace = Callable[[bytes, int], bytes]
"""A tensor map and an address → the map with that address (cuTensorMapReplaceAddress)."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One allocation.

    Attributes:
        address: of its first byte.
        size_bytes: its size.
        keeps: whether its values are those of a constant, which the package holds.
    """

    address: int
    size_bytes: int
    keeps: bool


@dataclass(frozen=True, slots=True)
class CapturedLaunches:
    """One capture: its graph, and all memory that there was."""

    graph: RawGraph
    memory: Sequence[DeviceMemory]


class Relocation:
    """Finds the places of addresses in two captures.

    Args:
        first: a capture, whose constants are taken.
        second: another of the same program.
        replace: puts an address into a tensor map.

    Attributes:
        blocks: blocks of the first capture that its nodes use, in order of use.

    Raises:
        CompileError: in every method, if the captures differ in anything but addresses.
    """

    def __init__(self, first: CapturedLaunches, second: CapturedLaunches, replace: Replace) -> None:
        self.blocks: list[DeviceMemory] = []
        self._first, self._second, self._replace = first, second, replace
        self._memory = [sorted(one.memory, key=lambda block: block.address) for one in (first, second)]
        self._starts = [[block.address for block in memory] for memory in self._memory]
        self._index: dict[int, int] = {}
        self._partner: dict[int, int] = {}

    def place(self, first: int, second: int) -> DevicePlace:
        """The place of an address, which is `first` in one capture and `second` in the other."""
        found = self._place(first, second)
        if found is None:
            raise _differ(f"address {first:#x} lies in no memory of the program")
        return found

    def nodes(self, kernel: Callable[[RawKernel], int], plan: Callable[[str], str]) -> list[Node]:
        """All nodes, with places for addresses; `kernel` gives the index of a launch's kernel, `plan` the member of a text."""
        one, two = self._first.graph, self._second.graph
        if len(one.nodes) != len(two.nodes) or set(one.edges) != set(two.edges):
            raise _differ("they have other nodes or edges")
        return [self._node(a, b, kernel, plan) for a, b in zip(one.nodes, two.nodes, strict=True)]

    def _node(self, a: RawNode, b: RawNode, kernel: Callable[[RawKernel], int], plan: Callable[[str], str]) -> Node:
        if isinstance(a, LibraryCall) and isinstance(b, LibraryCall):
            return self._run(a, b, plan)
        if isinstance(a, RawKernel) and isinstance(b, RawKernel):
            launch = (a.kernel.name, a.grid, a.block, a.shared_bytes, a.cluster, [len(one) for one in a.arguments])
            other = (b.kernel.name, b.grid, b.block, b.shared_bytes, b.cluster, [len(one) for one in b.arguments])
            if launch != other or a.kernel.cubin != b.kernel.cubin:
                raise _differ(f"kernel {a.kernel.name} is launched in another way")
            arguments = [self._argument(x, y, a.kernel.name) for x, y in zip(a.arguments, b.arguments, strict=True)]
            return KernelLaunch(kernel(a), a.grid, a.block, a.shared_bytes, a.cluster, tuple(arguments))
        if isinstance(a, RawCopy) and isinstance(b, RawCopy) and a.size_bytes == b.size_bytes:
            return MemoryCopy(self.place(a.source, b.source), self.place(a.target, b.target), a.size_bytes)
        if isinstance(a, RawFill) and isinstance(b, RawFill):
            same = (a.value, a.element_bytes, a.count) == (b.value, b.element_bytes, b.count)
            if same:
                return MemoryFill(self.place(a.target, b.target), a.value, a.element_bytes, a.count)
        if type(a) is not type(b) or not isinstance(a, RawJoin):
            raise _differ("their nodes differ")
        return Join()

    def _run(self, a: LibraryCall, b: LibraryCall, plan: Callable[[str], str]) -> CudnnRun:
        uids = [uid for uid, _ in a.operands]
        if (a.plan, a.workspace_bytes, uids) != (b.plan, b.workspace_bytes, [uid for uid, _ in b.operands]):
            raise _differ("cuDNN runs another plan")
        pairs = zip(a.operands, b.operands, strict=True)
        return CudnnRun(
            plan(a.plan),
            tuple((uid, self.place(first, second)) for (uid, first), (_, second) in pairs),
            self.place(a.workspace, b.workspace) if a.workspace_bytes else None,
            a.workspace_bytes,
        )

    def _argument(self, a: bytes, b: bytes, name: str) -> Argument:
        addresses: list[tuple[int, DevicePlace]] = []
        kept, other = bytearray(a), bytearray(b)
        for at in range(0, len(a) - _WORD + 1, _WORD):
            first, second = struct.unpack_from("<Q", a, at)[0], struct.unpack_from("<Q", b, at)[0]
            place = self._place(first, second)
            if place is not None:
                addresses.append((at, place))
                kept[at : at + _WORD] = other[at : at + _WORD] = bytes(_WORD)
        is_map = len(a) == TENSOR_MAP_BYTES and len(addresses) == 1
        if is_map:
            at = addresses[0][0]
            if self._replace(a, struct.unpack_from("<Q", b, at)[0]) != b:
                raise _differ(f"a tensor map of kernel {name} differs in more than its address")
        elif kept != other:
            raise _differ(f"an argument of kernel {name} differs, and is no address of the program's memory")
        return Argument(bytes(a) if is_map else bytes(kept), tuple(addresses), is_map)

    def _place(self, first: int, second: int) -> DevicePlace | None:
        one, two = self._block(0, first), self._block(1, second)
        if one is None or two is None:
            return None
        offset = first - one.address
        if offset != second - two.address or one.size_bytes != two.size_bytes:
            return None
        if self._partner.setdefault(one.address, two.address) != two.address:
            raise _differ("one block of memory stands for two")
        if one.address not in self._index:
            self._index[one.address] = len(self.blocks)
            self.blocks.append(one)
        return DevicePlace(self._index[one.address], offset)

    def _block(self, capture: int, address: int) -> DeviceMemory | None:
        at = bisect.bisect_right(self._starts[capture], address) - 1
        if at < 0:
            return None
        block = self._memory[capture][at]
        return block if address < block.address + block.size_bytes else None


def _differ(how: str) -> CompileError:
    return CompileError("package", f"two captures of the program differ: {how}; report this as a bug")
