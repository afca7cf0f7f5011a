"""Describes the device and its software: the `Target` of rows and plans. It runs nothing on the device and compiles nothing."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final

import torch

from convoy.engines.compilers.instruction_sets import limits
from convoy.engines.torch_flags import precision_owners
from convoy.errors import InputError, unknown_name
from convoy.problem.spec import FLOAT_DTYPES
from convoy.target import Target
from convoy.typed_torch import gpu_properties

DEVICES: Final = ("cpu", "cuda")
"""Devices that Convoy supports."""

_BF16_CAPABILITY: Final = 80
"""First compute capability with bf16 tensor cores and bf16 arithmetic (CUDA C++ Programming Guide, table of arithmetic
instructions); below it torch emulates bf16 at a fraction of fp32's speed."""

_CPU_ARCHES: Final = (("AVX512", "avx512"), ("AVX2", "avx2"), ("SVE", "neon"), ("NEON", "neon"))
"""torch's names for the instruction set of its CPU kernels, with Convoy's names; the first matching prefix counts."""


def detect_target(device: str) -> Target:
    """Describe a device of this machine with the software that makes or holds its kernels.

    torch's precision settings, if they are not the default, are among the versions: they change the meaning of "as torch", so
    rows measured under one setting do not hold for another. The same is true of limits on a CPU's instruction set.

    Args:
        device: `cpu` or `cuda` (torch's current CUDA device).

    Raises:
        InputError: another word, or CUDA if torch finds none.
    """
    if device not in DEVICES:
        raise unknown_name("device", device, DEVICES)
    return _cuda_target() if device == "cuda" else _cpu_target()


def check_dtype(target: Target, dtype: str) -> None:
    """Refuse a dtype that the device does not support.

    Args:
        target: the device.
        dtype: Convoy's name of a floating-point dtype.

    Raises:
        InputError: not a floating-point dtype, or one that the device can only emulate.
    """
    if dtype not in FLOAT_DTYPES:
        raise InputError("dtype", dtype, "one of " + ", ".join(sorted(FLOAT_DTYPES)))
    if target.device == "cuda" and dtype == "bf16" and target.capability < _BF16_CAPABILITY:
        raise InputError("dtype", dtype, f"a dtype that {target.name} ({target.arch}) has", "Use fp16 or fp32.")


def cuda_absence() -> str:
    """Why CUDA cannot be used here, as a phrase; empty if it can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no usable NVIDIA GPU or driver"
    return ""


def installed(distribution: str) -> str:
    """Version of an installed distribution; empty if it is not installed. Imports nothing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def precision_flags(device: str) -> dict[str, str]:
    """Torch's precision settings that are not the default, by name; empty for the defaults.

    If old and new settings are mixed, torch refuses to answer: the result is then `mixed`, with the new settings.
    """
    owners = precision_owners()
    convolutions, products = (
        owners[name].fp32_precision
        for name in (("cudnn.conv", "cuda.matmul") if device == "cuda" else ("mkldnn.conv", "mkldnn.matmul"))
    )
    try:
        found = {"fp32_matmul": torch.get_float32_matmul_precision()}
        if device == "cuda":
            found["cudnn_tf32"] = "on" if torch.backends.cudnn.allow_tf32 else "off"
        elif convolutions not in ("none", "ieee"):
            found["onednn_conv"] = convolutions
    except RuntimeError:
        return {"fp32_precision": f"mixed (convolutions {convolutions}, products {products})"}
    defaults = {"fp32_matmul": "highest", "cudnn_tf32": "on"}
    return {name: value for name, value in found.items() if value != defaults.get(name)}


# --- CPU ----------------------------------------------------------------------------------------------------------------


def _cpu_target() -> Target:
    return Target(
        device="cpu",
        name=_cpu_name(),
        arch=_cpu_arch(torch.backends.cpu.get_cpu_capability()),
        units=torch.get_num_threads(),
        memory_bytes=_machine_memory_bytes(),
        cache_bytes=_last_level_cache_bytes(Path("/sys/devices/system/cpu/cpu0/cache")),
        versions=_known(
            torch=str(torch.__version__),
            **_linked_libraries(torch.__config__.show()),
            cxx=compiler_version(),
            **precision_flags("cpu"),
            **limits(),
        ),
    )


