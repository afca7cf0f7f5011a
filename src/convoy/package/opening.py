"""convoy.open: from a package to a module that runs."""

from __future__ import annotations

from pathlib import Path

from convoy.errors import PackageError
from convoy.measurement import detect_target
from convoy.package.archive import read_archive
from convoy.package.bind_package import OpenedParts, bound_program
from convoy.package.kernels import functions_of, load_library, why_not_code
from convoy.package.manifest import check_sums, read_manifest
from convoy.package.packaged_module import PackagedModule
from convoy.package.tensor_file import read_tensors


def open(  # noqa: A001 - as `torch.load`: called `convoy.open`
    path: str | Path, *, trust: bool = False
) -> PackagedModule:
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
