"""Compiles CUDA C with NVRTC, loads the kernel and launches it, with clusters and programmatic dependent launch."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from convoy.engines.compilers.cuda_bindings import driver, nvrtc
from convoy.engines.compilers.device_binaries import cached
from convoy.engines.compilers.loaded_kernels import LoadedKernel, register
from convoy.engines.hopper.nvrtc_source import CudaSource
from convoy.errors import CompileError, LaunchError
from convoy.target import Target, usable_cores


class SpillError(CompileError):
    """The kernel spills registers; with fewer blocks per multiprocessor it would have more of them."""


@cache
def absence() -> str:
    """Why NVRTC and the driver cannot be used; empty if cuda-core and cuda-bindings are installed."""
    try:
        found = importlib.util.find_spec("cuda.core") and importlib.util.find_spec("cuda.bindings")
    except ModuleNotFoundError:
        found = None
    return "" if found else "needs cuda-core and cuda-bindings: pip install 'convoy-cnn[gpu]'"


def compile_cubin(
    engine: str, source: CudaSource, target: Target, options: Sequence[str] = (), *, most_spilled: int = 0
) -> tuple[bytes, str]:
    """Compile a source, or take it from the cache; returns the cubin and the assembler's log.

    Args:
        engine: the engine's id, for messages and files.
        source: CUDA C++ with its headers.
        target: the device.
        options: additional options for NVRTC.
        most_spilled: bytes that each of the kernels may spill.

    Raises:
        SpillError: the assembler spilled registers.
        CompileError: NVRTC is missing or refused the source, or the assembler serialised wgmma.
    """
    try:
        status, *version = nvrtc().nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # the bindings raise RuntimeError if they cannot find the library
        raise CompileError(engine, "NVRTC is not there", str(error)) from error
    arch = f"sm_{target.capability}a" if target.capability >= 90 else f"sm_{target.capability}"

    def make() -> bytes:
        with _compilers():
            cubin, log = compile_source(engine, source, arch, options)
        return len(log).to_bytes(4, "little") + log.encode() + cubin

    kept = cached(engine, (*source.key, arch, "nvrtc", str(status), *map(str, version), *options), make)
    length = int.from_bytes(kept[:4], "little")
    log = kept[4 : 4 + length].decode()
    if "C7510" in log or "C7515" in log or "serialized" in log:
        raise CompileError(engine, "ptxas serialised the wgmma instructions", log)
    if any(int(spilled) > most_spilled for spilled in re.findall(r"(\d+) bytes spill stores", log)):
        raise SpillError(engine, "the kernel spills registers", log)
    return kept[4 + length :], log


@cache
def _compilers() -> threading.Semaphore:
    """For as many compilers at one time as there are cores; more threads may wait for what these compile."""
    return threading.Semaphore(usable_cores())


def compile_source(engine: str, source: CudaSource, arch: str, more: Sequence[str]) -> tuple[bytes, str]:
    """Compile a source with NVRTC; returns the cubin or PTX, and the log.

    Args:
        engine: the engine's id, for messages.
        source: CUDA C++ with its headers.
        arch: `sm_90a` or similar for a cubin, `compute_90a` for PTX.
        more: additional options for NVRTC.

    Raises:
        CompileError: NVRTC refused the source.
    """
    compiler = nvrtc()
    names, texts = [name.encode() for name, _ in source.headers], [text.encode() for _, text in source.headers]
    error, program = compiler.nvrtcCreateProgram(source.text.encode(), source.name.encode(), len(names), texts, names)
    options = [b"--std=c++17", f"--gpu-architecture={arch}".encode(), b"--ptxas-options=-v", b"-w"]
    options += [option.encode() for option in more]
    (failed,) = compiler.nvrtcCompileProgram(program, len(options), options)
    log = _text(compiler.nvrtcGetProgramLogSize(program)[1], partial(compiler.nvrtcGetProgramLog, program))
    if int(error) or int(failed):
        raise CompileError(engine, "NVRTC refused the source", log)
    if arch.startswith("compute"):
        (_, size), read = compiler.nvrtcGetPTXSize(program), compiler.nvrtcGetPTX
    else:
        (_, size), read = compiler.nvrtcGetCUBINSize(program), compiler.nvrtcGetCUBIN
    # NVRTC writes into the buffer, so it must not be a bytes object: Python keeps one for each single byte and shares it.
    made = bytearray(size)
    read(program, made)
    compiler.nvrtcDestroyProgram(program)
    return bytes(made), log


def _text(size: int, read: Callable[[bytearray], object]) -> str:
    buffer = bytearray(size)
    read(buffer)
    return buffer.decode(errors="replace").rstrip("\0 ")


class Function:
    """A kernel, loaded on each device at its first launch there.

    Args:
        engine: the engine's id, for messages.
        cubin: from `compile_cubin`.
        name: of the kernel.
        shared_bytes: dynamic shared memory of a block.
    """

    def __init__(self, engine: str, cubin: bytes, name: str, shared_bytes: int) -> None:
        self.engine, self.cubin, self.name, self.shared_bytes = engine, cubin, name, shared_bytes
        self._lock = threading.Lock()
        self._loaded: dict[int, Any] = {}
        self._clusters: dict[tuple[int, int, int], int] = {}
        register(self)

    def loaded(self) -> list[LoadedKernel]:
        """The kernel on each device where it was loaded."""
        with self._lock:
            return [LoadedKernel(int(function), self.name, self.cubin) for function in self._loaded.values()]

    def load(self, device: int) -> Any:
        """The driver's function on a device; must be called before any capture the first time."""
        cuda = driver()
        with self._lock:
            if device not in self._loaded:
                torch.zeros((), device=f"cuda:{device}")  # creates torch's context and makes it current
                module = self._checked(cuda.cuModuleLoadData(self.cubin))
                function = self._checked(cuda.cuModuleGetFunction(module, self.name.encode()))
                shared = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._checked(cuda.cuFuncSetAttribute(function, shared, self.shared_bytes))
                self._loaded[device] = function
            return self._loaded[device]

    def clusters(self, device: int, threads: int, cluster: int) -> int:
        """Clusters that run at one time on a device, by the driver; a persistent kernel launches that many."""
        key = (device, threads, cluster)
        if key not in self._clusters:
            cuda, function = driver(), self.load(device)
            config = self._config(cluster, threads)
            config.attrs, config.numAttrs = [_cluster_dimension(cluster)], 1
            self._clusters[key] = max(1, int(self._checked(cuda.cuOccupancyMaxActiveClusters(function, config))))
        return self._clusters[key]

    def launch(
        self,
        device: int,
        grid: int,
        threads: int,
        arguments: Sequence[Any],
        *,
        cluster: int = 1,
        dependent: bool = False,
    ) -> None:
        """Launch on torch's current stream.

        Args:
            device: index.
            grid: number of blocks, a multiple of `cluster`.
            threads: of a block.
            arguments: ctypes values, structures and the driver's tensor maps, in the kernel's order.
            cluster: blocks of a cluster.
            dependent: launch with programmatic stream serialisation; the kernel itself waits before its first read.
        """
        cuda = driver()
        config = self._config(grid, threads)
        config.hStream = cuda.CUstream(torch.cuda.current_stream(device).cuda_stream)
        attributes: list[Any] = [_cluster_dimension(cluster)] if cluster > 1 else []
        if dependent:
            early = cuda.CUlaunchAttribute()
            early.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            attributes.append(early)
        config.attrs, config.numAttrs = attributes, len(attributes)
        addresses = [int(a.getPtr()) if hasattr(a, "getPtr") else ctypes.addressof(a) for a in arguments]
        pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self._checked(cuda.cuLaunchKernelEx(config, self.load(device), ctypes.addressof(pointers), 0))

    def _config(self, blocks: int, threads: int) -> Any:
        """A launch configuration of a one-dimensional grid."""
        config = driver().CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self.shared_bytes
        return config

    def _checked(self, answer: tuple[Any, ...]) -> Any:
        """The result of a driver call; raises LaunchError if it failed."""
        error, *rest = answer
        if int(error):
            raise LaunchError(f"{self.engine}: {error.name}")
        return rest[0] if rest else None


def _cluster_dimension(blocks: int) -> Any:
    """The launch attribute of clusters of `blocks` blocks."""
    cuda = driver()
    attribute = cuda.CUlaunchAttribute()
    attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    sizes = attribute.value.clusterDim
    sizes.x, sizes.y, sizes.z = blocks, 1, 1
    return attribute


def structure(name: str, values: Mapping[str, int]) -> ctypes.Structure:
    """A C structure of ints, with fields in the order of `values`."""
    kind = type(name, (ctypes.Structure,), {"_fields_": [(field, ctypes.c_int) for field in values]})
    return kind(*values.values())


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """A tensor's address; null for None."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
