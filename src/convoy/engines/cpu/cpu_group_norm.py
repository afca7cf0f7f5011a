"""cpu.group_norm: group norm of channels_last images or volumes, with ReLU, SiLU or nothing, in C (docs/kernels/cpu.md)."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import torch

from convoy.engines.base import Executable, Packed
from convoy.engines.cpu.native_launch import Native, NativeExecutable
from convoy.engines.cpu.weight_tiles import ACTIVATIONS, STORED, storage_kernel
from convoy.engines.cpu_subgraph import CpuSubgraphEngine
from convoy.engines.group_norm import LEAKY, GroupNorm, group_norms
from convoy.graph.ir import Graph
from convoy.problem import Knobs, Problem, SubgraphProblem
from convoy.target import Target

SOURCE: Final = Path(__file__).with_name("group_norm.c")

LEAST_CHANNELS: Final = 64
"""Channels of a unit at least, where there are so many: whole lines of the cache."""

WHOLE: Final = 16
"""Floats of the longest vector register."""


class _GroupNorm(NativeExecutable):
    def __init__(self, norm: GroupNorm) -> None:
        (bits,) = struct.unpack("i", struct.pack("f", norm.eps))
        settings = (
            *(norm.images, norm.pixels, norm.channels, norm.size, groups_together(norm), torch.get_num_threads()),
            *(ACTIVATIONS.index(norm.activation), bits),
        )
        self._norm, self._settings = norm, (ctypes.c_int64 * len(settings))(*settings)
        self.workspace_bytes = workspace_of(norm)
        self.use(storage_kernel(SOURCE, GroupNormCpu.id, "convoy_group_norm", norm.dtype))

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Scale and shift, a value a channel, in fp32."""
        return tuple(constant.detach().float().contiguous() for constant in constants)

    def native(self, constants: Packed) -> Native | None:
        """Sums, then the normalised values."""
        norm = self._norm
        scale = constants[0] if norm.scale else None
        shift = constants[-1] if norm.shift else None
        if norm.images * norm.pixels == 0:
            return None
        return Native(self._settings, (("arg", 0), scale, shift, ("result", 0), ("workspace", 0)))


def groups_together(norm: GroupNorm) -> int:
    """Groups of a unit: enough for `LEAST_CHANNELS`, and whole vector registers if some more make them whole."""
    least = -(-LEAST_CHANNELS // norm.size)
    whole = least
    while whole * norm.size % WHOLE:
        whole += 1
    return whole if whole <= norm.groups else min(norm.groups, least)


def workspace_of(norm: GroupNorm) -> int:
    """Bytes of a mean and a factor for each channel of each image."""
    return 8 * norm.images * norm.channels


class GroupNormCpu(CpuSubgraphEngine):
    """Images in fp32 or bf16."""

    id = "cpu.group_norm"
    devices = ("cpu",)
    native = True
    builds_in_threads = True
    does = "computes group norms"
    layouts = ("nhwc", "ndhwc")
    fuses_subgraphs = True

    def fusions(self, graph: Graph) -> Iterable[Sequence[str]]:
        """Each group norm with the activation that alone reads it."""
        return group_norms(graph)

    def refusal(self, problem: SubgraphProblem) -> str:
        """It normalises values in fp32 and bf16."""
        norm = GroupNorm.of(problem)
        if norm is None or norm.activation in LEAKY:
            return "computes a group norm of images with ReLU, SiLU or no activation, got another subgraph"
        if problem.layout != norm.layout:
            return f"needs layout {norm.layout}, got {problem.layout}"
        return "" if norm.dtype in STORED else f"needs {' or '.join(STORED)}, got {norm.dtype}"

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """A mean and a factor for each channel."""
        del knobs
        norm = GroupNorm.of(problem) if isinstance(problem, SubgraphProblem) else None
        return workspace_of(norm) if norm is not None else 0

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """The library is compiled once for all problems."""
        del knobs, target
        assert isinstance(problem, SubgraphProblem)
        norm = GroupNorm.of(problem)
        assert norm is not None
        return _GroupNorm(norm)


ENGINE = GroupNormCpu()
