"""Target: the device and the software stack that a measurement or a plan holds for."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True, slots=True)
class Target:
    """A device with its software, as plain data (found by `convoy.measurement.detect`).

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
        """Sixteen hex digits over every field but `memory_bytes`, which a virtual machine may report a little off.

        Part of every database key: a row is never trusted for another digest, but for twins (`measurement.precision`).
        """
        return _digest(self)

    def is_like(self, other: Target) -> bool:
        """Whether it is the same device, whatever the versions of the software: its times are a good guess."""
        return (self.device, self.name, self.arch, self.units) == (other.device, other.name, other.arch, other.units)

    def is_kin(self, other: Target) -> bool:
        """Whether it has the same cores and as many, like an H100 and an H200: what is fast on one is worth a look on the other.

        Of CPUs no more is known than their instruction set: only the same one is kin.
        """
        if self.device == "cpu":
            return self.is_like(other)
        return (self.device, self.arch, self.units) == (other.device, other.arch, other.units)

    @property
    def capability(self) -> int:
        """Compute capability of a GPU as one number (90 for `sm_90a`); 0 on a CPU."""
        digits = "".join(ch for ch in self.arch if ch.isdigit())
        return int(digits) if self.device == "cuda" and digits else 0

    def version(self, name: str) -> str:
        """Version of one part of the stack; empty where it is absent."""
        return dict(self.versions).get(name, "")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with the digest."""
        return {**asdict(self), "versions": dict(self.versions), "digest": self.digest}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Target:
        """Inverse of `to_dict`; the digest is computed anew."""
        return Target(
            device=str(data["device"]),
            name=str(data["name"]),
            arch=str(data["arch"]),
            units=int(data["units"]),
            memory_bytes=int(data["memory_bytes"]),
            cache_bytes=int(data["cache_bytes"]),
            versions=tuple(sorted((str(k), str(v)) for k, v in dict(data["versions"]).items())),
        )


@cache
def _digest(target: Target) -> str:
    """Asked for with every row."""
    fields = asdict(target)
    del fields["memory_bytes"]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
