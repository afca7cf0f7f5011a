"""From the members of a package for a GPU to programs that run there."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping

import torch

from convoy.capture.captured import Captured
from convoy.engines.compilers.cuda_bindings import driver
from convoy.errors import InputError, PackageError
from convoy.package.archive import PackageArchive
from convoy.package.cuda.cuda_program import KernelFunctions, PackagedCudaProgram
from convoy.package.cuda.cudnn_backend import CudnnPlans, cudnn_version
from convoy.package.cuda.graph_file import PLAN_MEMBER
from convoy.package.cuda.graph_file import read_graph as read_recorded
from convoy.package.cuda.recorded_graph import CudnnRun, RecordedGraph
from convoy.package.cuda.recorded_net import RecordedNet
from convoy.package.manifest import CudaNeeds, Manifest
from convoy.package.package_fit import check_fit, read_graph, read_plan


def why_not_here(needs: CudaNeeds) -> str:
    """Why a package cannot run on this machine's current GPU; empty if it can."""
    if not torch.cuda.is_available():
        return "PyTorch has no GPU here"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "cuda-bindings is not installed (pip install 'convoy-cnn[gpu]')"
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor != needs.capability:
        return (
            f"it was made for capability {needs.capability // 10}.{needs.capability % 10}, this GPU has {major}.{minor}"
        )
    _, version = driver().cuDriverGetVersion()
    if int(version) < needs.driver:
        return f"it needs a driver for CUDA {needs.driver // 1000}, this one is for {int(version) // 1000}"
    here = cudnn_version() if needs.cudnn else 0
    if here // 100 != needs.cudnn // 100:
        return f"it has plans of cuDNN {_shown(needs.cudnn)}, PyTorch's is {_shown(here)}"
    return ""


def _shown(version: int) -> str:
    """A version of cuDNN as people write it: 9.19 for 91900."""
    return f"{version // 10_000}.{version // 100 % 100}"


def cuda_programs(
    archive: PackageArchive, manifest: Manifest, tensors: Mapping[str, torch.Tensor]
) -> list[tuple[RecordedNet, RecordedGraph]]:
    """The programs of a package on the current device, which share its constants; raises PackageError."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.zeros((), device=device)  # creates the context
    cubins = {kernel.source: bytes(archive.view(kernel.source)) for kernel in manifest.kernels}
    functions = KernelFunctions([(kernel.function, cubins[kernel.source]) for kernel in manifest.kernels], archive.path)
    texts = {name: bytes(archive.view(name)) for name in manifest.sums if re.fullmatch(PLAN_MEMBER, name)}
    plans = CudnnPlans(texts, archive.path) if texts else None
    known: dict[str, torch.Tensor] = {}
    made: list[tuple[RecordedNet, RecordedGraph]] = []
    for members in manifest.programs:
        where = f"{members.program} of {archive.path}"
        recorded = read_recorded(archive.view(members.program), where, len(manifest.kernels))
        for block in recorded.blocks:
            _check_constant(where, block.constant, block.size_bytes, tensors)
        for node in recorded.nodes:
            if isinstance(node, CudnnRun) and node.plan not in texts:
                raise PackageError(f"{where}.nodes", node.plan, "a plan that the package has")
        try:
            graph, plan = read_graph(archive, members.graph), read_plan(archive, members.plan)
            check_fit(archive, graph, plan, recorded)
        except PackageError:
            raise
        except InputError as error:  # of graphs and plans
            raise PackageError(
                f"{error.argument} of {archive.path}", error.value, error.expected, error.todo
            ) from error
        captured = Captured(graph, {}, recorded.arguments, recorded.results, strides=recorded.strides)
        runnable = PackagedCudaProgram(recorded, functions, tensors, known, device, plans)
        made.append((RecordedNet(plan, captured, runnable), recorded))
    return made


def _check_constant(where: str, name: str, size_bytes: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise PackageError if a block's constant is missing or of another size."""
    if not name:
        return
    found = tensors.get(name)
    size = -1 if found is None else found.numel() * found.element_size()
    if size != size_bytes:
        raise PackageError(f"{where}.blocks", name, f"a tensor of {size_bytes} bytes")
