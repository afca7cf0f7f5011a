"""A model repository for Triton Inference Server: config.pbtxt, the Python backend's model.py, the package.

FOLDER/NAME/config.pbtxt
FOLDER/NAME/1/model.py
FOLDER/NAME/1/NAME.convoy
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from convoy.errors import InputError
from convoy.package.archive import read_archive
from convoy.package.cuda.graph_file import read_graph
from convoy.package.cuda.recorded_graph import RecordedGraph
from convoy.package.manifest import check_sums, read_manifest
from convoy.package.program_file import PackedProgram, PackedTensor, read_program
from convoy.package.samples import batch_sizes

MODEL: Final = Path(__file__).with_name("triton_model.py")
"""Becomes model.py."""

TYPES: Final = {
    "fp64": "TYPE_FP64",
    "fp32": "TYPE_FP32",
    "fp16": "TYPE_FP16",
    "bf16": "TYPE_BF16",
    "i64": "TYPE_INT64",
    "i32": "TYPE_INT32",
    "i16": "TYPE_INT16",
    "i8": "TYPE_INT8",
    "u8": "TYPE_UINT8",
    "bool": "TYPE_BOOL",
}
"""Convoy's name of a dtype → Triton's."""

QUEUE_DELAY_US: Final = 1000
"""How long Triton's dynamic batcher holds a request back to fill a batch."""


def write_triton_repository(package: str | Path, folder: str | Path) -> Path:
    """Write a package into a model repository.

    Args:
        package: the `.convoy` file; its name without the ending becomes the model's.
        folder: the repository, which is made if it is not there. It must not have a model of that name.

    Returns:
        The model's folder.

    Raises:
        PackageError: the package is damaged.
        InputError: the folder cannot be written, or has such a model.
    """
    source, repository = Path(package), Path(folder)
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", source.stem)
    programs, device = _programs(source)
    target = repository / name
    if target.exists():
        raise InputError(
            "folder", str(target), "a repository without a model of this name", "Remove it, or name another."
        )
    building = repository / f".{name[:100]}.{secrets.token_hex(4)}.new"
    try:
        version = building / "1"
        version.mkdir(parents=True)
        (building / "config.pbtxt").write_text(config_text(name, programs, device), encoding="utf-8")
        shutil.copyfile(MODEL, version / "model.py")
        shutil.copyfile(source, version / f"{name}.convoy")
        building.replace(target)
    except OSError as error:
        raise InputError("folder", str(folder), "a folder that can be written", str(error)) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _programs(package: Path) -> tuple[list[PackedProgram] | list[RecordedGraph], str]:
    """The programs of a package, and the device that they are for."""
    archive = read_archive(package)
    manifest = read_manifest(archive)
    check_sums(archive, manifest)
    kernels = len(manifest.kernels)
    parts = [(archive.view(one.program), f"{one.program} of {archive.path}") for one in manifest.programs]
    if manifest.cuda is not None:
        return [read_graph(content, where, kernels) for content, where in parts], "cuda"
    return [read_program(content, where, kernels) for content, where in parts], "cpu"


def config_text(name: str, programs: Sequence[PackedProgram | RecordedGraph], device: str = "cpu") -> str:
    """The model's configuration, as text of Triton's `ModelConfig`.

    Args:
        name: of the model.
        programs: of the package; a package that has no batches gets `max_batch_size: 0`, and no dynamic batcher.
        device: `cpu`, or `cuda`: Triton makes an instance for each GPU that it has.
    """
    sizes = batch_sizes(programs)
    lines = [f'name: "{name}"', 'backend: "python"', f"max_batch_size: {sizes[-1] if sizes else 0}"]
    for word, tensors in (("input", programs[0].inputs), ("output", programs[0].outputs)):
        shown = ",\n".join(_tensor_text(one, batched=bool(sizes)) for one in tensors)
        lines.append(f"{word} [\n{shown}\n]")
    if sizes:
        preferred = ", ".join(map(str, sizes))
        lines.append(
            f"dynamic_batching {{\n  preferred_batch_size: [ {preferred} ]\n"
            f"  max_queue_delay_microseconds: {QUEUE_DELAY_US}\n}}"
        )
    kind = "KIND_GPU" if device == "cuda" else "KIND_CPU"
    lines.append(f"instance_group [\n  {{ kind: {kind}, count: 1 }}\n]")
    return "\n".join(lines) + "\n"


def _tensor_text(tensor: PackedTensor, *, batched: bool) -> str:
    shape = tensor.spec.shape[1:] if batched else tensor.spec.shape
    # A sample without sizes of its own is a vector of one for Triton, whose dims cannot be empty.
    dims = f"dims: [ {', '.join(map(str, shape))} ]" if shape else "dims: [ 1 ], reshape: { shape: [ ] }"
    return f'  {{ name: "{tensor.name}", data_type: {TYPES[tensor.spec.dtype]}, {dims} }}'
