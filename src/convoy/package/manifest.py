"""The manifest of a package: its version, what it needs, its members with their sums (docs/reference/package.md)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from convoy._version import __version__
from convoy.errors import InputError, PackageError
from convoy.package.archive import PackageArchive
from convoy.package.checked_fields import Fields
from convoy.target import Target
from convoy.untrusted import parse_json

MANIFEST: Final = "manifest.json"
FORMAT: Final = "convoy package"
VERSION: Final = 1
"""Counted up when readers of the version before could not read a package."""

MOST_MANIFEST_BYTES: Final = 4 << 20
_MEMBER: Final = r"[a-z0-9_]+(?:[./][a-z0-9_]+){0,8}"
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Needs:
    """What a package's compiled code and packed weights need.

    Attributes:
        system: operating system, as `platform.system()` names it in lower case.
        machine: processor family, as `platform.machine()` names it.
        libc: C library that the code was linked with, with its version; empty if there is no code.
        isa: instruction set: `sse4`, `avx2`, `avx512`, or another machine's own name.
        flags: the processor's features, by Linux's names, that the code uses.
        lanes: floats of a vector register, by which weights are packed; 0 if no weight is packed.
    """

    system: str
    machine: str
    libc: str
    isa: str
    flags: tuple[str, ...]
    lanes: int

    def __str__(self) -> str:
        return f"{self.system} on {self.machine} with {self.isa}"


@dataclass(frozen=True, slots=True)
class CudaNeeds:
    """The device and the driver that the binaries of a package for a GPU need.

    Attributes:
        capability: of the device, 90 for 9.0.
        driver: least CUDA version of the driver, as cuDriverGetVersion gives it: 13000 for 13.0.
        cudnn: version of cuDNN that wrote its plans, as cudnnGetVersion gives it: 91900 for 9.19.0; 0: it has none. The same
            major and minor version reads them.
    """

    capability: int
    driver: int
    cudnn: int = 0


@dataclass(frozen=True, slots=True)
class PackedKernel:
    """A kernel of the compiled code.

    Attributes:
        function: its name in the library or binary.
        source: member with its C source; of a package for a GPU, with its cubin.
    """

    function: str
    source: str


@dataclass(frozen=True, slots=True)
class ProgramMembers:
    """Members of one program: for one set of input shapes."""

    graph: str
    plan: str
    program: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a package.

    Attributes:
        model: the user's name of the model (for people).
        convoy: version of Convoy that wrote it.
        target: the machine that the plans were made for.
        needs: what its code and packed weights need.
        portable: whether every step of every program has compiled code, so that the C runtime can run it.
        programs: in the order of their files.
        weights: member with the tensors.
        library: member with the compiled code; empty if there is none.
        flags: the compiler's flags for the sources.
        kernels: functions of the library; programs name them by index.
        mean: mean of each channel that images are normalised by; empty: not known.
        std: standard deviation of each channel, likewise.
        sums: SHA-256 of each other member, by name.
        cuda: what its binaries need; None for a CPU.
    """

    model: str
    convoy: str
    target: Target
    needs: Needs
    portable: bool
    programs: tuple[ProgramMembers, ...]
    weights: str
    library: str
    flags: tuple[str, ...]
    kernels: tuple[PackedKernel, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    sums: Mapping[str, str]
    cuda: CudaNeeds | None = None


def manifest_bytes(manifest: Manifest) -> bytes:
    """The manifest as a member's content."""
    data: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "convoy": __version__,
        "model": manifest.model,
        "portable": manifest.portable,
        "needs": asdict(manifest.needs),
        "target": manifest.target.to_dict(),
        "programs": [asdict(program) for program in manifest.programs],
        "weights": manifest.weights,
        "library": manifest.library,
        "flags": manifest.flags,
        "kernels": [asdict(kernel) for kernel in manifest.kernels],
        "mean": manifest.mean,
        "std": manifest.std,
        "sums": dict(manifest.sums),
    }
    if manifest.cuda is not None:
        data["cuda"] = {name: value for name, value in asdict(manifest.cuda).items() if name != "cudnn" or value}
    return (json.dumps(data, indent=1) + "\n").encode()


