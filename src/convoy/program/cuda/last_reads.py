"""Last reads of large values in a CUDA graph: the second-level cache evicts them first.

    x (29 MB)  -->  kernel  -->  y (29 MB)  -->  kernel
                    |
                    nobody reads x again, yet as the cache fills, x takes the space of y

A kernel node of a graph may have an access policy window (CUDA Programming Guide, "Device memory L2 access management"). Here it
lies over the largest value that the kernel is the last to read, and its reads count as streaming. Kernels and results stay as
they are. On an H100 one replay at batch 32 took 392 us instead of 409 (MobileNetV2) and 702 instead of 737 (EfficientNet-B0);
ResNet-50 took as long as before (fp16; docs/kernels/last-reads.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from convoy.engines.compilers.cuda_bindings import driver
from convoy.program.bound_plan import BoundPlan

LEAST_BYTES: Final = 16_000_000
"""Smaller values fit in the cache beside others: marking them too, from 0.5 MB on, changed no replay by more than 0.3 %."""


def last_reads(bound: BoundPlan) -> dict[int, int]:
    """The steps that are the last to read a large value: index of the step → slot of the largest such value.

    Steps whose executable reads an argument twice are left out.
    """
    sizes = {slot: spec.size_bytes for slot, (spec, _) in enumerate(bound.inputs)}
    for step in bound.steps:
        sizes |= {slot: spec.size_bytes for slot, spec in zip(step.results, step.specs, strict=True)}
    found: dict[int, int] = {}
    for index, step in enumerate(bound.steps):
        last = [slot for slot in {*step.args} & {*step.frees} if sizes.get(slot, 0) >= LEAST_BYTES]
        if last and not step.executable.reads_twice:
            found[index] = max(last, key=lambda slot: sizes[slot])
    return found


class LastReads:
    """Observes the launches that a stream captures, and marks the last reads in the finished graph.

    Args:
        slots: as `last_reads` gives them.
        stream: captures the launches.
    """

    def __init__(self, slots: dict[int, int], stream: torch.cuda.Stream) -> None:
        self._slots, self._stream = slots, stream
        self._nodes: list[int] = []
        self._windows: dict[int, tuple[int, int]] = {}

    def after(self, index: int, slots: Sequence[torch.Tensor | None]) -> None:
        """Remember how many nodes the graph has now, and where a value lies that was read for the last time."""
        graph = _captured_graph(self._stream)
        self._nodes.append(0 if graph is None else len(_nodes_of(graph)))
        value = slots[self._slots[index]] if index in self._slots else None
        if value is not None:
            self._windows[index] = value.data_ptr(), value.numel() * value.element_size()

    def end(self) -> None:
        """Nothing is left to do."""

    def mark(self, graph: torch.cuda.CUDAGraph) -> int:
        """Give a finished graph, which was made with `keep_graph`, its windows; returns how many kernels got one.

        A step of several kernels gets none: a later one may read what the first one read.
        """
        cuda = driver()
        nodes = _nodes_of(cuda.CUgraph(int(graph.raw_cuda_graph())))
        most = _largest_window(self._stream.device)
        marked = 0
        for index, (address, size_bytes) in self._windows.items() if most else ():
            first = self._nodes[index - 1] if index else 0
            kernels = [node for node in nodes[first : self._nodes[index]] if _is_kernel(node)]
            if len(kernels) == 1:
                marked += _set_window(kernels[0], address, min(size_bytes, most))
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
