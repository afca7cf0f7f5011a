"""The programs of a CUDA package share kernels, cuDNN's plans and constants: each is in the package once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from convoy.errors import CompileError
from convoy.package.archive import Content
from convoy.package.cuda.cudnn_backend import cudnn_version
from convoy.package.cuda.graph_file import graph_bytes
from convoy.package.cuda.recorded_graph import RecordedGraph
from convoy.package.kernels import needs_here
from convoy.package.manifest import CudaNeeds, Manifest, PackedKernel
from convoy.package.packed_tensors import PackedTensors
from convoy.package.tensor_file import write_tensors
from convoy.package.write import WEIGHTS, BoundNet, ModelInfo, member_names, program_members, write_members
from convoy.target import Target


@dataclass(frozen=True, slots=True)
class CudaContents:
    """Kernels, plans and constants of a package.

    Attributes:
        tensors: values of constant blocks.
        kernels: (name, cubin), in the manifest's order.
        plans: texts of cuDNN's execution plans.
    """

    tensors: PackedTensors = field(default_factory=PackedTensors)
    kernels: list[tuple[str, bytes]] = field(default_factory=list[tuple[str, bytes]])
    plans: list[str] = field(default_factory=list[str])

    def plan(self, text: str) -> str:
        """The member with a plan of cuDNN's."""
        if text not in self.plans:
            self.plans.append(text)
        return _plan_member(self.plans.index(text))

    def kernel(self, name: str, cubin: bytes) -> int:
        """The index of a kernel."""
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise CompileError("package", f"kernel name {name!r} is no identifier of C; report this as a bug")
        if (name, cubin) not in self.kernels:
            self.kernels.append((name, cubin))
        return self.kernels.index((name, cubin))


def write_cuda_package(
    path: Path, programs: Sequence[tuple[BoundNet, RecordedGraph]], contents: CudaContents, model: ModelInfo
) -> None:
    """Write a package of recorded graphs.

    Args:
        path: the file.
        programs: a graph for each set of input shapes, with the net that it was recorded from.
        contents: their kernels and constants.
        model: what is said of the model.

    Raises:
        InputError: a path that cannot be written.
    """
    cubins = list(dict.fromkeys(cubin for _, cubin in contents.kernels))
    members: list[tuple[str, Content]] = []
    for index, (net, graph) in enumerate(programs):
        members += program_members(index, net, graph_bytes(graph))
    members += [(_member(index), [cubin]) for index, cubin in enumerate(cubins)]
    members += [(_plan_member(index), [text.encode()]) for index, text in enumerate(contents.plans)]
    members.append((WEIGHTS, write_tensors(contents.tensors.by_name)))
    manifest = Manifest(
        model=model.name,
        convoy="",
        target=model.target,
        needs=needs_here(()),
        portable=True,
        programs=tuple(map(member_names, range(len(programs)))),
        weights=WEIGHTS,
        library="",
        flags=(),
        kernels=tuple(PackedKernel(name, _member(cubins.index(cubin))) for name, cubin in contents.kernels),
        mean=model.mean,
        std=model.std,
        sums={},
        cuda=cuda_needs(model.target, cudnn_version() if contents.plans else 0),
    )
    write_members(path, manifest, members)


def _member(index: int) -> str:
    return f"kernels/k{index}.cubin"


def _plan_member(index: int) -> str:
    return f"cudnn/p{index}.json"


def cuda_needs(target: Target, cudnn: int = 0) -> CudaNeeds:
    """The needs of binaries for a device: its own capability, a driver of their CUDA version, and a version of cuDNN."""
    major = (torch.version.cuda or "12.0").partition(".")[0]
    return CudaNeeds(target.capability, 1000 * int(major), cudnn)
