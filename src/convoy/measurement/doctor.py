"""What is installed and found on this machine, as data for `convoy doctor`."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import torch

from convoy.measurement.detect import detect_target, installed

PACKAGES = (
    ("torch", "everything"),
    ("torchvision", "models by name"),
    ("timm", "models as timm:NAME"),
    ("highspy", "the exact solver"),
    ("triton", "the triton engines and Inductor on GPUs"),
    ("nvidia-cudnn-frontend", "every cuDNN plan as an engine of its own"),
    ("platformdirs", "the usual place for the database"),
)
"""Distribution, and what it is needed for."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked for: what, what was found, what that means, and whether it is there."""

    what: str
    found: str
    means: str
    ok: bool


def findings() -> list[Finding]:
    """Look at devices, packages and compilers."""
    rows = [_device("cpu"), _device("cuda")]
    for package, purpose in PACKAGES:
        version = installed(package)
        rows.append(Finding(package, version or "not installed", f"needed for {purpose}", bool(version)))
    compiler = shutil.which("g++") or shutil.which("clang++") or ""
    rows.append(Finding("C++ compiler", compiler or "none", "needed for Inductor on CPUs", bool(compiler)))
    onednn = torch.backends.mkldnn.is_available()
    rows.append(Finding("oneDNN", "yes" if onednn else "no", "needed for the onednn engine", onednn))
    return rows


def _device(device: str) -> Finding:
    if device == "cuda" and not torch.cuda.is_available():
        return Finding("GPU", "none that torch can use", "engines for GPUs say no", False)
    target = detect_target(device)
    size = (
        f"{target.units} {'multiprocessors' if device == 'cuda' else 'threads'}, {target.memory_bytes / 2**30:.0f} GiB"
    )
    return Finding("GPU" if device == "cuda" else "CPU", f"{target.name} ({target.arch}), {size}", "tuned for", True)
