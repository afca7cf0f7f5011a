"""triton.group_norm: a group norm of NHWC images or volumes with ReLU or SiLU, in two launches (docs/kernels/triton.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from convoy.engines.base import Buffers, Engine, Executable, Packed
from convoy.engines.gpu.device_tensors import as_images, dense_nhwc
from convoy.engines.gpu.gpu_support_checks import subgraph_support, values_support
from convoy.engines.group_norm import ACTIVATIONS, LEAKY, GroupNorm, group_norms
from convoy.engines.triton.triton_build import KernelBuild, TritonKernel, interpreting
from convoy.errors import LaunchError
from convoy.graph.ir import Graph
from convoy.problem import DTYPE_BYTES, Knobs, Problem, SubgraphProblem
from convoy.support import Support
from convoy.target import Target

MOST_PARTS = 256
"""Parts of an image that are summed apart, at most: each program of the second kernel reads all of its channels' parts."""

MOST_PART_VALUES = 8192
"""Parts times channels of a tile, at most, where there are more than 64 parts: the second kernel holds them in registers."""

MOST_SIZE = 256
"""Channels of the largest group: a tile holds whole groups."""

MOST_IMAGES = (1 << 16) - 1
"""Limit of a grid's second dimension."""

_LAUNCHES_US, _BYTES_US, _CACHED_US, _CACHE_BYTES = 3.0, 2.4e6, 5e6, 30e6
"""Two launches; bytes a microsecond from memory and from an H100's second-level cache, and what stays there."""


