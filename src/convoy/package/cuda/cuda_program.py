"""PackagedCudaProgram: builds a recorded graph on a device and launches it. It needs the CUDA driver, no compiler."""

from __future__ import annotations

import ctypes
import struct
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from convoy.engines.compilers.cuda_bindings import driver
from convoy.engines.torch_operators import DTYPES
from convoy.errors import PackageError
from convoy.package.cuda.cudnn_backend import CudnnPlans
from convoy.package.cuda.read_cuda_graph import PROGRAMMATIC
from convoy.package.cuda.recorded_graph import (
    Argument,
    CudnnRun,
    DevicePlace,
    KernelLaunch,
    MemoryCopy,
    MemoryFill,
    Node,
    RecordedGraph,
)
from convoy.package.cuda.tensor_map import with_address
from convoy.package.program_file import PackedTensor

_PROGRAMMATIC_PORT: Final = 1
"""CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC (CUDA Driver API): the edge leaves when all thread blocks have triggered or ended."""

_FORMATS: Final = {"nhwc": torch.channels_last, "ndhwc": torch.channels_last_3d}
"""Layouts of 4-D and 5-D tensors that are not contiguous."""

_PORTABLE_CLUSTER: Final = 8
"""Thread blocks of a cluster that every device of capability 9.0 or newer has (CUDA C++ Programming Guide)."""


class KernelFunctions:
    """The kernels of a package, loaded on one device.

    Args:
        kernels: (name, cubin) of each.
        path: the package, for errors.

    Raises:
        PackageError: the driver refuses a binary.
    """

    def __init__(self, kernels: Sequence[tuple[str, bytes]], path: str) -> None:
        self._path = path
        cuda = driver()
        modules: dict[bytes, Any] = {}
        self._functions: list[Any] = []
        for name, cubin in kernels:
            if cubin not in modules:
                modules[cubin] = self.checked(cuda.cuModuleLoadData(cubin), name)
            self._functions.append(self.checked(cuda.cuModuleGetFunction(modules[cubin], name.encode()), name))
        _at_end_of(self, _unload, list(modules.values()))

    def checked(self, answer: tuple[Any, ...], what: str) -> Any:
        """The result of a driver's call; raises PackageError if it failed."""
        error, *rest = answer
        if int(error):
            todo = "Update the driver, or export the package again on this machine."
            raise PackageError("package", self._path, f"code that this driver takes, but {what}: {error.name}", todo)
        return rest[0] if rest else None

    def of(self, launch: KernelLaunch) -> Any:
        """The function of a launch, with its attributes set."""
        cuda, function = driver(), self._functions[launch.kernel]
        kinds = cuda.CUfunction_attribute
        shared = kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        if self.checked(cuda.cuFuncGetAttribute(shared, function), "shared memory") < launch.shared_bytes:
            self.checked(cuda.cuFuncSetAttribute(function, shared, launch.shared_bytes), "shared memory")
        x, y, z = launch.cluster
        if x * y * z > _PORTABLE_CLUSTER:
            large = kinds.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            self.checked(cuda.cuFuncSetAttribute(function, large, 1), "clusters")
        return function


