"""The assembler's log decides whether a kernel is kept: logs planted in an NVRTC that need not be installed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from convoy.engines.compilers import host_compiler
from convoy.engines.hopper import nvrtc_kernel
from convoy.engines.hopper.nvrtc_source import CudaSource
from convoy.errors import CompileError
from convoy.target import Target

GPU = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
SOURCE = CudaSource("kernel.cu", "source")
CUBIN = b"\x7fELF a cubin"
QUIET = (
    "ptxas info    : Compiling entry function 'kernel' for 'sm_90a'\n"
    "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
)
C7510 = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma "
    "instructions defining accumulator registers of a wgmma between start and end of the pipeline stage in 'kernel'\n"
)
C7515 = C7510.replace("C7510", "C7515")
BARE = "ptxas info    : (C7510) in the function 'kernel'\n", "ptxas info    : (C7515) in the function 'kernel'\n"
UNNUMBERED = "ptxas warning : wgmma.mma_async instructions are serialized in the function 'kernel'\n"


def fill(buffer: bytearray, content: bytes) -> None:
    """Write into a buffer's memory, as the bindings do.

    They write into a bytes object too, which Python may share (it keeps one for each single byte). Here that is an error.
    """
    buffer[:] = content


class Nvrtc(ModuleType):
    """An NVRTC whose assembler says what it is told to.

    Attributes:
        compiled: how often it was asked to.
    """

    def __init__(self, log: str, failure: int = 0) -> None:
        super().__init__("cuda.bindings.nvrtc")
        self._log, self._failure = log.encode() + b"\0", failure
        self.compiled = 0

    def nvrtcVersion(self):
        return 0, 13, 0

    def nvrtcCreateProgram(self, *_):
        return 0, "program"

    def nvrtcCompileProgram(self, *_):
        self.compiled += 1
        return (self._failure,)

    def nvrtcGetProgramLogSize(self, _):
        return 0, len(self._log)

    def nvrtcGetProgramLog(self, _, buffer: bytes):
        fill(buffer, self._log)

    def nvrtcGetCUBINSize(self, _):
        return 0, len(CUBIN)

    def nvrtcGetCUBIN(self, _, buffer: bytes):
        fill(buffer, CUBIN)

    def nvrtcDestroyProgram(self, _):
        return (0,)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Puts such an NVRTC where the bindings are looked for, and an empty cache beside it."""

    def planted(log: str, failure: int = 0) -> Nvrtc:
        nvrtc = Nvrtc(log, failure)
        package, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
        bindings.nvrtc = nvrtc
        for module in (package, bindings, nvrtc):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        return nvrtc

    monkeypatch.setattr(host_compiler, "compiled_folder", lambda: tmp_path)
    return planted


@pytest.mark.parametrize("words", [C7510, C7515, *BARE, UNNUMBERED])
def test_serialised_products_are_refused_with_their_log_from_the_cache_too(plant, words: str):
    nvrtc = plant(words + QUIET)
    for _ in range(2):
        with pytest.raises(CompileError, match="serialised the wgmma instructions") as caught:
            nvrtc_kernel.compile_cubin("cuda.implicit_gemm", SOURCE, GPU)
        assert not isinstance(caught.value, nvrtc_kernel.SpillError)  # more registers would not help
        assert (caught.value.engine, caught.value.log) == ("cuda.implicit_gemm", words + QUIET)
    assert nvrtc.compiled == 1


@pytest.mark.parametrize("count", [4, 300])
def test_spills_are_refused_with_their_log_from_the_cache_too(plant, count: int):
    log = QUIET.replace("0 bytes spill stores", f"{count} bytes spill stores")
    nvrtc = plant(log)
    for _ in range(2):
        with pytest.raises(nvrtc_kernel.SpillError, match="spills registers") as caught:
            nvrtc_kernel.compile_cubin("cuda.implicit_gemm", SOURCE, GPU)
        assert caught.value.log == log
    assert nvrtc.compiled == 1


def test_an_engine_may_allow_a_few_bytes_of_spills(plant):
    plant(QUIET.replace("0 bytes spill stores", "24 bytes spill stores"))
    for most, refused in ((23, True), (24, False)):
        if refused:
            with pytest.raises(nvrtc_kernel.SpillError):
                nvrtc_kernel.compile_cubin("cuda.fusion", SOURCE, GPU, most_spilled=most)
        else:
            assert nvrtc_kernel.compile_cubin("cuda.fusion", SOURCE, GPU, most_spilled=most)[0]


def test_a_spill_in_any_of_several_functions_counts(plant):
    plant(QUIET + "\n" + QUIET.replace("0 bytes spill stores", "8 bytes spill stores"))
    with pytest.raises(nvrtc_kernel.SpillError):
        nvrtc_kernel.compile_cubin("cuda.implicit_gemm", SOURCE, GPU)


def test_a_quiet_log_is_given_with_the_cubin(plant):
    nvrtc = plant(QUIET)
    for _ in range(2):
        assert nvrtc_kernel.compile_cubin("cuda.implicit_gemm", SOURCE, GPU) == (CUBIN, QUIET)
    assert nvrtc.compiled == 1


def test_what_the_compiler_refuses_is_not_kept(plant):
    nvrtc = plant('kernel.cu(1): error: identifier "x" is undefined', failure=6)
    for count in (1, 2):
        with pytest.raises(CompileError, match="NVRTC refused") as caught:
            nvrtc_kernel.compile_cubin("cuda.implicit_gemm", SOURCE, GPU)
        assert "undefined" in caught.value.log
        assert nvrtc.compiled == count
