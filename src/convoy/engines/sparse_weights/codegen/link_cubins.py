"""Several units of CUDA C to one cubin: NVRTC in one thread per core, then nvJitLink."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, cast

from convoy.engines.compilers.device_binaries import cached
from convoy.engines.hopper.nvrtc_kernel import compile_cubin
from convoy.engines.hopper.nvrtc_source import CudaSource
from convoy.errors import CompileError
from convoy.target import Target, usable_cores


def _bindings(name: str) -> Any:
    """A module of cuda-bindings, which has no types."""
    return importlib.import_module(f"cuda.bindings.{name}")


@cache
def unlinked() -> str:
    """Why units cannot be linked; empty if they can."""
    try:
        if importlib.util.find_spec("cuda.bindings") is None:
            return "needs cuda-bindings"
        linker: tuple[int, ...] = _bindings("nvjitlink").version()
        _, *compiler = cast("tuple[int, ...]", _bindings("nvrtc").nvrtcVersion())
    except (
        ImportError,
        RuntimeError,
    ) as error:  # cuda-pathfinder's error where the library is missing is a RuntimeError
        return f"needs nvJitLink: {str(error).splitlines()[0]}"
    if tuple(linker) < tuple(compiler):
        return f"needs an nvJitLink as new as NVRTC {'.'.join(map(str, compiler))}, got {'.'.join(map(str, linker))}"
    return ""


def compile_units(engine: str, head: str, bodies: Sequence[str], target: Target, options: Sequence[str]) -> bytes:
    """A cubin of some units that call one another's functions.

    Args:
        engine: the engine's id, for messages and files.
        head: CUDA C at the beginning of every unit.
        bodies: the rest of each unit. A single unit is linked too, if linking is possible: ptxas then gives its functions all
            the registers that `options` allow, and moves loads 20 instructions ahead of their use; for a whole kernel it used
            40 registers, and moved loads 4 ahead (seen in sm_90 code). Without a linker all bodies are one unit.
        target: the device.
        options: options for NVRTC.

    Raises:
        CompileError: NVRTC is missing, or it or nvJitLink refused the code.
    """
    if unlinked():
        return compile_cubin(engine, _source(head + "".join(bodies)), target, options)[0]
    units = [head + body for body in bodies]
    options = (*options, "--relocatable-device-code=true")

    def compiled(unit: str) -> bytes:
        return compile_cubin(engine, _source(unit), target, options)[0]

    with ThreadPoolExecutor(usable_cores()) as pool:
        cubins = list(pool.map(compiled, units))
    arch = f"sm_{target.capability}a" if target.capability >= 90 else f"sm_{target.capability}"
    version = ".".join(map(str, _bindings("nvjitlink").version()))
    return cached(engine, (*units, *options, arch, "nvjitlink", version), lambda: _link(engine, cubins, arch))


def _source(text: str) -> CudaSource:
    return CudaSource("pruned.cu", text)


def _link(engine: str, cubins: Sequence[bytes], arch: str) -> bytes:
    nvjitlink = _bindings("nvjitlink")
    handle = nvjitlink.create(1, [f"-arch={arch}"])
    try:
        for at, cubin in enumerate(cubins):
            nvjitlink.add_data(handle, nvjitlink.InputType.CUBIN, cubin, len(cubin), f"unit_{at}")
        nvjitlink.complete(handle)
        linked = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, linked)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(handle))
        nvjitlink.get_error_log(handle, log)
        raise CompileError(engine, "nvJitLink refused the units", log.decode(errors="replace").rstrip("\0")) from error
    finally:
        nvjitlink.destroy(handle)
    return bytes(linked)
