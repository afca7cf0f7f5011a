"""pruned.cuda: convolutions on pruned weights by CUDA code made for their mask, compiled by NVRTC.

    y = activation(conv(x, weight) + bias + residual)    -->    one FFMA a non-zero weight and pixel, values from constant memory

As `pruned.c`: zeros of the mask are not read, values may change under one mask, a value where the mask has none is refused.
Building needs no GPU; binaries are kept in the user's cache. What is known of it is in docs/engines/pruned.md.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from convoy.engines.activations import finish
from convoy.engines.base import Buffers, Engine, Executable, Knobs, Packed
from convoy.engines.binaries import cached
from convoy.engines.pruned.emit_cuda import ACTIVATIONS, ELEMENT, MOST_VALUES, Module, emit
from convoy.engines.pruned.ir import verify
from convoy.engines.pruned.layout import Layout, lay_out
from convoy.engines.pruned.requirements import masked_convolution
from convoy.engines.pruned.values import check_zeros
from convoy.engines.pruned.walk import Cut, partition, positions, used_channels, used_taps, walk
from convoy.errors import CompileError, LaunchError
from convoy.problem import ConvProblem, Problem
from convoy.support import Support
from convoy.target import Target

LEAST_CAPABILITY: Final = 80
"""cp.async."""

MOST_NONZEROS: Final = 120_000
"""NVRTC 13 takes about a millisecond a non-zero, in as many threads as there are parts of `PART_VALUES`."""

SPACE_NONZEROS: Final = 240_000
"""Non-zeros that all settings of a space write code for: what is tried costs at most twice the largest code's building. On an
H100's host, 16 cores, 3.7 thousand non-zeros take 4 to 6 s in one part."""

CODE_BYTES: Final = 8 << 10
"""A barrier every 8 KB keeps a block's warps together in the instruction cache (NVIDIA, "reducing instruction cache misses")."""

SHARED_BYTES: Final = 96 << 10
"""Two buffers of a block: two blocks fit a multiprocessor of 227 KB."""

_INDEX_LIMIT: Final = 2**31


@cache
def absence() -> str:
    """Why NVRTC cannot be used, as a phrase; empty where it seems to be there."""
    try:
        found = importlib.util.find_spec("cuda.core") and importlib.util.find_spec("cuda.bindings")
    except ModuleNotFoundError:
        found = None
    return "" if found else "needs cuda-core and cuda-bindings: pip install 'convoy-cnn[gpu]'"


def compile_module(source: str, arch: str) -> bytes:
    """A cubin of one module, from the cache or from NVRTC.

    Raises:
        CompileError: NVRTC is missing, or refused the source.
    """
    try:
        from cuda.bindings import nvrtc
        from cuda.core import Program, ProgramOptions

        error, *version = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # the bindings say RuntimeError where the library cannot be found
        raise CompileError(PrunedCuda.id, "NVRTC is not there", str(error)) from error

    def make() -> bytes:
        try:
            return bytes(Program(source, "c++", ProgramOptions(arch=arch)).compile("cubin").code)
        except Exception as error:  # cuda-core raises its own and RuntimeErrors, with NVRTC's log inside
            raise CompileError(PrunedCuda.id, "NVRTC refused the source", str(error)) from error

    return cached(PrunedCuda.id, (source, arch, "nvrtc", str(error), *map(str, version)), make)


def template(problem: ConvProblem, mask: NDArray[np.bool_], knobs: Knobs) -> Layout:
    """One block that holds the whole batch."""
    tile = knobs.integer("lanes") * knobs.integer("vectors")
    channels = used_channels(mask, problem.groups)
    return lay_out(problem, used_taps(mask), channels, tile=tile, images=problem.n, rows=problem.p)


def cut_of(layout: Layout, knobs: Knobs, size: int) -> Cut:
    """How code is cut: so many channels that two pieces' planes fit shared memory."""
    most = SHARED_BYTES // (2 * size * layout.span * max(len(layout.phases), 1))
    return Cut(knobs.integer("filters"), max(1, min(knobs.integer("channels"), most)), CODE_BYTES, staged=True)


