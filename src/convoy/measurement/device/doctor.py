"""What is installed and found on this machine, and what is missing for which engine: plain data for `convoy doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from convoy.engines.compilers.instruction_sets import onednn_in_force
from convoy.engines.known_defects import KnownDefect, defects_here
from convoy.engines.manifest import MANIFEST, load_engine
from convoy.errors import InputError
from convoy.measurement.device.detect import compiler_version, cuda_absence, detect_target, installed
from convoy.measurement.engine_space import query_engine
from convoy.problem import ConvProblem, Epilogue, LayoutProblem, LinearProblem, Problem, SubgraphProblem, TensorSpec
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
"""Of no use without a GPU, and not missed there."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked for.

    Attributes:
        what: its name.
        found: what was found, in a few words.
        means: what it is needed for, or what its absence means.
        ok: whether nothing is missing.
    """

    what: str
    found: str
    means: str
    ok: bool


def findings() -> list[Finding]:
    """Look at devices, packages, compilers and engines. Measures nothing and builds nothing."""
    targets = [detect_target("cpu")]
    absence = cuda_absence()
    if not absence:
        targets.append(detect_target("cuda"))
    rows = [_device(target) for target in targets]
    if absence:
        rows.append(Finding("GPU", f"none: {absence}", "engines for GPUs say no", ok=False))
    rows += [_package(name, purpose, gpu=not absence) for name, purpose in PACKAGES]
    compiler = compiler_version()
    rows.append(Finding("C++ compiler", compiler or "none", "needed for Inductor on CPUs", ok=bool(compiler)))
    rows.append(_onednn(targets[0]))
    rows += [_defect(defect, target) for target in targets for defect in defects_here(target)]
    return rows + [_engine(engine, targets) for engine in MANIFEST]


def _device(target: Target) -> Finding:
    gpu = target.device == "cuda"
    size = f"{target.units} {'multiprocessors' if gpu else 'threads'}, {target.memory_bytes / 2**30:.0f} GiB"
    cache = f", {target.cache_bytes / 2**20:.0f} MiB of cache" if target.cache_bytes else ""
    versions = " ".join(f"{name} {version}" for name, version in target.versions)
    means = f"target {target.digest}: {versions}"
    return Finding("GPU" if gpu else "CPU", f"{target.name} ({target.arch}), {size}{cache}", means, ok=True)


def _package(name: str, purpose: str, *, gpu: bool) -> Finding:
    version = installed(name)
    needless = name in _GPU_PACKAGES and not gpu
    return Finding(name, version or "not installed", f"needed for {purpose}", ok=bool(version) or needless)


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


def _engine(engine: str, targets: Sequence[Target]) -> Finding:
    """Which devices an engine works on; where it works on none, the reason that it gives for the last of them."""
    try:
        instance = load_engine(engine)
    except (ImportError, AttributeError, InputError) as error:
        return Finding(f"engine {engine}", "cannot be loaded", f"{type(error).__name__}: {error}", ok=False)
    devices: list[str] = []
    reason = ""
    for target in targets:
        answers = [query_engine(instance, problem, target)[0] for problem in sample_problems()]
        if any(answers):
            devices.append(target.device)
        else:
            reason = answers[0].reason
    found = "works on " + " and ".join(devices) if devices else "works on nothing here"
    return Finding(f"engine {engine}", found, instance.family if devices else reason, ok=bool(devices))


def sample_problems() -> list[Problem]:
    """Ordinary problems of every kind: an engine that is whole can do one of them."""
    sizes = {
        "3x3": ConvProblem(1, 64, 56, 56, 64, 3, 3, 1, 1, epilogue=Epilogue(bias=True)),
        "1x1": ConvProblem(1, 64, 56, 56, 256, 1, 1),
        "depthwise": ConvProblem(1, 64, 56, 56, 64, 3, 3, 1, 1, groups=64),
        "first": ConvProblem(1, 3, 224, 224, 64, 7, 7, 3, 3, 2, 2),
    }
    convolutions: list[Problem] = [
        _of(problem, layout, dtype, numerics)
        for problem in sizes.values()
        for layout in ("nchw", "nhwc")
        for dtype, numerics in (("fp32", "strict"), ("fp32", "as_torch"), ("fp16", "half"))
    ]
    linear = [LinearProblem(1, 1024, 1024), LinearProblem(1, 1024, 1024, "fp16", "half")]
    return [*convolutions, *linear, LayoutProblem(TensorSpec((1, 64, 56, 56), "fp32"), "nchw", "nhwc"), _pooling()]


def _of(problem: ConvProblem, layout: str, dtype: str, numerics: str) -> ConvProblem:
    return replace(problem, layout=layout, x_dtype=dtype, weight_dtype=dtype, y_dtype=dtype, numerics=numerics)


def _pooling() -> SubgraphProblem:
    text = (
        "graph 1\ninput %x: fp32[1,64,56,56]\n"
        "%y: fp32[1,64,28,28] = aten.max_pool2d.default(%x, (2, 2), (2, 2))\n"
        "%z: fp32[1,64,28,28] = aten.relu.default(%y)\nreturn %z\n"
    )
    return SubgraphProblem(text, label="max_pool2d relu")
