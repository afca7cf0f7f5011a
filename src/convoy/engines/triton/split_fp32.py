"""triton.split_fp32: strict fp32 convolution on tensor cores by products of split operands (docs/kernels/split_fp32.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from convoy.engines.base import Buffers, Engine, Executable, Packed
from convoy.engines.triton.compiled import Build, Kernel, interpreting
from convoy.engines.triton.marking import MOST_MARKS, UNMARKED, MarkingExecutable
from convoy.engines.triton.requirements import conv_support
from convoy.engines.triton.swapped import tensor_support
from convoy.engines.triton.swapped_launch import box_type, pack_bias, pack_tiles
from convoy.engines.triton.tensors import as_floats, checked, scratch
from convoy.engines.triton.tiles import Tile, View, candidate_tiles, conv_view, estimate_us, row_view
from convoy.problem import ConvProblem, Knobs, Problem, TensorSpec
from convoy.support import Support
from convoy.target import Target

_MAXIMA = 512
_BLOCKS = (1024, 2048, 4096)
"""Values that a thread block has on its way at once: large images are read in few steps, of small ones every block has some."""

_NOT_HERE = ("PRECISION", "DTYPE", "TRIGGER", "PREFETCH_BYTES", "WARPS")
"""Constants of the swapped kernel that the split one does not have."""

AHEAD_BYTES = 1 << 24
"""Weights asked for ahead, at most: a third of an H100's L2 cache, which holds the planes too."""

_HEADER_BYTES = 4096
"""The maxima and 1 / s at the workspace's start."""


def plane_view(problem: ConvProblem) -> View:
    """The problem on fp16 planes; a 1x1 convolution of stride 1 as one row of pixels."""
    view = (
        row_view(problem) if problem.is_pointwise and problem.stride_h * problem.stride_w == 1 else conv_view(problem)
    )
    return replace(view, bytes_each=2)


