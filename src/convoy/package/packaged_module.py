"""PackagedModule: a net from a package, called like the module that it was exported from."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from convoy.engines.torch_operators import DTYPES
from convoy.errors import InputError, PackageError
from convoy.measurement import detect_target
from convoy.package.archive import read_archive
from convoy.package.bind_package import OpenedParts, bound_program
from convoy.package.kernels import functions_of, load_library, why_not_code
from convoy.package.manifest import Manifest, check_sums, read_manifest
from convoy.package.program_file import PackedProgram, PackedTensor
from convoy.package.tensor_file import read_tensors
from convoy.pipeline.isolation import preserve_global_state
from convoy.plan.plan import Plan
from convoy.program import Program
from convoy.program.call_forms import CallArguments


@dataclass(frozen=True, eq=False)
class PackagedModule:
    """A net that runs from a package. It takes and returns what the exported module did, without gradients.

    It may be called from several threads at once. Calls take one of the shapes that were exported.

    Attributes:
        path: the package.
        manifest: its manifest.
        programs: a program for each set of input shapes.
        packed: the same programs as the package holds them.
    """

    path: str
    manifest: Manifest
    programs: tuple[Program, ...]
    packed: tuple[PackedProgram, ...]

    @property
    def model(self) -> str:
        """The name of the model that was exported."""
        return self.manifest.model

    @property
    def plan(self) -> Plan:
        """The plan of the first program."""
        return self.programs[0].plan

    @property
    def inputs(self) -> tuple[PackedTensor, ...]:
        """Inputs of the first program: name, shape, dtype and memory format."""
        return self.packed[0].inputs

    @property
    def outputs(self) -> tuple[PackedTensor, ...]:
        """Outputs of the first program."""
        return self.packed[0].outputs

    def example_inputs(self, seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Inputs of the first program's shapes and dtypes: standard normal, or zeros for integers."""
        draw = torch.Generator().manual_seed(seed)
        found: list[torch.Tensor] = []
        for one in self.inputs:
            dtype = DTYPES[one.spec.dtype]
            made = (
                torch.randn(one.spec.shape, generator=draw) if dtype.is_floating_point else torch.zeros(one.spec.shape)
            )
            found.append(made.to(dtype))
        return tuple(found)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on arguments like those of the exported module; inputs may be given by position or by their names (`inputs`).

        Raises:
            InputError: another structure, shape, dtype or device than was exported.
        """
        errors: list[InputError] = []
        for program, packed in zip(self.programs, self.packed, strict=True):
            assert program.captured is not None
            refused: InputError | None = None
            for form in _forms(packed, args, kwargs):
                try:
                    tensors = program.captured.flatten_inputs(*form)
                except InputError as error:
                    refused = refused or error  # about the form in which the user calls
                    continue
                for tensor in tensors:
                    if tensor.device.type != "cpu":
                        raise InputError(
                            "args", str(tensor.device), "tensors on the CPU, for which the package was made"
                        )
                with torch.no_grad():
                    return program(*form)
            assert refused is not None
            errors.append(refused)
        if len(errors) == 1:
            raise errors[0]
        shapes = "; or ".join(", ".join(str(one.spec) for one in program.inputs) for program in self.packed)
        raise InputError("args", _shapes(args), f"shapes that were exported: {shapes}") from errors[0]

    def __repr__(self) -> str:
        return f"PackagedModule({self.path!r}, model={self.model!r}, inputs=[{', '.join(str(i.spec) for i in self.inputs)}])"


def _forms(packed: PackedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generator[CallArguments]:
    """The call as it is; then, if it gives every input, by position or by name, with fewer and fewer of them by position."""
    yield args, kwargs
    names = [one.name for one in packed.inputs]
    if len(args) <= len(names) and kwargs.keys() == set(names[len(args) :]):
        given = [*args, *(kwargs[name] for name in names[len(args) :])]
        for count in range(len(names), -1, -1):
            yield tuple(given[:count]), dict(zip(names[count:], given[count:], strict=True))


def _shapes(args: Sequence[Any]) -> list[object]:
    return [list(one.shape) if isinstance(one, torch.Tensor) else type(one).__name__ for one in args]


def open_package(path: str | Path, *, trust: bool = False) -> PackagedModule:
    """Open a package that `convoy.export` wrote. Needs no model source, and measures nothing.

    Args:
        path: the file. Weights are used where they lie in it: replace the file by renaming, do not write into it.
        trust: run the compiled code that the package holds. Without it, its C kernels are compiled here from Convoy's own
            sources, as the plan names them; that needs a C compiler, but no trust in the person who made the file.

    Returns:
        A callable with the arguments and results of the exported module.

    Raises:
        PackageError: the file is damaged, of another version, or for another machine.
        CompileError: a kernel must be compiled, and cannot be.
    """
    archive = read_archive(path)
    manifest = read_manifest(archive)
    if not manifest.programs:
        raise PackageError("package", archive.path, "at least one program")
    if manifest.target.device != "cpu":
        raise PackageError("package", manifest.target.device, "a package for a CPU", "GPU packages are not there yet.")
    check_sums(archive, manifest)
    functions = library = None
    with preserve_global_state():
        if trust and manifest.library:
            reason = why_not_code(manifest.needs)
            if reason:
                todo = "Open it without trust, or export it here."
                raise PackageError("package", archive.path, f"code for this machine, but {reason}", todo)
            library = load_library(archive.view(manifest.library))
            functions = functions_of(library, [kernel.function for kernel in manifest.kernels])
        tensors = read_tensors(archive.view(manifest.weights), archive.path)
        parts = OpenedParts(archive, manifest, tensors, functions, library, detect_target("cpu"))
        made = [bound_program(parts, members) for members in manifest.programs]
    return PackagedModule(archive.path, manifest, tuple(one for one, _ in made), tuple(packed for _, packed in made))
