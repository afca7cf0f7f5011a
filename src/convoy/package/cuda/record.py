"""Captures a bound plan twice and makes of it a graph without addresses, with its kernels and constants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch

from convoy.capture import Captured
from convoy.engines.compilers.cuda_bindings import driver
from convoy.engines.compilers.loaded_kernels import loaded_kernels
from convoy.engines.gpu.library_calls import noting
from convoy.errors import InputError
from convoy.package.cuda.cuda_contents import CudaContents
from convoy.package.cuda.read_cuda_graph import checked, read_cuda_graph
from convoy.package.cuda.recorded_graph import Block, RecordedGraph
from convoy.package.cuda.relocation import CapturedLaunches, DeviceMemory, Relocation
from convoy.package.cuda.tensor_map import with_address
from convoy.package.program_file import PackedTensor
from convoy.problem import ANY_LAYOUT
from convoy.program import BoundPlan
from convoy.program.cuda.recording import distinct_stream, recording
from convoy.program.eager import EagerProgram, empty
from convoy.program.multi_stream import MultiStreamProgram

_WARMUP_CALLS: Final = 2
"""Runs before a capture: the first loads kernels, the second initialises nothing more."""


@dataclass(frozen=True, eq=False)
class _Capture:
    """One capture, with all that its addresses belong to."""

    launches: CapturedLaunches
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    keeps: tuple[Any, ...]


def record(captured: Captured, bound: BoundPlan, device: torch.device, contents: CudaContents) -> RecordedGraph:
    """A plan's launches as a graph of a package.

    Args:
        captured: the graph and how its arguments nest.
        bound: its plan, bound on `device`.
        device: a CUDA device.
        contents: gets the kernels and constants.

    Raises:
        InputError: the plan launches kernels of a library other than cuDNN.
        CompileError: the plan's launches are not the same each time.
    """
    first = _capture(bound, device)
    second = _capture(bound, device)  # while the first one holds its memory
    relocation = Relocation(
        first.launches, second.launches, lambda words, address: with_address(words, address, checked)
    )
    places = [
        relocation.place(a.data_ptr(), b.data_ptr())
        for a, b in zip((*first.inputs, *first.outputs), (*second.inputs, *second.outputs), strict=True)
    ]
    nodes = relocation.nodes(lambda raw: contents.kernel(raw.kernel.name, raw.kernel.cubin), contents.plan)
    graph, specs = captured.graph, [spec for spec, _ in bound.inputs]
    layouts = [layout for _, layout in bound.inputs]
    count = len(specs)
    outputs = [
        PackedTensor(name, graph.values[name].spec, _layout(name, tensor), count + at)
        for at, (name, tensor) in enumerate(zip(graph.outputs, first.outputs, strict=True))
    ]
    return RecordedGraph(
        inputs=tuple(
            PackedTensor(name, spec, layout, at)
            for at, (name, spec, layout) in enumerate(zip(graph.inputs, specs, layouts, strict=True))
        ),
        outputs=tuple(outputs),
        places=tuple(places),
        arguments=captured.arguments,
        results=captured.results,
        strides=captured.strides,
        blocks=tuple(_block(memory, contents) for memory in relocation.blocks),
        nodes=tuple(nodes),
        edges=first.launches.graph.edges,
    )


def _capture(bound: BoundPlan, device: torch.device) -> _Capture:
    """Capture a plan as `CudaGraphProgram` does, and read the graph instead of launching it."""
    several = any(step.step.stream for step in bound.steps)
    program = MultiStreamProgram(bound, device) if several else EagerProgram(bound, device)
    with torch.cuda.device(device), torch.no_grad():
        inputs = [empty(spec, layout, device).zero_() for spec, layout in bound.inputs]
        stream = distinct_stream(device, program.streams)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARMUP_CALLS):
                program(inputs)
        stream.synchronize()
        graph, pool = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.graph_pool_handle()
        with recording(graph, stream, pool), noting() as calls:
            outputs = program(inputs)
        torch.cuda.synchronize(device)
        read = read_cuda_graph(graph.raw_cuda_graph(), loaded_kernels(), calls)
        scratch = [tensor.data_ptr() for tensor in (*inputs, *_tensors(program.workspace()))]
        memory = tuple(_memory(device, tuple(pool), frozenset(scratch)))
    return _Capture(CapturedLaunches(read, memory), inputs, outputs, (program, graph, stream))


def _tensors(workspace: object) -> Iterator[torch.Tensor]:
    """Tensors of a program's scratch memory: none, one, or one a stream."""
    if isinstance(workspace, torch.Tensor):
        yield workspace
    elif isinstance(workspace, dict):
        for one in cast("dict[Any, Any]", workspace).values():
            yield from _tensors(one)


def _memory(device: torch.device, pool: tuple[int, ...], scratch: frozenset[int]) -> Iterator[DeviceMemory]:
    """PyTorch's allocations on a device: segments of the capture's pool, and every other block that is in use."""
    segments = cast("Any", torch.cuda.memory_snapshot)()
    for segment in cast("list[dict[str, Any]]", segments):
        if segment["device"] != device.index:
            continue
        if tuple(segment["segment_pool_id"]) == pool:
            yield DeviceMemory(segment["address"], segment["total_size"], keeps=False)
            continue
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                address = block["address"]
                yield DeviceMemory(address, block["requested_size"], keeps=address not in scratch)


def _block(memory: DeviceMemory, contents: CudaContents) -> Block:
    if not memory.keeps:
        return Block(memory.size_bytes)
    values = bytearray(memory.size_bytes)
    checked(driver().cuMemcpyDtoH(values, memory.address, memory.size_bytes))
    return Block(memory.size_bytes, contents.tensors.name(torch.frombuffer(values, dtype=torch.uint8)))


def _layout(name: str, tensor: torch.Tensor) -> str:
    """The memory format of an output."""
    if tensor.is_contiguous():
        return ANY_LAYOUT if tensor.dim() not in (4, 5) else {4: "nchw", 5: "ncdhw"}[tensor.dim()]
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return "nhwc"
    if tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
        return "ndhwc"
    todo = "Return a contiguous tensor: y.contiguous()."
    raise InputError("model", f"output {name} with strides {tensor.stride()}", "dense outputs", todo)
