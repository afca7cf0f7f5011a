"""What machine is this: the target, what its dtypes are, and its peaks for the roofline."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from convoy.errors import InputError
from convoy.problem import Problem
from convoy.target import Target


def detect_target(device: str) -> Target:
    """The target that this process would measure on.

    Raises:
        InputError: `cuda` where there is no usable GPU, or another word.
    """
    if device == "cpu":
        return _cpu(torch.get_num_threads())
    if device != "cuda":
        raise InputError("device", device, "cpu or cuda")
    if not torch.cuda.is_available():
        raise InputError(
            "device", "cuda", "an NVIDIA GPU that torch can use", "Use --device cpu; `convoy doctor` says more."
        )
    return _cuda(torch.cuda.current_device())


def installed(package: str) -> str:
    """Version of a distribution; empty where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@lru_cache(maxsize=8)
def _cpu(threads: int) -> Target:
    info = _cpuinfo()
    flags = set(info.get("flags", info.get("Features", "")).split())
    levels = (("avx512", "avx512f"), ("avx2", "avx2"), ("neon", "asimd"))
    arch = next((name for name, flag in levels if flag in flags), "generic")
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    versions = {"torch": str(torch.__version__), "onednn": _onednn_version()}
    return Target(
        device="cpu",
        name=info.get("model name", platform.processor() or platform.machine()),
        arch=arch,
        units=threads,
        memory_bytes=pages,
        cache_bytes=_last_level_cache(),
        versions=tuple(sorted((k, v) for k, v in versions.items() if v)),
    )


def _cuda(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    versions = {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "cudnn": str(torch.backends.cudnn.version() or ""),
        "triton": installed("triton"),
        "cudnn-frontend": installed("nvidia-cudnn-frontend"),
    }
    return Target(
        device="cuda",
        name=properties.name,
        arch=f"sm_{properties.major}{properties.minor}",
        units=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        cache_bytes=int(getattr(properties, "L2_cache_size", 0)),
        versions=tuple(sorted((k, v) for k, v in versions.items() if v)),
    )


def _cpuinfo() -> dict[str, str]:
    """The first processor's entries of /proc/cpuinfo; empty on systems without it."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _last_level_cache() -> int:
    sizes = [
        path.read_text(encoding="ascii").strip()
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    scale = {"K": 1 << 10, "M": 1 << 20, "": 1}
    return max((int(size.rstrip("KM")) * scale[size.lstrip("0123456789")] for size in sizes), default=0)


def _onednn_version() -> str:
    found = re.search(r"(?:MKL-DNN|oneDNN) v([\d.]+)", torch.__config__.show())
    return found[1] if found else ""


def check_dtype(target: Target, dtype: str) -> None:
    """Refuse a dtype that the device lacks; raises InputError."""
    if dtype not in ("fp32", "fp16", "bf16", "fp64"):
        raise InputError("dtype", dtype, "fp32, fp16 or bf16")
    if target.device == "cuda" and dtype == "bf16" and target.capability < 80:
        raise InputError("dtype", dtype, f"a dtype that {target.name} computes in", "Use fp16.")


@dataclass(frozen=True, slots=True)
class Peaks:
    """Measured ceilings of a device: bytes a second of a large copy (read + written), FLOP a second of a large product."""

    bytes_per_s: float
    flops: dict[str, float]


@lru_cache(maxsize=4)
def peaks(target: Target) -> Peaks:
    """Measure the ceilings once in a process (under a second)."""
    device = target.device
    elements = 1 << (26 if device == "cuda" else 23)
    source = torch.ones(elements, device=device)
    into = torch.empty_like(source)
    copied = 2 * 4 * elements / _best_s(lambda: into.copy_(source), device)
    flops: dict[str, float] = {}
    size = 4096 if device == "cuda" else 768
    for name, dtype in (("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
        if device == "cpu" and name != "fp32":
            continue
        a = torch.randn(size, size, device=device).to(dtype)
        flops[name] = 2 * size**3 / _best_s(lambda a=a: a @ a, device)
    if device == "cuda":
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        a = torch.randn(size, size, device=device)
        flops["tf32"] = 2 * size**3 / _best_s(lambda: a @ a, device)
        torch.backends.cuda.matmul.allow_tf32 = before
    return Peaks(copied, flops)


def _best_s(run, device: str, times: int = 7) -> float:
    best = float("inf")
    for _ in range(times):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def floor_us(problem: Problem, ceilings: Peaks, dtype: str = "fp32") -> float:
    """The time below which no kernel can compute a problem here: the larger of bytes and operations over their peaks."""
    rate = ceilings.flops.get(dtype, ceilings.flops["fp32"])
    return max(problem.bytes_min / ceilings.bytes_per_s, problem.flops / rate) * 1e6