def split_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hi, lo (fp16) and 1 / s (fp32, one a channel) of a weight [k, c, r, s]: weight · s = hi + lo / 2048."""
    wide = weight.double()
    finite = torch.where(wide.isfinite(), wide.abs(), 0.0)
    largest = finite.flatten(1).amax(dim=1).clamp_min(2.0**-112)
    exponent = 14 - torch.floor(torch.log2(largest))
    scaled = wide * torch.exp2(exponent)[:, None, None, None]
    high = scaled.half()
    low = torch.where(high.isfinite(), (scaled - high.double()) * 2048, 0.0).half()
    return high, low, torch.exp2(-exponent).float()


class SplitExecutable(MarkingExecutable):
    """Three launches (largest |x|, split, product), a fourth where the reduction is split; two or three where x has marks."""

    def __init__(self, engine: str, problem: ConvProblem, tile: Tile, target: Target, view: View | None = None) -> None:
        self.elements, self.target = problem.x_spec.elements, target
        super().__init__(engine, view or plane_view(problem), tile, "fp32", problem.epilogue, target)
        self.partial_bytes = self.workspace_bytes
        self.workspace_bytes = plane_bytes(problem) + self.partial_bytes
        if self.view.pixels == 0:
            self.workspace_bytes = 0
            return
        from convoy.engines.triton.kernels import split

        dependent = not interpreting()
        self.block = next((block for block in _BLOCKS if _MAXIMA * block >= self.elements), _BLOCKS[-1])
        # Elements are a multiple of 8 at least: c is.
        even = ["elements"] if self.elements % 16 == 0 else []
        self.maxima = Kernel(
            Build(
                engine, split.absolute_maxima,
                {"x": "*fp32", "maxima": "*fp32", "w_bytes": "*i8" if dependent else "none", "elements": "i32",
                 "weight_bytes": "i32"},
                {"BLOCK": self.block, "WAIT": dependent}, ["x", "maxima", "w_bytes", *even], dependent=dependent,
            ),
            target,
        )  # fmt: skip
        self.planes = Kernel(
            Build(
                engine, split.split_planes,
                {"x": "*fp32", "maxima": "*fp32", "inverse": "*fp32", "planes": "*fp16", "elements": "i32"},
                {"w_bytes": None, "weight_bytes": 0, "VALID": _MAXIMA, "COUNT": _MAXIMA, "BLOCK": self.block,
                 "WAIT": dependent},
                ["x", "maxima", "inverse", "planes", *even], dependent=dependent,
            ),
            target,
        )  # fmt: skip
        self.told: dict[int, Kernel] = {}

    def _build(self, engine: str, dtype: str) -> Build:
        from convoy.engines.triton.kernels.split import split_conv

        build = super()._build(engine, dtype)
        tile, dependent = self.tile, not interpreting()
        constants = {n: v for n, v in build.constants.items() if n not in _NOT_HERE}
        sizes = {n: t for n, t in build.signature.items() if t == "i32"}
        signature = {
            "x": box_type("fp16", self.x_box), "w": box_type("fp16", [tile.block_k, tile.block_c]),
            **{name: build.signature[name] for name in ("y", "residual", "bias")},
            "x_inverse": "*fp32", "w_inverse": "*fp32", **sizes,
        }  # fmt: skip
        constants |= {"WAIT": dependent, "BODY_FIRST": tile.warps == 4, **UNMARKED}
        return Build(
            engine, split_conv, signature, constants, ["bias", "x_inverse", "w_inverse"],
            tile.warps, tile.stages, dependent,
        )  # fmt: skip

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Both planes of the weight in tile order; the bias and 1 / s padded to whole tiles."""
        high, low, inverse = split_weight(constants[0])
        planes = torch.cat((pack_tiles(high, self.tile), pack_tiles(low, self.tile)))
        rows = [pack_bias(values, self.tile.block_k) for values in (*constants[1:], inverse)]
        return (planes, *rows)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Split x, multiply, and add the parts."""
        view = self.view
        if view.pixels == 0:
            return
        x, _, _ = checked(buffers, self.epilogue.residual, slices=True)
        room = scratch(workspace, self.workspace_bytes)
        assert room is not None
        maxima = as_floats(room, _MAXIMA)
        x_inverse = room[_HEADER_BYTES // 2 :][:4].view(torch.float32)
        planes = room[_HEADER_BYTES:][: 4 * self.elements].view(torch.float16)
        weight = buffers.constants[0]
        ahead = min(weight.numel() * weight.element_size(), AHEAD_BYTES)
        grid, asked = (-(-self.elements // self.block), 1, 1), None if interpreting() else weight
        if len(buffers.args) > 1 + self.epilogue.residual:
            maxima = buffers.args[-1][0].view(torch.float32)
            arguments = [x, maxima, x_inverse, planes, asked, self.elements, ahead]
            self.told[maxima.numel()](grid, arguments)
        else:
            self.maxima((_MAXIMA, 1, 1), [x, maxima, asked, self.elements, ahead])
            self.planes(grid, [x, maxima, x_inverse, planes, self.elements])
        partial = room[self.workspace_bytes - self.partial_bytes :] if self.partial_bytes else None
        self.multiply(planes, buffers, partial, (x_inverse, buffers.constants[-1]))

    def accept_marks(self, spec: TensorSpec) -> bool:
        """Takes the largest magnitudes from them, unless they are so many that reading them would cost more."""
        _, lines, words = spec.shape
        count = lines * words
        if self.view.pixels == 0 or count > MOST_MARKS:
            return False
        if count not in self.told:
            plain, dependent = self.planes.build, not interpreting()
            signature = {**plain.signature, "w_bytes": "*i8" if dependent else "none", "weight_bytes": "i32"}
            constants = {n: v for n, v in plain.constants.items() if n not in ("w_bytes", "weight_bytes")}
            constants |= {"VALID": count, "COUNT": 1 << (count - 1).bit_length()}
            even = [*plain.divisible, "w_bytes"]
            build = replace(plain, signature=signature, constants=constants, divisible=even)
            self.told[count] = Kernel(build, self.target)
        return True

    def x_images(self) -> int:
        """Two planes of every image."""
        return 2 * self.view.n


def plane_bytes(problem: ConvProblem) -> int:
    """Bytes of the header and of both planes of x, up to a multiple of 256."""
    return _HEADER_BYTES + -(-4 * problem.x_spec.elements // 256) * 256


class SplitFp32Engine(Engine):
    """fp16x3 with short sums; see `kernels/split.py`."""

    id = "triton.split_fp32"
    family = "implicit_gemm"
    trusted = False

    def supports(self, problem: Problem, target: Target) -> Support:
        """fp32 NHWC convolutions on Hopper, c and k multiples of 8."""
        if not (found := conv_support(problem, target, 90)):
            return found
        assert isinstance(problem, ConvProblem)
        if problem.x_dtype != "fp32":
            return Support.no(f"splits fp32, got {problem.x_dtype}")
        if problem.groups != 1:
            return Support.no(f"needs groups = 1, got {problem.groups}")
        return tensor_support(plane_view(problem))

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Tiles by guessed time; an iteration's sum is a run, so it is 128 channels at most."""
        assert isinstance(problem, ConvProblem)
        view = plane_view(problem)
        sizes = tuple(b for b in (128, 64, 32) if b < 2 * view.c or b == 32)
        if view.strided:
            sizes = tuple(b for b in (128, 64, 32, 16) if view.c % b == 0)
        tiles = candidate_tiles(
            view, block_cs=sizes, pixels=(32, 64, 128), ks=(64, 128), units=target.units, planes=3, limit=40
        )
        whole = [t for t in tiles if view.n % t.block_n == 0]
        return [tile.knobs for tile in (whole or [Tile(64, 1, 8, 8, sizes[-1], 3)])[:24]]

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """Planes of x, and the partial sums of a split reduction."""
        assert isinstance(problem, ConvProblem)
        view, tile = plane_view(problem), Tile.of(knobs)
        if view.pixels == 0:
            return 0
        splits, _ = tile.splits(view)
        return plane_bytes(problem) + (4 * splits * view.pixels * view.k if splits > 1 else 0)

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """The tiles' cost model and the two launches that split x."""
        assert isinstance(problem, ConvProblem)
        guess = estimate_us(plane_view(problem), Tile.of(knobs), target.units, planes=3)
        return guess + 2.0 + 12 * problem.x_spec.elements / 4e6

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile one tile."""
        assert isinstance(problem, ConvProblem)
        return SplitExecutable(self.id, problem, Tile.of(knobs), target)


ENGINE = SplitFp32Engine()