class GroupNormExecutable(Executable):
    """Both kernels of one problem."""

    def __init__(self, engine: str, norm: GroupNorm, knobs: Knobs, target: Target) -> None:
        self.norm, self.parts = norm, knobs.integer("parts")
        self.workspace_bytes = workspace_of(norm, self.parts)
        block_c = knobs.integer("block_c")
        self._engine, self._warps = engine, knobs.integer("warps")
        self._columns = -(-norm.groups // (block_c // padded(norm)))
        self._waits = target.capability >= 90 and not interpreting()
        shape = {
            "SIZE": norm.size, "PADDED": padded(norm), "BLOCK_R": knobs.integer("block_r"), "BLOCK_C": block_c,
            "WAIT": self._waits,
        }  # fmt: skip
        self.sums, self.rest = (TritonKernel(build, target) for build in self._builds(shape))

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Scale, shift and a leaky activation's factors in fp32; nothing if there is none of them."""
        device = constants[0].device if constants else torch.device("cpu" if interpreting() else "cuda")
        return self.norm.constants(constants, device) if constants or self._leaky else ()

    @property
    def _leaky(self) -> bool:
        return self.norm.activation in LEAKY

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Sums, then the rest."""
        norm, y = self.norm, buffers.results[0]
        if y is None or workspace is None:
            raise LaunchError("triton.group_norm: no tensor was given to write to")
        x, y = dense_nhwc("x", as_images(buffers.args[0])), dense_nhwc("y", as_images(y))
        parts = workspace[: self.workspace_bytes].view(torch.float32)
        scale, shift, slopes = (*buffers.constants, None, None, None)[:3]
        grid = (self.parts, norm.images, self._columns)
        sizes = [norm.pixels, -(-norm.pixels // self.parts), norm.groups]
        self.sums(grid, [x, parts, *sizes])
        self.rest(grid, [x, scale, shift, slopes, parts, y, *sizes, self.parts, 1.0 / norm.pixels, norm.eps])

    def _builds(self, shape: Mapping[str, object]) -> list[KernelBuild]:
        """The two kernels: sums over parts of the pixels, then the results."""
        from convoy.engines.triton.kernels.group_norm_kernels import group_moments, group_normalise  # pyright: ignore[reportUnknownVariableType]

        images, sizes = f"*{self.norm.dtype}", dict.fromkeys(("pixels", "each", "groups"), "i32")
        row = "*fp32" if self.norm.scale or self.norm.shift or self._leaky else "none"
        rest = {
            "x": images, "scale": row, "shift": row, "slopes": "*fp32" if self._leaky else "none", "parts": "*fp32",
            "y": images, **sizes,
            "programs": "i32", "inverse": "fp32", "eps": "fp32",
        }  # fmt: skip
        more = {
            "PARTS": max(16, 1 << (self.parts - 1).bit_length()),
            "AFFINE": row != "none",
            "RELU": self.norm.activation == "relu",
            "SILU": self.norm.activation == "silu",
            "LEAKY": self._leaky,
        }
        return [
            self._build(group_moments, {"x": images, "parts": "*fp32", **sizes}, shape),
            self._build(group_normalise, rest, {**shape, **more}),
        ]

    def _build(self, function: Any, signature: Mapping[str, str], constants: Mapping[str, object]) -> KernelBuild:
        divisible = [name for name, kind in signature.items() if kind.startswith("*")]
        divisible += [] if self.norm.groups % 16 else ["groups"]
        return KernelBuild(
            self._engine, function, signature, constants, divisible, self._warps, 1, self._waits, tensor_cores=False
        )


def padded(norm: GroupNorm) -> int:
    """A group's channels, rounded up to a power of two."""
    return 1 << (norm.size - 1).bit_length()


def workspace_of(norm: GroupNorm, parts: int) -> int:
    """Bytes of the parts' sums."""
    return 4 * 2 * norm.images * parts * norm.channels


class TritonGroupNorm(Engine):
    """By itself, and with the activation behind it; see `kernels/group_norm_kernels.py`."""

    id = "triton.group_norm"
    family = "direct"
    devices = ("cuda",)
    trusted = False
    fuses_subgraphs = True

    def fusions(self, graph: Graph) -> Iterable[Sequence[str]]:
        """Each group norm with the activation that alone reads it."""
        return group_norms(graph, (*ACTIVATIONS, *LEAKY))

    def supports(self, problem: Problem, target: Target) -> Support:
        """Group norms of NHWC images or volumes in fp16, bf16 or fp32, on capability 8.0 and newer."""
        norm = GroupNorm.of(problem) if isinstance(problem, SubgraphProblem) else None
        layout = "nhwc" if norm is None else norm.layout
        if not (found := subgraph_support(problem, target, "computes group norms", layout)):
            return found
        if norm is None:
            return Support.no(
                "computes a group norm of images with ReLU, SiLU, leaky ReLU or no activation, got another subgraph"
            )
        if not 0 < norm.images <= MOST_IMAGES or norm.size > MOST_SIZE or not norm.pixels:
            return Support.no(
                f"needs 1 to {MOST_IMAGES} images and at most {MOST_SIZE} channels a group, got {norm.images} and {norm.size}"
            )
        return values_support(norm.dtype, norm.images * norm.pixels * norm.channels)

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Tiles of 2048 to 8192 values, with as many parts as fill the GPU once, twice or four times."""
        norm = _known(problem)
        least, most = padded(norm), max(padded(norm), 1 << (norm.channels - 1).bit_length())
        found: list[Knobs] = []
        for values, warps in ((4096, 4), (2048, 4), (8192, 8)):
            for block_c in dict.fromkeys(max(least, min(most, wanted)) for wanted in (64, 128, 32)):
                block_r = max(1, values // block_c)
                for waves in (2, 4, 1):
                    programs = norm.images * -(-norm.groups // (block_c // least))
                    most_parts = min(MOST_PARTS, max(64, MOST_PART_VALUES // block_c))
                    parts = min(most_parts, -(-norm.pixels // block_r), -(-waves * target.units // programs))
                    found.append(Knobs.of(block_r=block_r, block_c=block_c, warps=warps, parts=max(1, parts)))
        return sorted(dict.fromkeys(found), key=lambda knobs: self.estimate_us(problem, knobs, target) or 0.0)

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """The parts' sums."""
        return workspace_of(_known(problem), knobs.integer("parts"))

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float | None:
        """X once from memory and once more, from the cache if it fits; y once."""
        norm = _known(problem)
        one = norm.images * norm.pixels * norm.channels * DTYPE_BYTES[norm.dtype]
        again = one / (_CACHED_US if one <= _CACHE_BYTES else _BYTES_US)
        columns = -(-norm.groups // (knobs.integer("block_c") // padded(norm)))
        busy = min(1.0, knobs.integer("parts") * norm.images * columns / target.units)
        waste = columns * knobs.integer("block_c") / norm.channels
        sums = workspace_of(norm, knobs.integer("parts")) * knobs.integer("parts") / _CACHED_US
        return _LAUNCHES_US + sums + (2 * one / _BYTES_US + again) * waste / busy

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile both kernels."""
        return GroupNormExecutable(self.id, _known(problem), knobs, target)


def _known(problem: Problem) -> GroupNorm:
    assert isinstance(problem, SubgraphProblem)
    norm = GroupNorm.of(problem)
    assert norm is not None
    return norm


ENGINE = TritonGroupNorm()
