"""zeroskip.channels: strict fp32 by split products on tensor cores, over the live channels of an image.

It works as `triton.split_fp32`, but the first two launches also find the channels that are not zero all over an image and
move them to the front. The product then neither multiplies the other channels nor reads their weights
(docs/kernels/sparse-activations.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from convoy.engines.activation_sparsity import sparsity_percent
from convoy.engines.base import Buffers, Engine, Executable, Packed
from convoy.engines.gpu.device_tensors import checked, scratch
from convoy.engines.gpu.gpu_support_checks import is_strict
from convoy.engines.scratch import Scratch
from convoy.engines.triton import triton_split_fp32
from convoy.engines.triton.igemm_swap_ab_launch import box_type, pack_bias, pack_tiles, workspace_bytes
from convoy.engines.triton.marking_executables import MOST_MARKS, UNMARKED, MarkingExecutable, block_pixels, mark_slices
from convoy.engines.triton.split_planes import AHEAD_BYTES, split_weight
from convoy.engines.triton.triton_build import KernelBuild, TritonKernel, interpreting, shared_limit
from convoy.engines.triton.triton_igemm_swap_ab import tensor_support
from convoy.engines.triton.triton_tile_search import candidate_tiles
from convoy.engines.triton.triton_tiles import ConvView, TritonTile, conv_view, estimate_us
from convoy.problem import ConvProblem, Knobs, Problem, TensorSpec
from convoy.support import Support
from convoy.target import Target

DENSE_SHARE = 0.875
"""Share of live channels from which all are multiplied: fewer blocks by less than an eighth do not pay for gathered weights."""

MOST_CHANNELS = 2048
"""One thread block orders an image's channels."""

_SPLIT_VALUES = 4096
_TILES, _SHORT = 12, 4
_LOOK_US, _BYTES_US = 3.0, 3.0e6
_NOT_HERE = ("PRECISION", "DTYPE", "TRIGGER", "PREFETCH_BYTES", "WARPS")


def plane_view(problem: ConvProblem) -> ConvView:
    """The problem on fp16 planes."""
    return replace(conv_view(problem), bytes_each=2)


def _spills(tile: TritonTile) -> bool:
    """Two loops with blocks of 128 channels over such a tile want more registers than four warps have."""
    return tile.warps == 4 and tile.block_c >= 128 and tile.block_k * tile.pixels >= 64 * 128