class PrunedConvolution(Executable):
    """One problem's cubins; loaded on the current device when weights are packed."""

    def __init__(self, problem: ConvProblem, knobs: Knobs, target: Target) -> None:
        assert problem.mask is not None
        mask = positions(problem.mask)
        layout = template(problem, mask, knobs)
        kernel, places = walk(mask, layout, knobs.integer("lanes"), cut_of(layout, knobs, ELEMENT[problem.x_dtype][1]))
        verify(kernel, problem.k)
        epilogue = problem.epilogue
        fused = epilogue.activation if epilogue.activation in ACTIVATIONS else "none"
        source = emit(kernel, layout, bias=epilogue.bias, residual=epilogue.residual, activation=fused)
        self._following = "none" if fused == epilogue.activation else epilogue.activation
        self._epilogue = epilogue
        self._places, self._mask = torch.from_numpy(places), torch.from_numpy(mask)
        self._modules = (source.pad, *source.parts)
        self.workspace_bytes = source.workspace_bytes
        arch = f"sm_{target.capability}a" if target.capability >= 90 else f"sm_{target.capability}"
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            self._cubins = list(pool.map(lambda module: compile_module(module.source, arch), self._modules))
        self._lock = threading.Lock()
        self._functions: dict[int, list[Any]] = {}

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Each part's values as bytes of its parameter, then the bias in fp32."""
        weight = constants[0].detach()
        check_zeros(weight, self._mask)
        self._load(weight.device.index or 0)
        values = weight.contiguous().view(-1)[self._places.to(weight.device)].float().cpu().numpy()
        held = [values[slice(*module.values)].tobytes() for module in self._modules[1:]]
        return held, *(constant.detach().float().contiguous() for constant in constants[1:])

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Pad, then every part, on the current stream."""
        held, *bias = buffers.constants
        x, y, epilogue = buffers.args[0], buffers.results[0], self._epilogue
        assert y is not None
        planes = 0 if workspace is None else workspace.data_ptr()
        functions = self._functions[x.device.index or 0]
        stream = torch.cuda.current_stream(x.device).cuda_stream
        if workspace is not None:
            _launch(functions[0], self._modules[0], stream, (x.data_ptr(), planes))
        pointers = (
            planes,
            bias[0].data_ptr() if epilogue.bias else 0,
            buffers.args[1].data_ptr() if epilogue.residual else 0,
            y.data_ptr(),
        )
        for function, module, values in zip(functions[1:], self._modules[1:], held, strict=True):
            _launch(function, module, stream, pointers, values)
        if self._following != "none":
            finish(y, None, None, self._following)

    def _load(self, device: int) -> None:
        """Load the cubins in torch's context of a device, once."""
        from cuda.bindings import driver

        with self._lock:
            if device in self._functions:
                return
            torch.zeros((), device=f"cuda:{device}")  # torch's context exists and is current
            functions: list[Any] = []
            shared = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            for module, cubin in zip(self._modules, self._cubins, strict=True):
                loaded = _checked(driver.cuModuleLoadData(cubin))
                function = _checked(driver.cuModuleGetFunction(loaded, module.name.encode()))
                _checked(driver.cuFuncSetAttribute(function, shared, module.shared_bytes))
                functions.append(function)
            self._functions[device] = functions


def _launch(function: Any, module: Module, stream: int, pointers: Sequence[int], values: bytes = b"") -> None:
    """One kernel: pointers, then the values where it has some."""
    from cuda.bindings import driver

    words = (ctypes.c_uint64 * len(pointers))(*pointers)
    addresses = [ctypes.addressof(words) + 8 * index for index in range(len(pointers))]
    held = ctypes.create_string_buffer(values, len(values)) if values else None
    if held is not None:
        addresses.append(ctypes.addressof(held))
    arguments = (ctypes.c_void_p * len(addresses))(*addresses)
    sizes = (*module.grid, 1, module.threads, 1, 1, module.shared_bytes)
    _checked(driver.cuLaunchKernel(function, *sizes, stream, ctypes.addressof(arguments), 0))


