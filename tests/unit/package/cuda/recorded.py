"""A package for a GPU that a fake CUDA driver can run: y = 2 (w x) + 1, by a fill, a copy, two kernels and a join."""

from __future__ import annotations

import struct
import subprocess
from functools import cache
from pathlib import Path

import torch
from torch import nn

from convoy.engines.compilers.host_compiler import compiler
from convoy.graph.text import digest
from convoy.measurement import detect_target
from convoy.package.cuda.cuda_contents import CudaContents, write_cuda_package
from convoy.package.cuda.recorded_graph import (
    Argument,
    Block,
    CudnnRun,
    DevicePlace,
    Edge,
    Join,
    KernelLaunch,
    MemoryCopy,
    MemoryFill,
    RecordedGraph,
)
from convoy.package.plan_choice import baseline_plan
from convoy.package.program_file import PackedTensor
from convoy.package.write import BoundNet, ModelInfo
from convoy.pipeline.captured_net import captured_net
from convoy.pipeline.isolation import isolate
from convoy.plan import Plan
from convoy.problem import TensorSpec
from convoy.program import BoundPlan
from convoy.settings import Settings
from convoy.target import Target

W = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0, 1.5, -1.0, 4.0])
VALUES = 32
INPUT, INNER, OUTPUT, WEIGHT = range(4)


class Scaled(nn.Module):
    """The module whose outputs the package gives."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", W.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[4, 8] to [4, 8]."""
        return 2 * (self.w * x) + 1


H100 = Target("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132, 80 << 30, 50 << 20, (("torch", "2.11"),))


@cache
def bound_net() -> BoundNet:
    """The graph and a plan of it; a package of recorded launches needs no executables."""
    target = detect_target("cpu")
    net = captured_net("scaled", isolate(Scaled().eval(), (torch.randn(4, 8),), {}), Settings(effort="none"), target)
    graph = net.captured.graph
    inputs = tuple(str(graph.values[name].spec) for name in graph.inputs)
    empty = Plan("scaled", digest(graph), inputs, target.to_dict(), "as_torch", (), "exact", 1.0, 1.0, 0, 0)
    return BoundNet(net.captured, BoundPlan((), (), (), (), 0, 0, baseline_plan(net, empty)), (), H100)


def launches(weight: str, plan: str = "") -> RecordedGraph:
    """The recorded graph; `weight` names the tensor of w, `plan` the member with a plan of cuDNN's in the last kernel's place.

    The fill and the copy write to the same place, so that the copy must come after; every order below matters.
    """
    captured = bound_net().captured
    x, y = captured.graph.inputs[0], captured.graph.outputs[0]
    spec, size = TensorSpec((4, 8), "fp32"), 4 * VALUES
    at = [DevicePlace(INPUT, 0), DevicePlace(OUTPUT, 64)]
    words = (Argument(struct.pack("<i", VALUES)), Argument(struct.pack("<f", 0.5)))
    pointers = tuple(
        Argument(bytes(8), ((0, place),)) for place in (DevicePlace(INNER, 256), DevicePlace(WEIGHT, 0), at[1])
    )
    tensor_map = Argument(bytes(range(128)), ((0, at[1]),), tensor_map=True)
    last = KernelLaunch(1, (2, 1, 1), (128, 1, 1), 100_000, (2, 1, 1), (tensor_map, words[0]))
    return RecordedGraph(
        inputs=(PackedTensor(x, spec, "any", 0),),
        outputs=(PackedTensor(y, spec, "any", 1),),
        places=tuple(at),
        arguments=captured.arguments,
        results=captured.results,
        strides=captured.strides,
        blocks=(Block(size), Block(256 + size), Block(64 + size), Block(4 * len(W), weight)),
        nodes=(
            MemoryFill(DevicePlace(INNER, 256), 0x7F800000, 4, VALUES),
            MemoryCopy(at[0], DevicePlace(INNER, 256), size),
            Join(),
            KernelLaunch(0, (1, 1, 1), (32, 1, 1), 0, (1, 1, 1), (*pointers, *words)),
            CudnnRun(plan, ((101, at[1]), (103, at[1])), DevicePlace(INNER, 0), 64) if plan else last,
        ),
        edges=(Edge(0, 1), Edge(1, 2), Edge(2, 3), Edge(3, 4, programmatic=not plan)),
    )


PLAN_TEXT = '{"scale":2}'
"""A plan of the fake cuDNN's: y = 2 x + 1."""


class ScaledByCudnn(nn.Module):
    """The module whose outputs a package with that plan gives."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[4, 8] to [4, 8]."""
        return 2 * (W * x + 0.5) + 1


def write(path: Path, count: int = 1, *, cudnn: bool = False) -> Path:
    """A package with the same program so many times; `cudnn`: with a plan of cuDNN's in it."""
    contents = CudaContents()
    weight = contents.tensors.name(W.view(torch.uint8))
    assert [contents.kernel(name, b"fake cubin\0") for name in ("affine", "doubled", "affine")] == [0, 1, 0]
    plan = contents.plan(PLAN_TEXT) if cudnn else ""
    info = ModelInfo("scaled", H100)
    write_cuda_package(path, [(bound_net(), launches(weight, plan))] * count, contents, info)
    return path


def compiled_fake(folder: Path) -> Path:
    """The fake driver, as `libcuda.so.1` in a folder."""
    made = folder / "libcuda.so.1"
    source = Path(__file__).with_name("fake_cuda.c")
    flags = ["-std=gnu11", "-O1", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([compiler(), *flags, str(source), "-o", str(made), "-ldl"], check=True, timeout=120)
    return made


def compiled_fake_cudnn(folder: Path) -> Path:
    """The fake cuDNN, as `libcudnn.so.9` in the folder of the fake driver."""
    made = folder / "libcudnn.so.9"
    source = Path(__file__).with_name("fake_cudnn.c")
    flags = ["-std=gnu11", "-O1", "-fPIC", "-shared", "-Wl,-soname,libcudnn.so.9"]
    command = [compiler(), *flags, str(source), str(folder / "libcuda.so.1"), "-Wl,-rpath,$ORIGIN", "-o", str(made)]
    subprocess.run(command, check=True, timeout=120)
    return made
