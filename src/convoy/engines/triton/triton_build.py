"""Compiles one Triton kernel before its launches, refuses slow builds, and launches it. Only this module uses Triton's API.

Kernels are compiled by `triton.compile` for a given target, not at their first call. A machine without a GPU can thus compile
for one, many kernels can be compiled in parallel processes, and a launch specialises nothing. Under Triton's interpreter
(TRITON_INTERPRET=1, for tests) the same calls run the kernel on CPU tensors instead.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

import torch

from convoy.engines.compilers.loaded_kernels import LoadedKernel, register
from convoy.engines.triton.triton_ahead import compile_launcher, launcher_ready, wait_until_prepared
from convoy.errors import CompileError, LaunchError
from convoy.support import Support
from convoy.target import Target

TORCH_DTYPE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter: decided by the environment, before triton is imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def installed() -> bool:
    """Whether triton can be imported; it is not imported to find out."""
    return importlib.util.find_spec("triton") is not None


def device_support(target: Target, capability: int) -> Support:
    """Whether Triton is there and the device is new enough."""
    if target.capability < capability:
        return Support.no(
            f"needs a CUDA device of capability {capability // 10}.{capability % 10} or newer, got {target.name}"
        )
    if not installed():
        return Support.no("triton is not installed: pip install convoy-cnn[gpu]")
    return Support.yes()


@dataclass(frozen=True)
class KernelBuild:
    """The inputs of one kernel's compilation.

    Attributes:
        engine: the engine's id, for messages.
        function: the `@triton.jit` function.
        signature: Triton type of every run-time argument, in order (`*fp16`, `i32`, `tensordesc<fp16[64, 64]>`); an argument
            that is None in this build has type `none`.
        constants: values of the constexpr arguments.
        divisible: run-time arguments that are multiples of 16 (pointers: 16-byte aligned).
        warps: warps of a thread block.
        stages: depth of the software pipeline.
        dependent: launch with programmatic stream serialisation (the kernel must wait before its first read).
        rounded: descriptors of fp32 tensors whose values the TMA unit rounds to TF32 as it copies them.
        tensor_cores: the kernel uses wgmma: refuse a build in which ptxas serialised it, or that spills registers.
    """

    engine: str
    function: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    divisible: Sequence[str] = ()
    warps: int = 4
    stages: int = 3
    dependent: bool = False
    rounded: Sequence[str] = ()
    tensor_cores: bool = True


class TritonKernel:
    """A compiled kernel: call it with a grid and the run-time arguments in the order of the build's signature."""

    def __init__(self, build: KernelBuild, target: Target) -> None:
        self.build = build
        self.compiled: Any = None if interpreting() else compile_kernel(build, target)
        self._launcher = None if self.compiled is None else compile_launcher(self.compiled)
        self._order = list(build.function.arg_names)
        register(self)

    def loaded(self) -> list[LoadedKernel]:
        """The kernel, once it was launched: Triton loads it then, on one device."""
        handle = getattr(self.compiled, "function", None)
        if handle is None:
            return []
        return [LoadedKernel(int(handle), str(self.compiled.metadata.name), bytes(self.compiled.asm["cubin"]))]

    def __call__(self, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        """Launch on torch's current stream."""
        given = iter(arguments)
        constants = self.build.constants
        values = [constants[name] if name in constants else next(given) for name in self._order]
        if self.compiled is None:
            self.build.function[grid](*values)
            return
        if self._launcher is not None:
            launcher_ready(self._launcher)
            self._launcher = None
        try:
            self.compiled[grid](*values)
        except RuntimeError as error:
            raise LaunchError(f"{self.build.engine}: {error}") from error

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one thread block."""
        return int(self.compiled.metadata.shared) if self.compiled is not None else 0


def compile_kernel(build: KernelBuild, target: Target) -> Any:
    """Compile for a target, or take it from Triton's cache; raises CompileError, also for a build known to be slow."""
    wait_until_prepared()
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    order = list(build.function.arg_names)
    constants = {(order.index(n),): v for n, v in build.constants.items()}
    constants |= {(order.index(n),): None for n, t in build.signature.items() if t == "none"}
    signature = {n: "constexpr" if build.signature.get(n, "none") == "none" else build.signature[n] for n in order}
    attributes = {(order.index(n),): [["tt.divisibility", 16]] for n in build.divisible if signature[n] != "constexpr"}
    source = ASTSource(build.function, signature, constants, attributes)
    options = {"num_warps": build.warps, "num_stages": build.stages, "launch_pdl": build.dependent}
    gpu = GPUTarget("cuda", target.capability, 32)
    try:
        with _listening() as said:
            compiled: Any = cast("Any", triton).compile(source, target=gpu, options=options)
    except (RuntimeError, triton.CompilationError, AssertionError, ValueError, IndexError) as error:
        raise CompileError(build.engine, "Triton could not compile the kernel", str(error)) from error
    if said:
        _keep_log(compiled, "\n".join(said))
    _refuse_slow(build, compiled, target)
    _round_descriptors(build, compiled)
    if compiled.metadata.shared > shared_limit(target):
        raise CompileError(build.engine, f"needs {compiled.metadata.shared} bytes of shared memory a block")
    return compiled


_ONE_LISTENER = threading.Lock()

_LOG = "ptxas.log"
"""Name of a kernel's log in Triton's cache, beside its binary."""


@contextmanager
def _listening() -> Generator[list[str]]:
    """Collect ptxas's output while Triton compiles: Triton can only print it.

    A name in Triton's module replaces `print` meanwhile, so that the standard output is not touched. Running ptxas once more
    for its log would take as long as the first run (0.15 s a kernel, 68 builds profiled on an H200's host).
    """
    from triton import knobs
    from triton.backends.nvidia import compiler

    said: list[str] = []
    with _ONE_LISTENER, knobs.nvidia.scope():
        knobs.nvidia.dump_ptxas_log = True
        compiler.print = said.append  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield said
        finally:
            del compiler.print  # pyright: ignore[reportAttributeAccessIssue]


def _keep_log(compiled: Any, log: str) -> None:
    _cache_of(compiled).put(log, _LOG, binary=False)


def _cache_of(compiled: Any) -> Any:
    """Triton's cache entry of a compiled kernel."""
    from triton.runtime import cache

    return cast("Any", cache).get_cache_manager(compiled.hash)


_TFLOAT32 = 11
"""CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 (CUDA Driver API, CUtensorMapDataType); Triton hands numbers above 10 on as they are."""


def _round_descriptors(build: KernelBuild, compiled: Any) -> None:
    """Have descriptors made as TF32 ones: the copy then rounds to nearest, where the tensor core would cut bits off.

    The same is done for fp32 operands by CUTLASS (sm90_mma_tma_gmma_ss, `ConvertF32toTF32A`). It costs nothing.
    """
    descriptors = [name for name, kind in build.signature.items() if kind.startswith("tensordesc")]
    described: Sequence[dict[str, Any]] = getattr(compiled.metadata, "tensordesc_meta", None) or []
    for name, description in zip(descriptors, described, strict=False):
        if name in build.rounded:
            description["elem_type"] = _TFLOAT32


_SPILL_BYTES = 256
"""Spilled bytes a thread that a kernel of plain loads may have: such a kernel is not bound by its registers."""

_SHARED_LIMIT = {80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448, 100: 232448, 103: 232448}
"""Bytes of shared memory that one block may have, by capability (CUDA C++ Programming Guide, technical specifications)."""


def shared_limit(target: Target) -> int:
    """Bytes of shared memory that one block may have."""
    return _SHARED_LIMIT.get(target.capability, 101376)


_ASYNCHRONOUS: Final = (90, 100, 103)
"""Capabilities whose tensor cores run beside the warp that started them (wgmma, tcgen05): there a spill stalls the pipeline."""


def _refuse_slow(build: KernelBuild, compiled: Any, target: Target) -> None:
    """Refuse spills and serialised wgmma: both are right and slow, and ptxas says so only in its log."""
    log = assembler_log(compiled)
    if build.tensor_cores and "C7515" in log:
        raise CompileError(build.engine, "ptxas serialised the wgmma instructions (C7515)", log)
    strict = build.tensor_cores and target.capability in _ASYNCHRONOUS
    spilled = re.search(r"(\d+) bytes spill stores", log)
    if spilled and int(spilled[1]) > (0 if strict else _SPILL_BYTES):
        raise CompileError(build.engine, f"the kernel spills {spilled[1]} bytes of registers", log)


def assembler_log(compiled: Any) -> str:
    """The output of `ptxas -v` for a compiled kernel; from Triton's cache if it was kept there, else ptxas runs again."""
    from triton import knobs

    kept = _cache_of(compiled).get_file(_LOG)
    if kept is not None:
        return Path(kept).read_text()
    ptx = compiled.asm["ptx"]
    arch = re.search(r"\.target (\w+)", ptx)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [knobs.nvidia.ptxas.path, "-v", "-lineinfo", f"--gpu-name={arch[1] if arch else 'sm_90a'}"]
        done = subprocess.run(  # noqa: S603 - the assembler that Triton itself runs
            [*command, str(path), "-o", os.devnull], capture_output=True, text=True, check=False, timeout=120
        )
    log = done.stdout + done.stderr
    if done.returncode == 0:
        _keep_log(compiled, log)
    return log
