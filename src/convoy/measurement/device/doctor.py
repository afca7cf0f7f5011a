"""The devices, packages, compilers and engines of this machine, and what is missing: plain data for `convoy doctor`."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from convoy.engines.compilers.instruction_sets import onednn_in_force
from convoy.engines.known_defects import KnownDefect, defects_here
from convoy.measurement.device.detect import compiler_version, cuda_absence, detect_target, installed
from convoy.measurement.device.engine_availability import engine_availability, summary
from convoy.target import Target

PACKAGES: Final = (
    ("torch", "everything"),
    ("torchvision", "models by name"),
    ("timm", "models as timm:NAME"),
    ("highspy", "the exact solver"),
    ("triton", "the triton engines, and Inductor on GPUs"),
    ("nvidia-cudnn-frontend", "every cuDNN plan as a candidate of its own"),
    ("platformdirs", "the usual place for the database"),
)
"""Distribution, and what it is needed for."""

_GPU_PACKAGES: Final = frozenset({"triton", "nvidia-cudnn-frontend"})
"""Needed with a GPU alone."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked for.

    Attributes:
        what: its name.
        found: the result, in a few words.
        means: what it is needed for, or the consequence of its absence.
        ok: whether nothing is missing.
    """

    what: str
    found: str
    means: str
    ok: bool


def findings() -> list[Finding]:
    """Look at devices, packages and compilers. Measures nothing and builds nothing."""
    targets = [detect_target("cpu")]
    absence = cuda_absence()
    if not absence:
        targets.append(detect_target("cuda"))
    rows = [_device(target) for target in targets]
    if absence:
        rows.append(Finding("GPU", f"none: {absence}", "engines for GPUs do not work here", ok=False))
    rows += _system() + _never_run(targets[-1])
    rows += [_package(name, purpose, gpu=not absence) for name, purpose in PACKAGES]
    rows += _bytecode(Path(torch.__file__))
    compiler = compiler_version()
    rows.append(Finding("C++ compiler", compiler or "none", "needed for Inductor on CPUs", ok=bool(compiler)))
    rows.append(_onednn(targets[0]))
    rows += [_defect(defect, target) for target in targets for defect in defects_here(target)]
    return rows


def engine_findings(*, every: bool = False) -> list[Finding]:
    """Which engines work here: three lines, or with `every` a line for each. Measures nothing and builds nothing."""
    targets = [detect_target("cpu")]
    if not cuda_absence():
        targets.append(detect_target("cuda"))
    engines = engine_availability(targets)
    if not every:
        return [Finding(what, found, means, ok=ok) for what, found, means, ok in summary(engines)]
    return [
        Finding(
            f"engine {one.engine}",
            "works on " + " and ".join(one.devices) if one.devices else "does not work here",
            one.family if one.devices else one.reason,
            ok=bool(one.devices),
        )
        for one in engines
    ]


def _device(target: Target) -> Finding:
    gpu = target.device == "cuda"
    size = f"{target.units} {'multiprocessors' if gpu else 'threads'}, {target.memory_bytes / 2**30:.0f} GiB"
    cache = f", {target.cache_bytes / 2**20:.0f} MiB of cache" if target.cache_bytes else ""
    versions = " ".join(f"{name} {version}" for name, version in target.versions)
    means = f"target {target.digest}: {versions}"
    return Finding("GPU" if gpu else "CPU", f"{target.name} ({target.arch}), {size}{cache}", means, ok=True)


_SYSTEMS: Final = {
    "win32": (
        "Windows",
        "PyTorch's own operators, oneDNN and cuDNN compete; there are no C kernels and no portable packages",
    ),
    "darwin": ("macOS", "PyTorch's own operators and Inductor compete, and C kernels without threads on x86"),
}


def _system() -> list[Finding]:
    """Systems on which Convoy was never run."""
    if sys.platform not in _SYSTEMS:
        return []
    name, means = _SYSTEMS[sys.platform]
    return [Finding("system", f"{name}: Convoy was never run here", means, ok=True)]


MEASURED_CAPABILITIES: Final = (90,)
"""Compute capabilities of the GPUs on which Convoy's kernels have run: H100 and H200."""


def _never_run(target: Target) -> list[Finding]:
    """What to expect of a GPU on which Convoy's kernels never ran: for others they are only compiled by tests."""
    if target.device != "cuda" or target.capability in MEASURED_CAPABILITIES:
        return []
    kernels = "Triton kernels but those by TMA" if target.capability < 90 else "all Triton kernels"
    means = f"{kernels} compete with cuDNN, Inductor and PyTorch; each result is checked before it is used"
    return [Finding("kernels", f"never run on compute capability {target.capability / 10}", means, ok=True)]


def _package(name: str, purpose: str, *, gpu: bool) -> Finding:
    version = installed(name)
    needless = name in _GPU_PACKAGES and not gpu
    return Finding(name, version or "not installed", f"needed for {purpose}", ok=bool(version) or needless)


def _bytecode(module: Path) -> list[Finding]:
    """Whether PyTorch was installed without bytecode, as `uv pip install` does by default.

    Each process compiles what it imports then, and again where it cannot write what it compiled. PyTorch's compiler takes 8 s
    to import instead of 2 (2,800 modules, the CPU of an H200's machine, torch 2.11).
    """
    if Path(importlib.util.cache_from_source(str(module))).exists():
        return []
    means = f"each start compiles what it imports; `python -m compileall -q {module.parent.parent}` does it once"
    return [Finding("bytecode", "none of PyTorch", means, ok=False)]


def _onednn(cpu: Target) -> Finding:
    there = torch.backends.mkldnn.is_available()
    version, in_force = cpu.version("onednn") or "yes", onednn_in_force()
    found = f"{version}, instruction set {in_force[-1]}" if in_force else version
    return Finding("oneDNN", found if there else "not in this PyTorch", "needed for the onednn engine", ok=there)


def _defect(defect: KnownDefect, target: Target) -> Finding:
    """A fault of a library: nothing is missing, but stock PyTorch is not to be trusted there."""
    found = f"{defect.library} {target.version(defect.library) or 'of unknown version'}: {defect.words}"
    means = f"stock PyTorch is wrong there, or crashes; Convoy's engines avoid it ({defect.source})"
    return Finding(f"known defect {defect.name}", found, means, ok=True)
