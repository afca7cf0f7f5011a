"""Which instructions for products of bf16 this process may use: AMX's tiles, or VDPBF16PS of AVX-512."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from pathlib import Path
from typing import Final

from convoy.engines.compilers.host_compiler import compile_shared
from convoy.engines.compilers.instruction_sets import cpu_flags, kernel_levels
from convoy.engines.cpu.native_launch import PARALLEL_H
from convoy.errors import CompileError
from convoy.settings import max_cpu_isa_from_environment

TILE_OPS_H: Final = Path(__file__).with_name("tile_ops.h")
"""The instructions by name, or their emulation."""

UNITS: Final = ("amx", "avx512")
"""Numbered as in direct_bf16.c; the faster first."""

LEVELS: Final = {"amx": "amx", "avx512": "avx512_bf16"}
"""The level of `CONVOY_MAX_CPU_ISA` that each needs."""

CPU_FLAGS: Final = {"amx": ("amx_bf16", "amx_tile", "avx512_bf16"), "avx512": ("avx512_bf16",)}
"""Linux's names of the features that each needs beside AVX-512."""

_ARCH_PRCTL: Final = 158
_ARCH_REQ_XCOMP_PERM: Final = 0x1023
_XTILEDATA: Final = 18


def bf16_units() -> tuple[tuple[str, ...], str]:
    """The units of `UNITS` that this process may use, and why not the others; the reason is empty if it may use AMX."""
    return _units(max_cpu_isa_from_environment(os.environ))


@cache
def _units(limit: str) -> tuple[tuple[str, ...], str]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return (), f"needs an x86 CPU with AMX or AVX-512 BF16, got {platform.machine()}"
    allowed, has = kernel_levels(cpu_flags(), limit), kernel_levels(cpu_flags(), "")
    if LEVELS["avx512"] not in allowed:
        limited = f", which CONVOY_MAX_CPU_ISA={limit} rules out" if LEVELS["avx512"] in has else ""
        return (), f"needs a CPU with AMX or AVX-512 BF16{limited or ', which this one lacks'}"
    if refusal := _compiler_refusal():
        return (), refusal
    if LEVELS["amx"] not in allowed:
        return ("avx512",), "AMX is not there, or CONVOY_MAX_CPU_ISA rules it out"
    refusal = amx_refusal()
    return (("avx512",) if refusal else UNITS), refusal


@cache
def amx_refusal() -> str:
    """Asks Linux for AMX's registers for this process (ARCH_REQ_XCOMP_PERM); why it refuses, or empty. Asked once a process."""
    if platform.system() != "Linux":
        return f"AMX needs Linux, got {platform.system()}"
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    if library.syscall(ctypes.c_long(_ARCH_PRCTL), ctypes.c_long(_ARCH_REQ_XCOMP_PERM), ctypes.c_long(_XTILEDATA)) == 0:
        return ""
    return f"Linux refuses this process AMX's registers (arch_prctl: {os.strerror(ctypes.get_errno())})"


def _compiler_refusal() -> str:
    """Whether the C compiler lacks these instructions (gcc before 11, clang before 12), in words; empty if it has them."""
    text = "".join(part.read_text(encoding="utf-8") for part in (PARALLEL_H, TILE_OPS_H))
    text += (
        "FOR_AMX void convoy_probe(float *y) { TILES_BEGIN(); TILE_DP(0, 1, 2); TILE_STORE(0, y, 64); TILES_END(); }\n"
        "FOR_AVX512 void convoy_probe2(float *y, const bf16 *x) { sums_stored(y, pairs_added(no_sums(), x, x)); }\n"
        "int64_t convoy_probe3(void) { return amx_permitted(); }\n"
    )
    try:
        compile_shared(text, ("-std=gnu11", "-O1", "-march=native"), "bf16-probe")
    except CompileError as error:
        return f"needs a C compiler with AMX and AVX-512 BF16: {' '.join(error.log.split())[:100] or error.summary}"
    return ""
