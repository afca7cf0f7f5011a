"""Convolution by FFT with torch.fft: shared by the engines for whole images and for tiles.

The method is the circular convolution theorem on overlapping tiles of the padded image (overlap-save; Mathieu, Henaff and
LeCun, arXiv 1312.5851). At each frequency the spectrum of y is the matrix product of x's spectra [tiles, c] and the conjugate
of the weight's [c, k]. Outputs that wrap around are cut off. With a stride all outputs are computed and some are kept; a
dilated filter is transformed at its dilated size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch

from convoy.engines.activations import finish
from convoy.engines.base import Buffers, Packed
from convoy.engines.cost_model import KernelWork
from convoy.engines.product_precision import products
from convoy.engines.scratch import Scratch
from convoy.engines.support_checks import compute_dtype
from convoy.engines.torch_engine import TorchExecutable
from convoy.problem import ConvProblem
from convoy.support import Support
from convoy.target import Target

PACK_BYTES: Final = 64 << 20
"""Bytes of filters that are transformed in float64 at a time."""

SPECTRUM_SHARE: Final = 32
"""The weight's spectrum may take this part of the device's memory: 2.5 GiB of 80, 0.5 of 16."""

SPECTRUM_PASSES: Final = 6
"""Times that a spectrum is read or written, the transform itself counted as two."""

UNKNOWN_MEMORY_BYTES: Final = 8 << 30
"""Taken for a machine that does not tell its memory."""

_rfft2: Final[Callable[..., torch.Tensor]] = cast("Any", torch.fft).rfft2
_irfft2: Final[Callable[..., torch.Tensor]] = cast("Any", torch.fft).irfft2


class SpectralConvolution(TorchExecutable):
    """fprop of one problem in tiles of `side_h` x `side_w` pixels, `images` at a time.

    The workspace holds the padded images, the spectra and their products. The plans and temporaries of torch.fft come on top,
    because torch.fft accepts no workspace.
    """

    def __init__(self, problem: ConvProblem, side_h: int, side_w: int, images: int) -> None:
        self._problem, self._images = problem, max(1, min(images, problem.n))
        self._side_h, self._side_w = side_h, side_w
        self._step_h, self._step_w = side_h - span(problem)[0] + 1, side_w - span(problem)[1] + 1
        height, width = padded_sides(problem)
        self._out_h, self._out_w = height - span(problem)[0] + 1, width - span(problem)[1] + 1
        self._rows, self._columns = -(-self._out_h // self._step_h), -(-self._out_w // self._step_w)
        self._dtype = compute_dtype(problem)
        self._spectrum = torch.complex128 if self._dtype == torch.float64 else torch.complex64
        self._layouts = {count: self._layout(count) for count in {self._images, problem.n % self._images} - {0}}
        self.workspace_bytes = self._layouts[self._images].size_bytes

    def _layout(self, images: int) -> Scratch:
        """The workspace for `images` images, in the order in which `_run` names its tensors."""
        problem, rows, columns = self._problem, self._rows, self._columns
        tiles, frequencies = images * rows * columns, self._frequencies
        height, width = (rows - 1) * self._step_h + self._side_h, (columns - 1) * self._step_w + self._side_w
        scratch = Scratch()
        scratch.add((images, problem.c, height, width), self._dtype)
        scratch.add((images, rows, columns, problem.c, self._side_h, self._side_w // 2 + 1), self._spectrum)
        scratch.add((frequencies, problem.groups, tiles, problem.c // problem.groups), self._spectrum)
        scratch.add((frequencies, problem.groups, tiles, problem.k // problem.groups), self._spectrum)
        scratch.add((tiles, problem.k, self._side_h, self._side_w // 2 + 1), self._spectrum)
        scratch.add((images, rows, columns, problem.k, self._side_h, self._side_w), self._dtype)
        single = rows == columns == 1
        scratch.add((0,) if single else (images, problem.k, rows, self._step_h, columns, self._step_w), self._dtype)
        return scratch

    @property
    def _frequencies(self) -> int:
        return self._side_h * (self._side_w // 2 + 1)

    def work(self) -> KernelWork:
        """Complex products, four times the real ones at half their rate; spectra are moved a few times each."""
        problem, itemsize = self._problem, 2 * self._dtype.itemsize
        spectra = problem.n * self._rows * self._columns * self._frequencies * itemsize
        chunks = -(-problem.n // self._images)
        weight = self._frequencies * problem.c // problem.groups * problem.k * itemsize
        moved = problem.bytes_min * 3 + SPECTRUM_PASSES * spectra * (problem.c + problem.k) + chunks * weight
        products = spectra / itemsize * problem.c // problem.groups * problem.k
        return KernelWork(16.0 * products, moved, 10 * chunks)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The conjugate spectrum of the weight, [frequencies · groups, c / groups, k / groups], computed in float64."""
        problem, weight = self._problem, constants[0]
        groups, per_group, outputs = problem.groups, problem.c // problem.groups, problem.k // problem.groups
        shape = (self._frequencies, groups, per_group, outputs)
        spectrum = torch.empty(shape, dtype=self._spectrum, device=weight.device)
        by_group = weight.view(groups, outputs, per_group, problem.r, problem.s)
        count = max(1, PACK_BYTES // (groups * per_group * self._frequencies * 16))
        for first in range(0, outputs, count):
            part = by_group[:, first : first + count].double()
            spread = part.new_zeros((*part.shape[:3], self._side_h, self._side_w))
            rows, columns = span(problem)
            spread[..., : rows : problem.dilation_h, : columns : problem.dilation_w] = part
            found: torch.Tensor = _rfft2(spread).conj().flatten(3)
            spectrum[..., first : first + count].copy_(found.permute(3, 0, 2, 1))
        return spectrum.view(-1, per_group, outputs), *constants[1:]

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """All images, some at a time, then the epilogue."""
        problem, y = self._problem, buffers.results[0]
        assert y is not None
        for first in range(0, problem.n, self._images):
            x = buffers.args[0][first : first + self._images]
            self._run(x, buffers.constants[0], y[first : first + len(x)], workspace)
        bias = buffers.constants[1] if problem.epilogue.bias else None
        residual = buffers.args[1] if problem.epilogue.residual else None
        finish(y, bias, residual, problem.epilogue.activation)

    def _run(self, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, workspace: torch.Tensor | None) -> None:
        problem, groups = self._problem, self._problem.groups
        pieces = self._layouts[len(x)].views(workspace)
        padded, spectra, operand, product, folded, outputs, whole = pieces
        padded.zero_()
        padded[:, :, problem.pad_h :, problem.pad_w :][:, :, : problem.h, : problem.w].copy_(x)
        _rfft2(self._tiles(padded), out=spectra)
        tiles = len(x) * self._rows * self._columns
        by_group = spectra.view(tiles, groups, problem.c // groups, self._frequencies)
        operand.copy_(by_group.permute(3, 1, 0, 2))
        with products(problem.numerics, x.device):
            torch.bmm(operand.flatten(0, 1), weight, out=product.flatten(0, 1))
        folded.view(tiles, groups, problem.k // groups, self._frequencies).copy_(product.permute(2, 1, 3, 0))
        _irfft2(folded.view((*outputs.shape[:-1], -1)), s=(self._side_h, self._side_w), out=outputs)
        if whole.numel():
            whole.copy_(outputs[..., : self._step_h, : self._step_w].permute(0, 3, 1, 4, 2, 5))
            found = whole.view(len(x), problem.k, self._rows * self._step_h, self._columns * self._step_w)
        else:
            found = outputs[:, 0, 0]
        y.copy_(found[:, :, : self._out_h : problem.stride_h, : self._out_w : problem.stride_w])

    def _tiles(self, padded: torch.Tensor) -> torch.Tensor:
        """Overlapping tiles of padded images, [n, rows, columns, c, side_h, side_w], as a view."""
        image, channel, row, pixel = padded.stride()
        shape = (len(padded), self._rows, self._columns, self._problem.c, self._side_h, self._side_w)
        strides = (image, row * self._step_h, pixel * self._step_w, channel, row, pixel)
        return padded.as_strided(shape, strides, padded.storage_offset())


def span(problem: ConvProblem) -> tuple[int, int]:
    """Pixels that the dilated filter spans."""
    return problem.dilation_h * (problem.r - 1) + 1, problem.dilation_w * (problem.s - 1) + 1


def padded_sides(problem: ConvProblem) -> tuple[int, int]:
    """Sides of the zero-padded image."""
    return problem.h + 2 * problem.pad_h, problem.w + 2 * problem.pad_w


def fast_length(least: int) -> int:
    """The smallest length of at least `least` that is even and has no prime factor over 5, which FFTs are quick at."""
    length = least + least % 2
    while True:
        rest = length
        for factor in (2, 3, 5):
            while rest % factor == 0:
                rest //= factor
        if rest == 1:
            return length
        length += 2


def spectrum_fits(problem: ConvProblem, side_h: int, side_w: int, target: Target) -> Support:
    """Whether the weight's spectrum takes at most 1 / `SPECTRUM_SHARE` of the memory."""
    size = side_h * (side_w // 2 + 1) * problem.c // problem.groups * problem.k * 2 * compute_dtype(problem).itemsize
    limit = (target.memory_bytes or UNKNOWN_MEMORY_BYTES) // SPECTRUM_SHARE
    if size > limit:
        return Support.no(f"the weight's spectrum would take {size >> 20} MiB, over {limit >> 20} MiB")
    return Support.yes()
