"""Target: the device and the software for which a measurement or a plan holds."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Final, cast

from convoy.errors import InputError

VECTOR_FLOATS: Final = {"avx512": 16, "avx2": 8}
"""Floats of a vector register by a CPU's instruction set; 4 for all others."""


@dataclass(frozen=True, slots=True)
class Target:
    """A device with its software, as plain data (found by `convoy.measurement.device.detect`).

    Attributes:
        device: `cpu` or `cuda`.
        name: the device's own name ("NVIDIA H100 80GB HBM3").
        arch: instruction set that code is generated for: `sm_90`, or `avx512`, `avx2`, `neon`, `generic` on a CPU.
        units: streaming multiprocessors of a GPU; threads that torch uses on a CPU.
        memory_bytes: device memory (a CPU's: the machine's).
        cache_bytes: L2 of a GPU, last-level cache of a CPU; 0 where it could not be read.
        versions: (name, version) of what generates or holds kernels: torch, cudnn, triton, driver, ...; sorted.
    """

    device: str
    name: str
    arch: str
    units: int
    memory_bytes: int
    cache_bytes: int
    versions: tuple[tuple[str, str], ...] = ()

    @property
    def digest(self) -> str:
        """Sixteen hex digits over every field but `memory_bytes`, which a virtual machine may report inaccurately.

        Part of every database key: a row is not used for another digest, except an equivalent target's
        (`convoy.tune.precision`).
        """
        return _digest(self)

    def is_same_device(self, other: Target) -> bool:
        """Whether it is the same device, with any software versions: its times are a good guess."""
        return (self.device, self.name, self.arch, self.units) == (other.device, other.name, other.arch, other.units)

    def has_same_cores(self, other: Target) -> bool:
        """Whether it has the same cores and as many, like an H100 and an H200: fast configs of one are worth trying on the other.

        Only the instruction set of a CPU is known, so only the same CPU counts.
        """
        if self.device == "cpu":
            return self.is_same_device(other)
        return (self.device, self.arch, self.units) == (other.device, other.arch, other.units)

    def predicts(self, other: Target) -> bool:
        """Whether this device's times say which engine is fast on the other: all CPUs run the same kernels and libraries."""
        return other.has_same_cores(self) or self.device == other.device == "cpu"

    def time_factor(self, other: Target) -> float:
        """Estimated time on the other device over the time on this one.

        Of CPUs it is the ratio of threads times floats of a vector register: clocks and memory are not known. Of GPUs it is 1.
        Which of two engines is faster does not depend on it.
        """
        if not self.device == other.device == "cpu":
            return 1.0
        return self.units * VECTOR_FLOATS.get(self.arch, 4) / (other.units * VECTOR_FLOATS.get(other.arch, 4))

    @property
    def capability(self) -> int:
        """Compute capability of a GPU as one number (90 for `sm_90a`); 0 on a CPU."""
        digits = "".join(ch for ch in self.arch if ch.isdigit())
        return int(digits) if self.device == "cuda" and digits else 0

    def version(self, name: str) -> str:
        """Version of one part of the software; empty if it is absent."""
        return dict(self.versions).get(name, "")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with the digest."""
        return {**asdict(self), "versions": dict(self.versions), "digest": self.digest}

    @staticmethod
    def from_dict(data: object) -> Target:
        """Inverse of `to_dict`; the digest is computed again.

        Raises:
            InputError: a missing or invalid field; it is named.
        """
        fields = _mapping("target", data)
        versions = _mapping("target.versions", fields.get("versions"))
        return Target(
            device=_text("target.device", fields.get("device")),
            name=_text("target.name", fields.get("name")),
            arch=_text("target.arch", fields.get("arch")),
            units=_count("target.units", fields.get("units")),
            memory_bytes=_count("target.memory_bytes", fields.get("memory_bytes")),
            cache_bytes=_count("target.cache_bytes", fields.get("cache_bytes")),
            versions=tuple(sorted((name, _text(f"target.versions.{name}", text)) for name, text in versions.items())),
        )


_MAX_CHARACTERS: Final = 1000


def _mapping(name: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict) or len(cast("dict[str, object]", value)) > _MAX_CHARACTERS:
        raise InputError(name, cast("object", value), "an object of JSON")
    return cast("dict[str, object]", value)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > _MAX_CHARACTERS:
        raise InputError(name, value, f"a text of at most {_MAX_CHARACTERS} characters")
    return value


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 2**53:
        raise InputError(name, value, "an integer of at least 0")
    return value


@cache
def _digest(target: Target) -> str:
    """Cached, because every row needs it."""
    fields = asdict(target)
    del fields["memory_bytes"]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def usable_cores() -> int:
    """Cores that this process may use; where the system does not tell (Windows, macOS), all of the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
