"""Winograd convolution with PyTorch's operations: shared by the engines of the two tile sizes.

Summed over channels, the middle of a tile's formula is one matrix product for each of the (m + 2)^2 positions: 9 m^2 / (m +
2)^2 times fewer multiplications than the direct sum, 2.25 for m = 2 and 4 for m = 4.

Channels are innermost everywhere, so that each step of a transform adds whole rows of channels: the padded image [n, height,
width, c] is transformed along its height, then along its width, into [(m + 2)^2, tiles, c].
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

import torch

from convoy.engines.activations import finish
from convoy.engines.algorithms.winograd_transforms import WinogradTile
from convoy.engines.base import Buffers, Packed
from convoy.engines.cost_model import KernelWork
from convoy.engines.product_precision import products
from convoy.engines.scratch import Scratch
from convoy.engines.support_checks import compute_dtype, plain_convolution, transforms_allowed
from convoy.engines.torch_engine import TorchExecutable
from convoy.problem import ConvProblem, Problem
from convoy.support import Support

CHUNK_BYTES: Final = 8 << 20
"""Operands and results of the products handled at a time by default, so that the transforms find them in a cache."""


class WinogradConvolution(TorchExecutable):
    """fprop of one problem, `images` at a time, and `rows` of tiles at a time if `images` is 1.

    Transforms are computed in fp32 (fp64 for fp64 tensors). The operands of the products are rounded to `product_dtype`.
    `exact` keeps fp32 products from using TF32.
    """

    def __init__(
        self,
        problem: ConvProblem,
        tile: WinogradTile,
        images: int,
        rows: int,
        product_dtype: torch.dtype,
        *,
        exact: bool = False,
    ) -> None:
        self._problem, self._tile = problem, tile
        self._dtype, self._product_dtype = compute_dtype(problem), product_dtype
        self._numerics = "strict" if exact else problem.numerics
        self._rows, self._columns = tile_counts(problem, tile)
        aligned = problem.p % tile.m == 0 and problem.q % tile.m == 0 and problem.x_dtype in ("fp32", "fp64")
        self._in_place = aligned and problem.layout == "nhwc"
        self._image_spans, self._row_spans = _spans(problem.n, images), _spans(self._rows, rows)
        sizes = {(i.stop - i.start, r.stop - r.start) for i in self._image_spans for r in self._row_spans}
        self._layouts = {size: self._layout(*size) for size in sizes}
        self.workspace_bytes = max((layout.size_bytes for layout in self._layouts.values()), default=0)

    def _layout(self, images: int, rows: int) -> Scratch:
        """The workspace for `images` images and `rows` rows of tiles, in the order in which `_run` names its tensors."""
        tile, columns, c, k = self._tile, self._columns, self._problem.c, self._problem.k
        m, side = tile.m, tile.side
        width, grid = columns * m + 2, (images, rows, columns)
        scratch = Scratch()
        scratch.add((images, rows * m + 2, width, c), self._dtype)
        scratch.add((side, images, rows, width, c), self._dtype)
        scratch.add((side, side, *grid, c), self._product_dtype)
        scratch.add((side, side, *grid, k), self._product_dtype)
        scratch.add((side, side, *grid, k) if self._product_dtype != self._dtype else (0,), self._dtype)
        scratch.add((m, side, *grid, k), self._dtype)
        scratch.add((0,) if self._in_place else (images, rows, m, columns, m, k), self._dtype)
        read = tile.read_rooms * max(images * rows * width, side * prod(grid)) * c
        scratch.add((max(read, tile.write_rooms * side * prod(grid) * k),), self._dtype)
        return scratch

    def work(self) -> KernelWork:
        """Products of transformed operands; every slice of a transform is read and written a few times."""
        problem, side = self._problem, self._tile.side
        positions = side * side * problem.n * self._rows * self._columns
        chunks = len(self._image_spans) * len(self._row_spans)
        itemsize = self._product_dtype.itemsize
        moved = problem.bytes_min * 3 + self._tile.accesses * positions * (problem.c + problem.k) * itemsize
        moved += chunks * side * side * problem.c * problem.k * itemsize
        calls = chunks * (self._tile.calls + 6)
        return KernelWork(2.0 * positions * problem.c * problem.k, moved, calls, self._product_dtype != self._dtype)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The weight as [(m + 2)^2, c, k], transformed in float64 and rounded once."""
        side, problem = self._tile.side, self._problem
        transform = torch.tensor(self._tile.weight, dtype=torch.float64, device=constants[0].device)
        weight = torch.einsum("ir,kcrs,js->ijck", transform, constants[0].double(), transform)
        return weight.reshape(side * side, problem.c, problem.k).to(self._product_dtype), *constants[1:]

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """All images and rows of tiles, some at a time, each with its epilogue."""
        problem, y = self._problem, buffers.results[0]
        assert y is not None
        weight, bias = buffers.constants[0], buffers.constants[1] if problem.epilogue.bias else None
        for images in self._image_spans:
            for rows in self._row_spans:
                part = slice(rows.start * self._tile.m, min(rows.stop * self._tile.m, problem.p))
                self._run(buffers.args[0][images], rows, weight, bias, y[images, :, part], workspace)
                residual = buffers.args[1][images, :, part] if problem.epilogue.residual else None
                finish(y[images, :, part], None, residual, problem.epilogue.activation)

    def _run(
        self,
        x: torch.Tensor,
        rows: slice,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        y: torch.Tensor,
        workspace: torch.Tensor | None,
    ) -> None:
        """Some images' rows of tiles: y is the part of the result that they make."""
        problem, m, side, count = self._problem, self._tile.m, self._tile.side, rows.stop - rows.start
        pieces = self._layouts[len(x), count].views(workspace)
        padded, stage, v, product, widened, folded, outputs, room = pieces
        self._pad(x, rows.start * m - problem.pad_h, padded)
        self._read([_every(padded, 1, i, m, count) for i in range(side)], stage.unbind(0), room)
        self._read([_every(stage, 3, j, m, self._columns) for j in range(side)], v.unbind(1), room)
        with products(self._numerics, x.device):
            torch.bmm(v.view(side * side, -1, problem.c), weight, out=product.view(side * side, -1, problem.k))
        if widened.numel():
            product = widened.copy_(product)
        if bias is not None:
            product[1, 1] += bias  # the transform's second column is all ones: it reaches every output once
        if self._in_place:
            outputs = y.permute(0, 2, 3, 1).view(len(x), count, m, self._columns, m, problem.k)
        self._write(product.unbind(0), folded.unbind(0), room)
        self._write(folded.unbind(1), outputs.permute(2, 0, 1, 3, 4, 5).unbind(4), room)
        if not self._in_place:
            whole = outputs.view(len(x), count * m, self._columns * m, problem.k)
            y.copy_(whole[:, : y.shape[2], : problem.q].permute(0, 3, 1, 2))

    def _pad(self, x: torch.Tensor, top: int, padded: torch.Tensor) -> None:
        """Copy the image's rows from `top` on into a zero-padded tensor; rows outside the image stay zero."""
        padded.zero_()
        first, last = max(top, 0), min(top + padded.shape[1], self._problem.h)
        if first < last:
            inner = padded[:, first - top : last - top, self._problem.pad_w :][:, :, : self._problem.w]
            inner.copy_(x[:, :, first:last].permute(0, 2, 3, 1))

    def _read(self, slices: Sequence[torch.Tensor], out: Sequence[torch.Tensor], room: torch.Tensor) -> None:
        self._tile.read(slices, out, _divide(room, self._tile.read_rooms, out[0].shape))

    def _write(self, slices: Sequence[torch.Tensor], out: Sequence[torch.Tensor], room: torch.Tensor) -> None:
        self._tile.write(slices, out, _divide(room, self._tile.write_rooms, out[0].shape))


