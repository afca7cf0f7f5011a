"""Which instruction sets oneDNN and Convoy's C kernels use on this CPU: the CPU's own, within the limits that the user set.

oneDNN compiles its kernels at run time for the newest instruction set of the CPU, up to `ONEDNN_MAX_CPU_ISA`. It reads that
variable once, at its first use; so does this module. Convoy's C kernels are compiled for this CPU, up to
`CONVOY_MAX_CPU_ISA`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Set as AbstractSet
from functools import cache
from pathlib import Path
from typing import Final

import torch

from convoy.settings import max_cpu_isa_from_environment, onednn_max_cpu_isa_from_environment

_AVX512: Final = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
_AMX: Final = frozenset({"amx_tile", "amx_int8", "amx_bf16"})

ONEDNN_LEVELS: Final[tuple[tuple[str, frozenset[str]], ...]] = (
    ("sse41", frozenset({"sse4_1"})),
    ("avx", frozenset({"avx"})),
    ("avx2", frozenset({"avx2"})),
    ("avx2_vnni", frozenset({"avx2", "avx_vnni"})),
    ("avx2_vnni_2", frozenset({"avx2", "avx_vnni", "avx_vnni_int8", "avx_ne_convert"})),
    ("avx512_core", _AVX512),
    ("avx512_core_vnni", _AVX512 | {"avx512_vnni"}),
    ("avx512_core_bf16", _AVX512 | {"avx512_vnni", "avx512_bf16"}),
    ("avx512_core_fp16", _AVX512 | {"avx512_vnni", "avx512_bf16", "avx512_fp16"}),
    ("avx512_core_amx", _AVX512 | {"avx512_vnni", "avx512_bf16"} | _AMX),
    ("avx512_core_amx_fp16", _AVX512 | {"avx512_vnni", "avx512_bf16", "amx_fp16"} | _AMX),
)
"""oneDNN's instruction sets, older first (its page "CPU Dispatcher Control"), and the flags of /proc/cpuinfo that each needs.
A limit allows its own level and the older ones."""

_ONEDNN_SYNONYMS: Final = {
    "avx10_1_512": "avx512_core_fp16",
    "avx10_1_512_amx": "avx512_core_amx",
    "avx10_1_512_amx_fp16": "avx512_core_amx_fp16",
}

KERNEL_LEVELS: Final[tuple[tuple[str, frozenset[str], int, str], ...]] = (
    ("sse4", frozenset({"sse4_2"}), 4, "-march=nehalem"),
    ("avx2", frozenset({"avx2", "fma", "bmi2", "f16c"}), 8, "-march=haswell"),
    ("avx512", _AVX512 | {"avx512cd"}, 16, "-march=skylake-avx512"),
    ("avx512_bf16", _AVX512 | {"avx512cd", "avx512_vnni", "avx512_bf16"}, 16, "-march=cooperlake"),
    ("amx", _AVX512 | {"avx512cd", "avx512_vnni", "avx512_bf16"} | _AMX, 16, "-march=sapphirerapids"),
)
"""Levels of `CONVOY_MAX_CPU_ISA`, older first: name, flags of /proc/cpuinfo that it needs, floats of a vector register, and the
compiler's flag."""


@cache
def cpu_flags() -> frozenset[str]:
    """The processor's feature flags in Linux's names; where there is no /proc/cpuinfo, those of AMX that torch knows of."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        return ONEDNN_LEVELS[-2][1] if has_amx() else frozenset()
    line = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    return frozenset(line.partition(":")[2].split())


def onednn_levels(flags: AbstractSet[str], limit: str) -> tuple[str, ...]:
    """The instruction sets that oneDNN may use, older first.

    Args:
        flags: the CPU's, in Linux's names.
        limit: the value of `ONEDNN_MAX_CPU_ISA`, in lower case. Like oneDNN, this takes an unknown word for no limit.
    """
    names = [name for name, _ in ONEDNN_LEVELS]
    limit = _ONEDNN_SYNONYMS.get(limit, limit)
    most = names.index(limit) if limit in names else len(names) - 1
    return tuple(name for name, needed in ONEDNN_LEVELS[: most + 1] if needed <= flags)


@cache
def onednn_in_force() -> tuple[str, ...]:
    """The instruction sets that oneDNN may use in this process, older first; read once, as oneDNN does."""
    return onednn_levels(cpu_flags(), onednn_max_cpu_isa_from_environment(os.environ))


def kernel_levels(flags: AbstractSet[str], limit: str) -> tuple[str, ...]:
    """The levels that our C kernels may be compiled for on an x86 CPU, older first; `limit` as in `CONVOY_MAX_CPU_ISA`."""
    names = [name for name, *_ in KERNEL_LEVELS]
    most = names.index(limit) if limit else len(names) - 1
    return tuple(name for name, needed, *_ in KERNEL_LEVELS[: most + 1] if needed <= flags)


@cache
def vector_limit() -> tuple[int, str] | None:
    """Floats of a register and the compiler's flag at the limit that the user set; None where it takes nothing away."""
    limit = max_cpu_isa_from_environment(os.environ)
    if not limit or platform.machine() not in ("x86_64", "AMD64"):
        return None
    allowed, every = kernel_levels(cpu_flags(), limit), kernel_levels(cpu_flags(), "")
    if not allowed or allowed == every:
        return None
    return next((lanes, march) for name, _, lanes, march in KERNEL_LEVELS if name == allowed[-1])


def march() -> str:
    """The compiler's flag for our C kernels: this processor, or the level that `CONVOY_MAX_CPU_ISA` names."""
    limited = vector_limit()
    return limited[1] if limited else "-march=native"


def vector_floats() -> int:
    """Floats of a vector register that our C kernels use: torch's choice, which `ATEN_CPU_CAPABILITY` limits, within ours."""
    chosen = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 4)
    limited = vector_limit()
    return min(chosen, limited[0]) if limited else chosen


def limits() -> dict[str, str]:
    """The limits that the user set, where they take something away, for a target's versions.

    Rows that were measured under one limit do not serve another.
    """
    found: dict[str, str] = {}
    if limited := vector_limit():
        found["max_cpu_isa"] = limited[1].removeprefix("-march=")
    in_force = onednn_in_force()
    if in_force and in_force != onednn_levels(cpu_flags(), ""):
        found["onednn_max_cpu_isa"] = in_force[-1]
    return found
