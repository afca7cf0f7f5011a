"""CUDA C to a loaded kernel, and its launch: NVRTC, the driver, clusters and dependent launch. The only module that does this."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from convoy.engines.compilers.device_binaries import cached
from convoy.engines.hopper.nvrtc_source import CudaSource
from convoy.errors import CompileError, LaunchError
from convoy.target import Target


class SpillError(CompileError):
    """The assembler had too few registers: fewer blocks a multiprocessor would leave it more."""


@cache
def absence() -> str:
    """Why NVRTC and the driver cannot be used, as a phrase; empty where they seem to be there."""
    try:
        found = importlib.util.find_spec("cuda.core") and importlib.util.find_spec("cuda.bindings")
    except ModuleNotFoundError:
        found = None
    return "" if found else "needs cuda-core and cuda-bindings: pip install 'convoy-cnn[gpu]'"


def compile_cubin(engine: str, source: CudaSource, target: Target, options: Sequence[str] = ()) -> tuple[bytes, str]:
    """A cubin and the assembler's log, from the cache or from NVRTC.

    Args:
        engine: the engine's id, for messages and files.
        source: CUDA C++ with its headers.
        target: the device.
        options: more options of NVRTC's.

    Raises:
        SpillError: the assembler spilled registers.
        CompileError: NVRTC is missing or refused the source, or the assembler serialised wgmma.
    """
    try:
        from cuda.bindings import nvrtc

        error, *version = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # the bindings say RuntimeError where the library cannot be found
        raise CompileError(engine, "NVRTC is not there", str(error)) from error
    arch = f"sm_{target.capability}a" if target.capability >= 90 else f"sm_{target.capability}"

    def make() -> bytes:
        cubin, log = compile_source(engine, source, arch, options)
        return len(log).to_bytes(4, "little") + log.encode() + cubin

    kept = cached(engine, (*source.key, arch, "nvrtc", str(error), *map(str, version), *options), make)
    length = int.from_bytes(kept[:4], "little")
    log = kept[4 : 4 + length].decode()
    if "C7510" in log or "C7515" in log or "serialized" in log:
        raise CompileError(engine, "ptxas serialised the wgmma instructions", log)
    if any(int(spilled) for spilled in re.findall(r"(\d+) bytes spill stores", log)):
        raise SpillError(engine, "the kernel spills registers", log)
    return kept[4 + length :], log


def compile_source(engine: str, source: CudaSource, arch: str, more: Sequence[str]) -> tuple[bytes, str]:
    """What NVRTC makes of a source, and its log.

    Args:
        engine: the engine's id, for messages.
        source: CUDA C++ with its headers.
        arch: `sm_90a` and the like for a cubin, `compute_90a` for PTX.
        more: options of NVRTC.

    Raises:
        CompileError: NVRTC refused the source.
    """
    from cuda.bindings import nvrtc

    names, texts = [name.encode() for name, _ in source.headers], [text.encode() for _, text in source.headers]
    error, program = nvrtc.nvrtcCreateProgram(source.text.encode(), source.name.encode(), len(names), texts, names)
    options = [b"--std=c++17", f"--gpu-architecture={arch}".encode(), b"--ptxas-options=-v", b"-w"]
    options += [option.encode() for option in more]
    (failed,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = _text(nvrtc.nvrtcGetProgramLogSize(program), lambda buffer: nvrtc.nvrtcGetProgramLog(program, buffer))
    if int(error) or int(failed):
        raise CompileError(engine, "NVRTC refused the source", log)
    if arch.startswith("compute"):
        (_, size), read = nvrtc.nvrtcGetPTXSize(program), nvrtc.nvrtcGetPTX
    else:
        (_, size), read = nvrtc.nvrtcGetCUBINSize(program), nvrtc.nvrtcGetCUBIN
    # NVRTC writes into the buffer, so it must not be a bytes object: Python keeps one for each single byte and shares it.
    made = bytearray(size)
    read(program, made)
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(made), log


def _text(size: tuple[Any, int], read: Any) -> str:
    buffer = bytearray(size[1])
    read(buffer)
    return buffer.decode(errors="replace").rstrip("\0 ")


class Function:
    """A kernel, loaded on each device at its first launch there.

    Args:
        engine: the engine's id, for messages.
        cubin: from `compile_cubin`.
        name: the kernel's.
        shared_bytes: dynamic shared memory of a block.
    """

    def __init__(self, engine: str, cubin: bytes, name: str, shared_bytes: int) -> None:
        self.engine, self.cubin, self.name, self.shared_bytes = engine, cubin, name, shared_bytes
        self._lock = threading.Lock()
        self._loaded: dict[int, Any] = {}
        self._clusters: dict[tuple[int, int, int], int] = {}

    def load(self, device: int) -> Any:
        """The driver's function; loaded once, outside of any capture."""
        from cuda.bindings import driver

        with self._lock:
            if device not in self._loaded:
                torch.zeros((), device=f"cuda:{device}")  # torch's context exists and is current
                module = self._checked(driver.cuModuleLoadData(self.cubin))
                function = self._checked(driver.cuModuleGetFunction(module, self.name.encode()))
                shared = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._checked(driver.cuFuncSetAttribute(function, shared, self.shared_bytes))
                self._loaded[device] = function
            return self._loaded[device]

    def clusters(self, device: int, threads: int, cluster: int) -> int:
        """How many clusters run at one time on a device: what a persistent kernel launches. Asked of the driver once."""
        from cuda.bindings import driver

        key = (device, threads, cluster)
        if key not in self._clusters:
            function = self.load(device)
            config = driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = cluster, 1, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
            config.sharedMemBytes = self.shared_bytes
            sizes = driver.CUlaunchAttribute()
            sizes.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            sizes.value.clusterDim.x, sizes.value.clusterDim.y, sizes.value.clusterDim.z = cluster, 1, 1
            config.attrs, config.numAttrs = [sizes], 1
            self._clusters[key] = max(1, int(self._checked(driver.cuOccupancyMaxActiveClusters(function, config))))
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
            grid: blocks, a multiple of `cluster`.
            threads: of a block.
            arguments: ctypes values, structures and the driver's tensor maps, in the kernel's order.
            cluster: blocks of a cluster.
            dependent: with programmatic stream serialisation; the kernel waits before its first read.
        """
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self.shared_bytes
        config.hStream = driver.CUstream(torch.cuda.current_stream(device).cuda_stream)
        attributes = []
        if cluster > 1:
            sizes = driver.CUlaunchAttribute()
            sizes.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            sizes.value.clusterDim.x, sizes.value.clusterDim.y, sizes.value.clusterDim.z = cluster, 1, 1
            attributes.append(sizes)
        if dependent:
            early = driver.CUlaunchAttribute()
            early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            attributes.append(early)
        config.attrs, config.numAttrs = attributes, len(attributes)
        addresses = [int(a.getPtr()) if hasattr(a, "getPtr") else ctypes.addressof(a) for a in arguments]
        pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self._checked(driver.cuLaunchKernelEx(config, self.load(device), ctypes.addressof(pointers), 0))

    def _checked(self, answer: tuple[Any, ...]) -> Any:
        """What a driver call gives; raises LaunchError where it failed."""
        error, *rest = answer
        if int(error):
            raise LaunchError(f"{self.engine}: {error.name}")
        return rest[0] if rest else None


def structure(name: str, values: Mapping[str, int]) -> ctypes.Structure:
    """A C structure of ints."""
    kind = type(name, (ctypes.Structure,), {"_fields_": [(field, ctypes.c_int) for field in values]})
    return kind(*values.values())


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """A tensor's address; null for none."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