def read_manifest(archive: PackageArchive) -> Manifest:
    """The manifest of an archive, checked; the sums of the members are not compared yet.

    Raises:
        PackageError: it is missing, damaged, of another version, or does not list the archive's members.
    """
    content = archive.view(MANIFEST)
    if len(content) > MOST_MANIFEST_BYTES or not archive.has_crc(MANIFEST):
        raise PackageError("package", archive.path, "a whole .convoy package", "Its manifest is damaged.")
    where = f"manifest of {archive.path}"
    data: object = parse_json(bytes(content), where, PackageError)
    fields = Fields(where, data)
    fields.take("format", lambda value: value == FORMAT, FORMAT)
    version = fields.integer("version")
    if version != VERSION:
        todo = "It was written by another version of Convoy: export the package again."
        raise PackageError(f"{where}.version", version, f"version {VERSION}", todo)
    found = _manifest(where, fields)
    fields.finish()
    named = {*found.sums, MANIFEST}
    if named != archive.members.keys():
        other = min(named ^ archive.members.keys())
        raise PackageError(f"{where}.sums", other, "exactly the members of the archive")
    functions = [kernel.function for kernel in found.kernels]
    twice = [name for index, name in enumerate(functions) if name in functions[:index]]
    if twice and found.cuda is None:  # for a GPU each kernel is looked up in an object of its own
        raise PackageError(
            f"{where}.kernels", twice[0], "each function of the library once", "Export the package again."
        )
    used = [found.weights, *(kernel.source for kernel in found.kernels), *([found.library] if found.library else [])]
    used += [name for program in found.programs for name in asdict(program).values()]
    for name in used:
        if name not in found.sums:
            raise PackageError(where, name, "members of the archive")
    return found


def _manifest(where: str, fields: Fields) -> Manifest:
    target = fields.anything("target")
    try:
        made_for = Target.from_dict(target)
    except InputError as error:
        raise PackageError(f"{where}.{error.argument}", error.value, error.expected) from None
    sums = fields.mapping("sums")
    for name, digest in sums.items():
        if not re.fullmatch(_MEMBER, name) or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise PackageError(f"{where}.sums", (name, digest), "SHA-256 in hex digits, by member")
    return Manifest(
        model=fields.text("model"),
        convoy=fields.text("convoy", longest=100),
        target=made_for,
        needs=_needs(f"{where}.needs", fields.anything("needs")),
        portable=fields.boolean("portable"),
        programs=tuple(_program(f"{where}.programs", item) for item in fields.items("programs")),
        weights=fields.text("weights", _MEMBER),
        library=fields.text("library", f"({_MEMBER})?"),
        flags=fields.texts("flags", r"-[\w=+.-]+", 100),
        kernels=tuple(_kernel(f"{where}.kernels", item) for item in fields.items("kernels")),
        mean=fields.numbers("mean"),
        std=fields.numbers("std"),
        sums=sums,
        cuda=_cuda(f"{where}.cuda", fields, made_for),
    )


def _cuda(where: str, fields: Fields, target: Target) -> CudaNeeds | None:
    if target.device != "cuda":
        return None
    own = Fields(where, fields.anything("cuda"))
    least_driver = own.integer("driver", 1000, 1_000_000)
    cudnn = own.integer("cudnn", 90_000, 10_000_000) if own.has("cudnn") else 0
    found = CudaNeeds(own.integer("capability", 10, 1000), least_driver, cudnn)
    own.finish()
    return found


def _needs(where: str, data: object) -> Needs:
    fields = Fields(where, data)
    found = Needs(
        system=fields.text("system", r"[\w.-]+", 100),
        machine=fields.text("machine", r"[\w.-]+", 100),
        libc=fields.text("libc", r"[\w. -]*", 100),
        isa=fields.text("isa", r"\w+", 100),
        flags=fields.texts("flags", r"\w+", 100),
        lanes=fields.integer("lanes", 0, 64),
    )
    fields.finish()
    return found


def _program(where: str, data: object) -> ProgramMembers:
    fields = Fields(where, data)
    found = ProgramMembers(*(fields.text(name, _MEMBER) for name in ("graph", "plan", "program")))
    fields.finish()
    return found


def _kernel(where: str, data: object) -> PackedKernel:
    fields = Fields(where, data)
    found = PackedKernel(fields.text("function", r"[A-Za-z_]\w*", 200), fields.text("source", _MEMBER))
    fields.finish()
    return found


def check_sums(archive: PackageArchive, manifest: Manifest) -> None:
    """Compare the SHA-256 of every member; raises PackageError for the first that differs."""
    for name, digest in manifest.sums.items():
        if hashlib.sha256(archive.view(name)).hexdigest() != digest:
            todo = "The file was damaged or changed: copy or export it again."
            raise PackageError("package", archive.path, f"member {name} as it was exported", todo)