def _divide(room: torch.Tensor, count: int, shape: Sequence[int]) -> list[torch.Tensor]:
    """The first tensors of a shape in a flat part of the workspace."""
    size = prod(shape)
    return [room[i * size : (i + 1) * size].view(*shape) for i in range(count)]


def _every(x: torch.Tensor, dim: int, start: int, step: int, count: int) -> torch.Tensor:
    """`count` slices along a side: start, start + step, ..."""
    return x.narrow(dim, start, (count - 1) * step + 1)[(slice(None),) * dim + (slice(None, None, step),)]


def _spans(size: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def tile_counts(problem: ConvProblem, tile: WinogradTile) -> tuple[int, int]:
    """Tiles that cover y, down and across."""
    return -(-problem.p // tile.m), -(-problem.q // tile.m)


def chunks(problem: ConvProblem, tile: WinogradTile, device: str) -> list[tuple[int, int]]:
    """Numbers of images and rows of tiles worth handling at a time, the default first: a cacheful on a CPU, all on a GPU."""
    rows, columns = tile_counts(problem, tile)
    row_bytes = tile.side**2 * columns * (problem.c + problem.k) * compute_dtype(problem).itemsize
    fitting = max(1, CHUNK_BYTES // row_bytes)
    images = max(1, min(problem.n, fitting // rows))
    default = images, min(rows, fitting)
    found = [default, (1, rows), (max(1, problem.n), rows)]
    return list(dict.fromkeys(found[::-1] if device == "cuda" else found))


def winograd_support(problem: Problem) -> Support:
    """Whether F(m x m, 3x3) applies: a dense 3x3 filter at stride 1, and numerics that allow its rounding."""
    support = plain_convolution(problem)
    if not support or not isinstance(problem, ConvProblem):
        return support
    if (problem.r, problem.s) != (3, 3):
        return Support.no(f"needs a 3x3 filter, got {problem.r}x{problem.s}")
    for name in ("stride", "dilation"):
        sides = getattr(problem, f"{name}_h"), getattr(problem, f"{name}_w")
        if sides != (1, 1):
            return Support.no(f"needs {name} 1, got {sides[0]}x{sides[1]}")
    if problem.groups != 1:
        return Support.no(f"needs groups = 1, got {problem.groups}: a tile's products are too small to pay")
    return transforms_allowed(problem)