def _known(**versions: str | None) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, version) for name, version in versions.items() if version))


@cache
def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text(errors="replace") if info.is_file() else ""
    return cpu_name(text) or platform.processor() or platform.machine() or "unknown CPU"


def cpu_name(cpuinfo: str) -> str:
    """The processor's name from the text of /proc/cpuinfo; empty where it has none.

    Hypervisors cut names short ("AMD EPYC"): family and model are added to a name without a number, for two generations
    must not share rows.
    """
    fields = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", cpuinfo.partition("\n\n")[0], re.MULTILINE))
    name = " ".join(fields.get("model name", "").split())
    if name and not re.search(r"\d", name) and "model" in fields:
        return f"{name} (family {fields.get('cpu family', '?')} model {fields['model']})"
    return name


def _cpu_arch(capability: str) -> str:
    return next((ours for theirs, ours in _CPU_ARCHES if capability.upper().startswith(theirs)), "generic")


def _machine_memory_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


def _last_level_cache_bytes(directory: Path) -> int:
    """Size of the highest cache level that Linux describes in `directory`; 0 if it describes none."""
    levels: dict[int, int] = {}
    for index in directory.glob("index*"):
        try:
            level = int((index / "level").read_text())
            size = re.fullmatch(r"(\d+)K\s*", (index / "size").read_text())
        except (OSError, ValueError):
            continue
        if size:
            levels[level] = max(levels.get(level, 0), int(size[1]) << 10)
    return levels[max(levels)] if levels else 0


def _linked_libraries(show: str) -> dict[str, str]:
    """Versions of oneDNN and MKL from the text of `torch.__config__.show()`."""
    found = {"onednn": r"MKL-DNN v?([\d.]+)", "mkl": r"Math Kernel Library Version ([\d.]+)"}
    matches = {name: re.search(pattern, show) for name, pattern in found.items()}
    return {name: match[1] for name, match in matches.items() if match}


@cache
def compiler_version() -> str:
    """The host C++ compiler that Inductor would use, with its version (`g++ 13.3.0`); empty if there is none."""
    for name in ("g++", "clang++", "c++"):
        path = shutil.which(name)
        if path is None:
            continue
        try:
            answer = subprocess.run(  # noqa: S603  (a compiler found on the PATH, fixed arguments)
                [path, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            continue
        return f"{name} {answer.stdout.split()[0]}" if answer.stdout.split() else name
    return ""


# --- CUDA ---------------------------------------------------------------------------------------------------------------


def _cuda_target() -> Target:
    absence = cuda_absence()
    if absence:
        todo = "Use the device cpu, or install a CUDA build of torch and NVIDIA's driver."
        raise InputError("device", "cuda", f"a CUDA device, but {absence}", todo)
    properties = gpu_properties(torch.cuda.current_device())
    return Target(
        device="cuda",
        name=properties.name,
        arch=f"sm_{properties.major}{properties.minor}",
        units=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        cache_bytes=int(getattr(properties, "L2_cache_size", 0)),
        versions=_known(
            torch=str(torch.__version__),
            cuda=torch.version.cuda,
            cudnn=_dotted(torch.backends.cudnn.version()),
            driver=_driver_version(),
            triton=installed("triton"),
            cudnn_frontend=installed("nvidia-cudnn-frontend"),
            cuda_core=installed("cuda-core"),
            **precision_flags("cuda"),
        ),
    )


def _dotted(version: int | None) -> str:
    """CuDNN's number as people write it: 91900 is 9.19.0 (8907, of the time before 9, is 8.9.7)."""
    if version is None:
        return ""
    major = 10000 if version >= 90000 else 1000
    return f"{version // major}.{version % major // 100}.{version % 100}"


@cache
def _driver_version() -> str:
    """Version of NVIDIA's driver, from the kernel module, or from nvidia-smi if that cannot be read."""
    module = Path("/proc/driver/nvidia/version")
    if module.is_file():
        match = re.search(r"Kernel Module\D*?([\d.]+)\s", module.read_text(errors="replace"))
        if match:
            return match[1]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        answer = subprocess.run(  # noqa: S603  (NVIDIA's own tool, fixed arguments)
            [tool, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return (answer.stdout.split() or [""])[0]
