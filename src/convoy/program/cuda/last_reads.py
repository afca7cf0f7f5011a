"""Last reads of large values in a CUDA graph: the second-level cache evicts them first.

    x (29 MB)  -->  kernel  -->  y (29 MB)  -->  kernel
                    |
                    nobody reads x again, yet as the cache fills, x takes the space of y

A kernel node of a graph may have an access policy window (CUDA Programming Guide, "Device memory L2 access management"). Here it
lies over the largest value that the kernel is the last to read, and its reads count as streaming. Kernels and results stay as
they are. Where a step has several kernels, its executable says which of them reads the value last (`Executable.last_readers`).
On an H100, with marks on steps of one kernel, one replay at batch 32 took 392 us instead of 409 (MobileNetV2) and 702 instead of
737 (EfficientNet-B0); ResNet-50 took as long as before (fp16; docs/kernels/last-reads.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from convoy.engines.compilers.cuda_bindings import driver
from convoy.program.bound_plan import BoundPlan, BoundStep

LEAST_BYTES: Final = 16_000_000
"""Smaller values fit in the cache beside others: marking them too, from 0.5 MB on, changed no replay by more than 0.3 %."""


class LastRead(NamedTuple):
    """A value that a step is the last to read.

    Attributes:
        slot: of the value.
        kernel: which of the step's kernels reads it last: -1 for the last one; None: its only kernel.
    """

    slot: int
    kernel: int | None = None


def last_reads(bound: BoundPlan) -> dict[int, LastRead]:
    """The steps that are the last to read a large value: index of the step → the largest such value.

    Values that an executable reads in a way that it does not tell are left out.
    """
    sizes = {slot: spec.size_bytes for slot, (spec, _) in enumerate(bound.inputs)}
    for step in bound.steps:
        sizes |= {slot: spec.size_bytes for slot, spec in zip(step.results, step.specs, strict=True)}
    found: dict[int, LastRead] = {}
    for index, step in enumerate(bound.steps):
        large = [slot for slot in {*step.args} & {*step.frees} if sizes.get(slot, 0) >= LEAST_BYTES]
        reads = [read for slot in large if (read := _read_of(step, slot)) is not None]
        if reads:
            found[index] = max(reads, key=lambda read: sizes[read.slot])
    return found


def _read_of(step: BoundStep, slot: int) -> LastRead | None:
    """How a step reads a value for the last time; None where its executable does not tell. A value may be several arguments."""
    readers = step.executable.last_readers
    if readers is None:
        return LastRead(slot)
    kernels = [readers.get(index) for index, arg in enumerate(step.args) if arg == slot]
    told = [kernel for kernel in kernels if kernel is not None]
    return LastRead(slot, max(told)) if len(told) == len(kernels) else None


class LastReads:
    """Observes the launches that a stream captures, and marks the last reads in the finished graph.

    Args:
        reads: as `last_reads` gives them.
        stream: captures the launches.
    """

    def __init__(self, reads: Mapping[int, LastRead], stream: torch.cuda.Stream) -> None:
        self._reads, self._stream = reads, stream
        self._nodes: list[int] = []
        self._windows: dict[int, tuple[int, int]] = {}

    def after(self, index: int, slots: Sequence[torch.Tensor | None]) -> None:
        """Remember how many nodes the graph has now, and where a value lies that was read for the last time."""
        graph = _captured_graph(self._stream)
        self._nodes.append(0 if graph is None else len(_nodes_of(graph)))
        value = slots[self._reads[index].slot] if index in self._reads else None
        if value is not None:
            self._windows[index] = value.data_ptr(), value.numel() * value.element_size()

    def end(self) -> None:
        """Nothing is left to do."""

    def mark(self, graph: torch.cuda.CUDAGraph) -> int:
        """Give a finished graph, which was made with `keep_graph`, its windows; returns how many kernels got one.

        A step of several kernels gets none if its executable does not tell which of them reads the value last.
        """
        cuda = driver()
        nodes = _nodes_of(cuda.CUgraph(int(graph.raw_cuda_graph())))
        most = _largest_window(self._stream.device)
        marked = 0
        for index, (address, size_bytes) in self._windows.items() if most else ():
            first = self._nodes[index - 1] if index else 0
            kernels = [node for node in nodes[first : self._nodes[index]] if _is_kernel(node)]
            kernel = self._reads[index].kernel
            if (kernel is None and len(kernels) == 1) or (kernel is not None and len(kernels) >= -kernel):
                marked += _set_window(kernels[-1 if kernel is None else kernel], address, min(size_bytes, most))
        return marked


def _captured_graph(stream: torch.cuda.Stream) -> Any | None:
    """The graph to which a stream's launches are added; None if the capture has become invalid, which its end will say."""
    cuda = driver()
    found = cuda.cuStreamGetCaptureInfo(cuda.CUstream(stream.cuda_stream))
    return next(
        (value for value in found if isinstance(value, cuda.CUgraph)), None
    )  # its place differs between versions


def _nodes_of(graph: Any) -> list[Any]:
    """A graph's nodes in the order in which they were added."""
    cuda = driver()
    count = int(cuda.cuGraphGetNodes(graph, 0)[2])
    return [*cuda.cuGraphGetNodes(graph, count)[1]][:count] if count else []


def _is_kernel(node: Any) -> bool:
    cuda = driver()
    return cuda.cuGraphNodeGetType(node)[1] == cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL


def _largest_window(device: torch.device) -> int:
    """Bytes; 0 where GPUs have no such windows (compute capability below 8.0)."""
    cuda = driver()
    attribute = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE
    error, number = cuda.cuDeviceGet(device.index or 0)
    if int(error):
        return 0
    error, most = cuda.cuDeviceGetAttribute(attribute, number)
    return 0 if int(error) else int(most)


def _set_window(node: Any, address: int, size_bytes: int) -> bool:
    """Mark a kernel's reads of a range as streaming. A driver that refuses loses time, and no result."""
    cuda = driver()
    streaming = cuda.CUaccessProperty.CU_ACCESS_PROPERTY_STREAMING
    window = cuda.CUaccessPolicyWindow()
    window.base_ptr, window.num_bytes = address, size_bytes
    window.hitRatio, window.hitProp, window.missProp = 1.0, streaming, streaming
    value = cuda.CUkernelNodeAttrValue()
    value.accessPolicyWindow = window
    identifier = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
    return int(cuda.cuGraphKernelNodeSetAttribute(node, identifier, value)[0]) == 0