def _power(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def slices_of(problem: ConvProblem) -> int:
    """Slices of an image's pixels that are looked at by a thread block each: about as many blocks as a large GPU has places."""
    return mark_slices(problem.n, problem.h * problem.w, problem.c)


def layout(problem: ConvProblem, tile: TritonTile) -> Scratch:
    """The workspace: 1 / s, maxima, live bits, lists and their lengths, planes, parts of a split sum."""
    words, slices = -(-problem.c // 32), slices_of(problem)
    groups = -(-problem.n // tile.block_n)
    room = Scratch()
    room.add((1,), torch.float32)
    for shape in ((problem.n, slices, words), (problem.n, slices, words), (groups, problem.c), (groups,)):
        room.add(shape, torch.int32)
    room.add((2 * problem.x_spec.elements,), torch.float16)
    room.add((workspace_bytes(plane_view(problem), tile),), torch.uint8)
    return room


class LiveExecutable(MarkingExecutable):
    """Three launches (look, split, product), and a fourth where the reduction is split."""

    def __init__(self, engine: str, problem: ConvProblem, tile: TritonTile, target: Target) -> None:
        self.problem, self.target, self.engine = problem, target, engine
        super().__init__(engine, plane_view(problem), tile, "fp32", problem.epilogue, target)
        if self.view.pixels == 0:
            return
        self.room = layout(problem, tile)
        self.workspace_bytes = self.room.size_bytes
        self.words, self.slices = -(-problem.c // 32), slices_of(problem)
        self._dependent = not interpreting()
        self.look = TritonKernel(self._look_build(engine), target)
        self.planes = {self.slices: TritonKernel(self._split_build(engine, self.slices), target)}

    @property
    def split_pixels(self) -> int:
        """Pixels of a thread block of the second launch."""
        return max(1, _SPLIT_VALUES // _power(32 * self.words))

    def _look_build(self, engine: str) -> KernelBuild:
        from convoy.engines.sparse_activations.kernels.zeroskip_channels_kernels import look  # pyright: ignore[reportUnknownVariableType]

        signature = {"x": "*fp32", "maxima": "*i32", "alive": "*i32", "pixels": "i32", "c": "i32", "words": "i32"}
        constants = {"BLOCK_P": block_pixels(self.problem.h * self.problem.w, self.slices), "WAIT": self._dependent}
        return KernelBuild(
            engine, look, signature, constants, ["x", *self._even()], dependent=self._dependent, tensor_cores=False
        )

    def _split_build(self, engine: str, slices: int) -> KernelBuild:
        from convoy.engines.sparse_activations.kernels.zeroskip_channels_kernels import split_live  # pyright: ignore[reportUnknownVariableType]

        problem, tile = self.problem, self.tile
        pointers = {"x": "*fp32", "maxima": "*i32", "alive": "*i32", "inverse": "*fp32", "planes": "*fp16"}
        numbers = (
            "pixels",
            "c",
            "words",
            "looked",
            "alive_rows",
            "dense_from",
            "elements",
            "all_alive",
            "weight_bytes",
        )
        lists = {"order": "*i32", "counts": "*i32", "w_bytes": "*i8" if self._dependent else "none"}
        signature = {**pointers, **lists, **dict.fromkeys(numbers, "i32")}
        constants = {
            "MAXIMA": _power(problem.n * slices * self.words), "ROWS": _power(tile.block_n * slices),
            "WORDS": _power(self.words), "BLOCK_P": self.split_pixels, "BLOCK_C": tile.block_c, "GROUP": tile.block_n,
            "IMAGES": problem.n, "WAIT": self._dependent,
        }  # fmt: skip
        even = ["x", "planes", "w_bytes", *self._even(), *(["elements"] if problem.x_spec.elements % 16 == 0 else [])]
        return KernelBuild(
            engine, split_live, signature, constants, even, dependent=self._dependent, tensor_cores=False
        )

    def _even(self) -> list[str]:
        return ["c"] if self.problem.c % 16 == 0 else []

    def _build(self, engine: str, dtype: str) -> KernelBuild:
        from convoy.engines.sparse_activations.kernels.zeroskip_channels_kernels import live_conv  # pyright: ignore[reportUnknownVariableType]

        build = super()._build(engine, dtype)
        tile, dependent = self.tile, not interpreting()
        constants = {n: v for n, v in build.constants.items() if n not in _NOT_HERE}
        sizes = {n: t for n, t in build.signature.items() if t == "i32"}
        signature = {
            "x": box_type("fp16", self.x_box), "w": box_type("fp16", [tile.block_k, tile.block_c]),
            **{name: build.signature[name] for name in ("y", "residual", "bias")},
            "weights": "*fp16", "order": "*i32", "counts": "*i32", "x_inverse": "*fp32", "w_inverse": "*fp32",
            **sizes, "k_padded": "i32",
        }  # fmt: skip
        constants |= {"R": self.view.r, "WAIT": dependent, "BODY_FIRST": tile.warps == 4, **UNMARKED}
        return KernelBuild(
            engine, live_conv, signature, constants, ["bias", "weights", "x_inverse", "w_inverse", "k_padded"],
            tile.warps, tile.stages, dependent,
        )  # fmt: skip

    def sizes(self) -> list[int]:
        """The kernel's integers."""
        return [*super().sizes(), -(-self.view.k // self.tile.block_k) * self.tile.block_k]

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Both planes of the weight in tile order, and channel by channel; bias and 1 / s padded; whether all are finite."""
        weight, tile = constants[0], self.tile
        high, low, inverse = split_weight(weight)
        planes = torch.cat((pack_tiles(high, tile), pack_tiles(low, tile)))
        rows = torch.stack((high, low)).permute(0, 3, 4, 2, 1)
        rows = torch.nn.functional.pad(rows, (0, -weight.shape[0] % tile.block_k)).contiguous()
        padded = [pack_bias(values, tile.block_k) for values in (*constants[1:], inverse)]
        return (planes, *padded, rows, bool(weight.isfinite().all()))

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Look, split, multiply, and add the parts."""
        view, problem = self.view, self.problem
        if view.pixels == 0:
            return
        x, _, _ = checked(buffers, self.epilogue.residual, slices=True)
        inverse, maxima, alive, order, counts, planes, partial = self.room.views(
            scratch(workspace, self.workspace_bytes)
        )
        pixels, slices = problem.h * problem.w, self.slices
        weight, *_, w_inverse, rows, finite = buffers.constants
        if len(buffers.args) > 1 + self.epilogue.residual:
            maxima, alive = buffers.args[-1]
            slices = maxima.shape[0] // problem.n
        else:
            self.look((slices, self.words, problem.n), [x, maxima, alive, pixels, problem.c, self.words])
        looked = problem.n * slices * self.words
        sizes = [pixels, problem.c, self.words, looked, slices, math.ceil(DENSE_SHARE * problem.c),
                 problem.x_spec.elements, int(not finite), min(weight.numel() * weight.element_size(), AHEAD_BYTES)]  # fmt: skip
        grid = (-(-pixels // self.split_pixels), problem.n, 1)
        self.planes[slices](
            grid, [x, maxima, alive, inverse, planes, order, counts, weight if self._dependent else None, *sizes]
        )
        self.multiply(planes, buffers, partial if partial.numel() else None, (rows, order, counts, inverse, w_inverse))

    def accept_marks(self, spec: TensorSpec) -> bool:
        """Takes the marks instead of searching, unless reading all marks would cost more."""
        _, lines, words = spec.shape
        slices = lines // self.problem.n
        if words != self.words or self.view.pixels == 0 or lines * words > MOST_MARKS:
            return False
        if slices not in self.planes:
            self.planes[slices] = TritonKernel(self._split_build(self.engine, slices), self.target)
        return True

    def x_images(self) -> int:
        """Two planes of every image."""
        return 2 * self.view.n


class ChannelsEngine(Engine):
    """fp16x3 over live channels; see `kernels/zeroskip_channels_kernels.py`."""

    id = "zeroskip.channels"
    family = "implicit_gemm"
    offered_by_default = False
    writes_slices = True
    devices = ("cuda",)
    trusted = False
    skips_zeros = True
    zeros_kind = "dead_channels"
    quick_settings = 3
    """Settings at effort `quick`: if few channels are dead, the default is a little slower than the dense kernel, and no other
    setting wins."""

    def supports(self, problem: Problem, target: Target) -> Support:
        """Strict fp32 NHWC convolutions on Hopper, c and k multiples of 8, at most 2048 channels, without pooling."""
        if isinstance(problem, ConvProblem) and problem.x_dtype == "fp32" and not is_strict(problem):
            return Support.no(f"needs numerics strict, got {problem.numerics}")
        if not (found := triton_split_fp32.ENGINE.supports(problem, target)):
            return found
        assert isinstance(problem, ConvProblem)
        if problem.c > MOST_CHANNELS:
            return Support.no(f"needs at most {MOST_CHANNELS} channels, got {problem.c}")
        if problem.n == 0:
            return Support.no("needs a batch of at least 1, got 0")
        return tensor_support(plane_view(problem))

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """The tiles of a dense input by rising estimated time, some with blocks of 32 channels, for few live channels."""
        assert isinstance(problem, ConvProblem)
        view = plane_view(problem)
        sizes = tuple(b for b in (128, 64, 32) if b < 2 * view.c or b == 32)
        if view.strided:
            sizes = tuple(b for b in (128, 64, 32, 16) if view.c % b == 0)
        tiles = candidate_tiles(
            view,
            block_cs=sizes,
            pixels=(32, 64, 128),
            ks=(64, 128),
            units=target.units,
            planes=3,
            limit=60,
            shared=shared_limit(target),
        )
        whole = [tile for tile in tiles if view.n % tile.block_n == 0 and not _spills(tile)] or [
            TritonTile(64, 1, 8, 8, sizes[-1], 3)
        ]
        short = [tile for tile in whole if tile.block_c == sizes[-1]][:_SHORT]
        chosen = sorted({*whole[:_TILES], *short}, key=whole.index)
        return [tile.knobs for tile in chosen]

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """Lists, planes, parts."""
        assert isinstance(problem, ConvProblem)
        return layout(problem, TritonTile.of(knobs)).size_bytes if plane_view(problem).pixels else 0

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """The time of a dense convolution over the channels that are alive, and of looking for them."""
        assert isinstance(problem, ConvProblem)
        tile, view = TritonTile.of(knobs), plane_view(problem)
        live = problem.c * (100 - (sparsity_percent(knobs) or 0)) / 100
        if live < DENSE_SHARE * problem.c:
            view = replace(view, c=max(1, math.ceil(live / tile.block_c)) * tile.block_c)
        guess = estimate_us(view, tile, target.units, planes=3)
        return guess + _LOOK_US + 12 * problem.x_spec.elements / _BYTES_US

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile one tile."""
        assert isinstance(problem, ConvProblem)
        return LiveExecutable(self.id, problem, TritonTile.of(knobs), target)


ENGINE = ChannelsEngine()