def _checked(answer: tuple[Any, ...]) -> Any:
    """What a driver call gives; raises LaunchError where it failed."""
    error, *rest = answer
    if int(error):
        raise LaunchError(f"{PrunedCuda.id}: {error.name}")
    return rest[0] if rest else None


class PrunedCuda(Engine):
    """Specialised CUDA C for forward convolutions in fp32 and fp16, nchw."""

    id = "pruned.cuda"
    family = "direct"
    trusted = False
    reads_mask = True

    def supports(self, problem: Problem, target: Target) -> Support:
        """Forward convolutions in nchw whose mask is there and not too large."""
        if target.capability < LEAST_CAPABILITY:
            return Support.no(f"needs a CUDA device of capability 8.0 or newer, got {target.name}")
        if not (support := masked_convolution(problem)):
            return support
        assert isinstance(problem, ConvProblem)
        assert problem.mask is not None
        if problem.x_dtype not in ELEMENT:
            return Support.no(f"needs fp32 or fp16, got {problem.x_dtype}")
        if problem.layout != "nchw":
            return Support.no(f"needs layout nchw, got {problem.layout}")
        largest = max(s.elements for s in (problem.x_spec, problem.weight_spec, problem.y_spec))
        if 2 * largest >= _INDEX_LIMIT:
            return Support.no(f"indexes tensors of fewer than 2^30 elements, got {largest}")
        if problem.mask.nonzeros > MOST_NONZEROS:
            return Support.no(f"writes code for at most {MOST_NONZEROS} non-zero weights, got {problem.mask.nonzeros}")
        if absence():
            return Support.no(absence())
        if not self.space(problem, target):
            return Support.no(f"needs groups of 8 filters with at most {MOST_VALUES} non-zero weights")
        return Support.yes()

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Threads of a block (`lanes`), pixels of a thread (`vectors`), `filters` of a group, `channels` of a piece.

        Many pixels let blocks be large; few want small ones and small groups, so that there is work for every multiprocessor.
        The more code a setting writes, the fewer are tried.
        """
        assert isinstance(problem, ConvProblem)
        assert problem.mask is not None
        mask = positions(problem.mask)
        sizes = {filters: _most_values(mask, filters) for filters in (8, 16, 32)}
        pixels = problem.n * problem.p * problem.q
        found: dict[Knobs, float] = {}
        for filters, values in sizes.items():
            for lanes, vectors in ((64, 1), (128, 1), (128, 2), (256, 1), (256, 2)):
                if values > MOST_VALUES or filters * vectors > 64:
                    continue
                knobs = Knobs.of(filters=min(filters, problem.k), lanes=lanes, vectors=vectors, channels=16)
                blocks = -(-pixels // (lanes * vectors)) * -(-problem.k // filters)
                # The more sums a thread has, the fewer loads; but first every multiprocessor wants two blocks.
                found.setdefault(knobs, min(blocks / (2 * target.units), 1) * (filters * vectors) ** 0.5)
        most = max(2, SPACE_NONZEROS // max(problem.mask.nonzeros, 1))
        return sorted(found, key=lambda knobs: -found[knobs])[:most]

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """The padded input."""
        assert isinstance(problem, ConvProblem)
        assert problem.mask is not None
        layout = template(problem, positions(problem.mask), knobs)
        return -(-ELEMENT[problem.x_dtype][1] * layout.planes * layout.plane // 256) * 256

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Write the code and compile it; no GPU is needed."""
        assert isinstance(problem, ConvProblem)
        return PrunedConvolution(problem, knobs, target)


def _most_values(mask: NDArray[np.bool_], filters: int) -> int:
    counts = mask.sum(axis=(1, 2, 3))
    return max((int(counts[group].sum()) for group in partition(mask, filters)), default=0)


ENGINE = PrunedCuda()