class PackagedCudaProgram:
    """A recorded graph, built on a device.

    Calls may come from several threads and streams: a lock orders them on the host, an event on the device.

    Args:
        graph: the graph.
        functions: the package's kernels.
        constants: values of constant blocks by name, on the CPU. Blocks of one name share memory.
        known: device memory of constants by name, shared among the package's programs; gets those that are new.
        device: where it runs.
        plans: cuDNN's plans; None for a graph without them.

    Raises:
        PackageError: the driver or cuDNN refuses the graph.
        torch.OutOfMemoryError: it does not fit in the GPU's memory.
    """

    def __init__(
        self,
        graph: RecordedGraph,
        functions: KernelFunctions,
        constants: Mapping[str, torch.Tensor],
        known: dict[str, torch.Tensor],
        device: torch.device,
        plans: CudnnPlans | None = None,
    ) -> None:
        self.device, self._functions, self._plans = device, functions, plans
        self._lock = threading.Lock()
        self._blocks: list[torch.Tensor] = []
        for block in graph.blocks:
            if block.constant and block.constant not in known:
                known[block.constant] = constants[block.constant].reshape(-1).view(torch.uint8).to(device, copy=True)
            new = known.get(block.constant)
            self._blocks.append(torch.empty(block.size_bytes, dtype=torch.uint8, device=device) if new is None else new)
        self._inputs = [self._tensor(one, graph.places) for one in graph.inputs]
        self._outputs = [self._tensor(one, graph.places) for one in graph.outputs]
        self._exec = self._built(graph)
        self._done = torch.cuda.Event() if device.type == "cuda" else None
        _at_end_of(self, _destroy, self._exec, self._done)

    @property
    def resident_bytes(self) -> int:
        """Device memory of the program, shared constants included."""
        return sum(block.numel() for block in self._blocks)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run on inputs of the graph's specs, on the caller's current stream; returns new outputs in order."""
        with self._lock:
            if self._done is None:
                return self._run(inputs, 0)
            with torch.cuda.device(self.device):
                stream = torch.cuda.current_stream(self.device)
                stream.wait_event(self._done)
                outputs = self._run(inputs, stream.cuda_stream)
                self._done.record(stream)
                return outputs

    def replay(self) -> None:
        """Launch the graph on the present static inputs, without copies: for timing."""
        self._launch(torch.cuda.current_stream(self.device).cuda_stream)

    def _run(self, inputs: Sequence[torch.Tensor], stream: int) -> list[torch.Tensor]:
        for static, tensor in zip(self._inputs, inputs, strict=True):
            static.copy_(tensor, non_blocking=True)
        self._launch(stream)
        return [tensor.clone(memory_format=torch.preserve_format) for tensor in self._outputs]

    def _launch(self, stream: int) -> None:
        self._functions.checked(driver().cuGraphLaunch(self._exec, driver().CUstream(stream)), "the launch")

    def _tensor(self, one: PackedTensor, places: Sequence[DevicePlace]) -> torch.Tensor:
        """An input or output as a view of its block."""
        place = places[one.slot]
        raw = self._blocks[place.block][place.offset : place.offset + one.spec.size_bytes]
        strides = torch.empty(
            one.spec.shape, device="meta", memory_format=_FORMATS.get(one.layout, torch.contiguous_format)
        ).stride()
        return raw.view(DTYPES[one.spec.dtype]).as_strided(one.spec.shape, strides)

    def _address(self, place: DevicePlace) -> int:
        return self._blocks[place.block].data_ptr() + place.offset

    # --- the graph --------------------------------------------------------------------------------------------------------

    def _built(self, recorded: RecordedGraph) -> Any:
        """The executable graph."""
        cuda, checked = driver(), self._functions.checked
        graph = checked(cuda.cuGraphCreate(0), "the graph")
        try:
            context = checked(cuda.cuCtxGetCurrent(), "the context")
            nodes = [self._node(graph, node, context) for node in recorded.nodes]
            for edge in recorded.edges:
                # One at a time: the driver gave edges of one call the kind of the first (580.159, measured on an H100).
                kind = [_edge_data(programmatic=edge.programmatic)]
                between = [nodes[edge.before]], [nodes[edge.after]]
                checked(cuda.cuGraphAddDependencies(graph, *between, kind, 1), "the graph's edges")
            return checked(cuda.cuGraphInstantiate(graph, 0), "the graph")
        finally:
            cuda.cuGraphDestroy(graph)

    def _node(self, graph: Any, node: Node, context: Any) -> Any:
        cuda, checked = driver(), self._functions.checked
        if isinstance(node, KernelLaunch):
            return self._kernel(graph, node)
        if isinstance(node, MemoryCopy):
            copy = cuda.CUDA_MEMCPY3D()
            copy.srcMemoryType = copy.dstMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE
            copy.srcDevice, copy.dstDevice = self._address(node.source), self._address(node.target)
            copy.WidthInBytes, copy.Height, copy.Depth = node.size_bytes, 1, 1
            return checked(cuda.cuGraphAddMemcpyNode(graph, None, 0, copy, context), "a copy")
        if isinstance(node, MemoryFill):
            fill = cuda.CUDA_MEMSET_NODE_PARAMS()
            fill.dst, fill.value, fill.elementSize = self._address(node.target), node.value, node.element_bytes
            fill.width, fill.height, fill.pitch = node.count, 1, node.count * node.element_bytes
            return checked(cuda.cuGraphAddMemsetNode(graph, None, 0, fill, context), "a fill")
        if isinstance(node, CudnnRun):
            return self._cudnn_run(graph, node)
        return checked(cuda.cuGraphAddEmptyNode(graph, None, 0), "a join")

    def _cudnn_run(self, graph: Any, run: CudnnRun) -> Any:
        assert self._plans is not None
        cuda, checked = driver(), self._functions.checked
        operands = [(uid, self._address(place)) for uid, place in run.operands]
        workspace = 0 if run.workspace is None else self._address(run.workspace)
        child = self._plans.graph(run.plan, operands, workspace, checked)
        try:
            return checked(cuda.cuGraphAddChildGraphNode(graph, None, 0, child), "a run of cuDNN")
        finally:
            cuda.cuGraphDestroy(child)

    def _kernel(self, graph: Any, launch: KernelLaunch) -> Any:
        cuda, checked = driver(), self._functions.checked
        params = cuda.CUDA_KERNEL_NODE_PARAMS()
        params.func = self._functions.of(launch)
        params.gridDimX, params.gridDimY, params.gridDimZ = launch.grid
        params.blockDimX, params.blockDimY, params.blockDimZ = launch.block
        params.sharedMemBytes = launch.shared_bytes
        kept = [_aligned(self._bytes(one)) for one in launch.arguments]
        pointers = (ctypes.c_void_p * max(1, len(kept)))(*(address for _, address in kept))
        params.kernelParams = ctypes.addressof(pointers)
        node = checked(cuda.cuGraphAddKernelNode(graph, None, 0, params), "a kernel")
        if launch.cluster != (1, 1, 1):
            value = cuda.CUkernelNodeAttrValue()
            value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = launch.cluster
            kind = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            checked(cuda.cuGraphKernelNodeSetAttribute(node, kind, value), "clusters")
        return node

    def _bytes(self, argument: Argument) -> bytes:
        """An argument with the addresses that its places have here."""
        if argument.tensor_map:
            address = self._address(argument.addresses[0][1])
            return with_address(argument.data, address, lambda answer: self._functions.checked(answer, "a tensor map"))
        found = bytearray(argument.data)
        for at, place in argument.addresses:
            struct.pack_into("<Q", found, at, self._address(place))
        return bytes(found)


def _at_end_of(owner: object, free: Callable[..., None], *given: Any) -> None:
    """Have `free` called when nobody holds the object any more; at the exit the driver itself frees everything."""
    weakref.finalize(owner, free, *given).atexit = False


def _unload(modules: Sequence[Any]) -> None:
    for module in modules:
        driver().cuModuleUnload(module)


def _destroy(executable: Any, done: torch.cuda.Event | None) -> None:
    """Destroy an executable graph once its last run has ended: its memory is freed next."""
    if done is not None:
        done.synchronize()
    driver().cuGraphExecDestroy(executable)


def _aligned(data: bytes) -> tuple[object, int]:
    """A copy of bytes at a multiple of 64, as tensor maps want it: what holds it, and its address."""
    buffer = ctypes.create_string_buffer(len(data) + 64)
    address = -(-ctypes.addressof(buffer) // 64) * 64
    ctypes.memmove(address, data, len(data))
    return buffer, address


def _edge_data(*, programmatic: bool) -> Any:
    data = driver().CUgraphEdgeData()
    if programmatic:
        data.from_port, data.type = _PROGRAMMATIC_PORT, PROGRAMMATIC
    return data
