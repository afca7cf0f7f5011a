"""convoy.open: from a package to a module that runs. Imports take most of the time, so each device imports its own modules."""

from __future__ import annotations

from pathlib import Path

from convoy.errors import InputError, PackageError
from convoy.package.archive import PackageArchive, read_archive
from convoy.package.manifest import CudaNeeds, Manifest, check_sums, read_manifest
from convoy.package.packaged_module import PackagedModule
from convoy.package.tensor_file import read_tensors


def open(  # noqa: A001 - as `torch.load`: called `convoy.open`
    path: str | Path, *, trust: bool = False, signers: str | Path | None = None
) -> PackagedModule:
    """Open a package that `convoy.export` wrote. Needs no model source, and measures nothing.

    Args:
        path: the file. Weights are used where they lie in it: replace the file by renaming, do not write into it.
        trust: run the compiled code that the package holds. Without it, its C kernels are compiled here from Convoy's own
            sources, as the plan names them; that needs a C compiler, but no trust in the person who made the file. A package
            for a GPU holds compiled code alone: it is refused without trust. It runs on the current CUDA device.
        signers: trust the package if one of these people signed it, and refuse it otherwise: a file of names and public keys, as
            `ssh-keygen -Y verify` takes it. The signature lies beside the package, in `NAME.convoy.sig`.

    Returns:
        A callable with the arguments and results of the exported module.

    Raises:
        InputError: `signers` cannot be used, or is given with `trust`.
        PackageError: the file is damaged, of another version, for another machine, or not signed by one of the signers.
        CompileError: a kernel must be compiled, and cannot be.
    """
    if signers is not None and trust:
        raise InputError("signers", str(signers), "nothing with trust", "Give one of the two.")
    archive = read_archive(path, own_memory=signers is not None)
    if signers is not None:
        from convoy.package.signature import check_signature

        check_signature(archive.buffer, archive.path, signers)
        trust = True
    manifest = read_manifest(archive)
    if not manifest.programs:
        raise PackageError("package", archive.path, "at least one program")
    check_sums(archive, manifest)
    if manifest.cuda is not None:
        return _opened_on_gpu(archive, manifest, manifest.cuda, trust=trust)
    return _opened_on_cpu(archive, manifest, trust=trust)


def _opened_on_cpu(archive: PackageArchive, manifest: Manifest, *, trust: bool) -> PackagedModule:
    """Open a package for a CPU."""
    from convoy.measurement import detect_target
    from convoy.package.bind_package import OpenedParts, bound_program
    from convoy.package.kernels import functions_of, load_library, why_not_code

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


def _opened_on_gpu(archive: PackageArchive, manifest: Manifest, needs: CudaNeeds, *, trust: bool) -> PackagedModule:
    """Open a package for a GPU."""
    from convoy.package.cuda.open_cuda import cuda_programs, why_not_here

    reason = why_not_here(needs)
    if reason:
        todo = "Export it on such a machine, or open a package for a CPU."
        raise PackageError("package", archive.path, f"a GPU for which it was made, but {reason}", todo)
    if not trust:
        todo = "Allow its own code, if you trust the person who made it (trust=True, --trust)."
        raise PackageError("package", archive.path, "trust, because it holds compiled code for a GPU", todo)
    tensors = read_tensors(archive.view(manifest.weights), archive.path)
    made = cuda_programs(archive, manifest, tensors)
    return PackagedModule(archive.path, manifest, tuple(one for one, _ in made), tuple(graph for _, graph in made))
