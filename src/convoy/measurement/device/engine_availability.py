"""Which engines work on this machine, on which device, and what the others lack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from convoy.engines.base import Engine
from convoy.engines.manifest import engine_ids, load_engine
from convoy.errors import InputError
from convoy.measurement.device.detect import cuda_absence
from convoy.measurement.device.sample_problems import samples_for
from convoy.measurement.engine_space import query_engine
from convoy.problem import Problem
from convoy.target import Target

CAPABLE_GPU: Final = Target("cuda", "NVIDIA H100", "sm_90", 132, 80 << 30, 50 << 20)
"""A GPU that every engine for GPUs supports: where it is not this machine's, problems are chosen by it."""


@dataclass(frozen=True, slots=True)
class EngineAvailability:
    """Where one engine works.

    Attributes:
        engine: its id.
        family: its algorithm; empty where it cannot be loaded.
        devices: `cpu`, `cuda`, both or none.
        reason: where it works on none, the part that is missing.
    """

    engine: str
    family: str
    devices: tuple[str, ...]
    reason: str = ""


def devices_here() -> list[str]:
    """The devices of this machine: `cpu`, and `cuda` if PyTorch has a GPU."""
    return ["cpu"] if cuda_absence() else ["cpu", "cuda"]


def engine_availability(targets: Sequence[Target], extra: tuple[str, ...] = ()) -> list[EngineAvailability]:
    """Ask every engine of the manifest about problems that suit it. Measures nothing and builds nothing.

    Args:
        targets: the devices of this machine.
        extra: engines of the user's own too, as `Settings.engines` names them.
    """
    return [_ask(engine, targets, extra) for engine in engine_ids(extra)]


def _ask(engine_id: str, targets: Sequence[Target], extra: tuple[str, ...]) -> EngineAvailability:
    try:
        engine = load_engine(engine_id, extra)
    except (ImportError, AttributeError, InputError) as error:
        return EngineAvailability(engine_id, "", (), f"cannot be loaded: {type(error).__name__}: {error}")
    devices = tuple(target.device for target in targets if _first_supported(engine, target) is not None)
    return EngineAvailability(engine_id, engine.family, devices, "" if devices else _missing(engine, targets))


def _first_supported(engine: Engine, target: Target) -> Problem | None:
    return next((problem for problem in samples_for(engine) if query_engine(engine, problem, target)[0]), None)


def _missing(engine: Engine, targets: Sequence[Target]) -> str:
    """Why an engine works on no device of this machine: its reason for a problem that it supports elsewhere.

    An engine that supports nothing on such a GPU lacks a library, or instructions of the CPU: the reason that it gives most
    often for its own samples, or else for all, names them.
    """
    suiting = _first_supported(engine, CAPABLE_GPU)
    if suiting is not None:
        return query_engine(engine, suiting, targets[-1])[0].reason
    target = next((target for target in reversed(targets) if target.device in engine.devices), targets[-1])
    problems = engine.samples() or samples_for(engine)
    reasons = Counter(query_engine(engine, problem, target)[0].reason for problem in problems)
    return reasons.most_common(1)[0][0]


def summary(engines: Sequence[EngineAvailability]) -> list[tuple[str, str, str, bool]]:
    """Three lines: the engines that work here, those that need a GPU, those that lack another part.

    Returns:
        Name, count, meaning, and whether no part is missing that could be installed.
    """
    working = [found for found in engines if found.devices]
    by_device = Counter(device for found in working for device in found.devices)
    devices = ", ".join(f"{count} on {device}" for device, count in sorted(by_device.items()))
    idle = [found for found in engines if not found.devices]
    gpu = [found for found in idle if _needs_gpu(found.reason)]
    lacking = [found for found in idle if not _needs_gpu(found.reason)]
    reasons = dict.fromkeys(f"{found.engine}: {found.reason}" for found in lacking)
    total = len(engines)
    return [
        ("engines that work here", f"{len(working)} of {total}", devices or "none", bool(working)),
        (
            "engines that need a GPU",
            f"{len(gpu)} of {total}",
            "they need an NVIDIA GPU of a suitable compute capability" if gpu else "all of them work here",
            True,  # the device is missing, and is listed as such
        ),
        (
            "engines that lack a part",
            f"{len(lacking)} of {total}",
            "; ".join(reasons) or "nothing is missing",
            all(_needs_other_cpu(found.reason) for found in lacking),
        ),
    ]


def _needs_other_cpu(reason: str) -> bool:
    return "x86 CPU" in reason or "a CPU with" in reason


def _needs_gpu(reason: str) -> bool:
    return any(word in reason for word in ("GPU", "CUDA device", "compute capability"))
