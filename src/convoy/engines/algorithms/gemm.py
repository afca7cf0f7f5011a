"""gemm: im2col and one matrix product for each group: the textbook lowering (Chellapilla et al., 2006).

The columns of `images` images at a time lie in the workspace. `nchw` products are weight · columns, `nhwc` products are
columns · weight^T, so that the result is written in place. Gradients unfold the same way: dgrad folds weight^T · dy back
(col2im), wgrad sums dy · columns^T over the images.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from convoy.engines.activations import finish
from convoy.engines.base import Buffers, Knobs, Packed
from convoy.engines.cost_model import KernelWork
from convoy.engines.product_precision import products
from convoy.engines.scratch import Scratch
from convoy.engines.support_checks import compute_dtype, plain_convolution, storage
from convoy.engines.torch_engine import TorchEngine, TorchExecutable
from convoy.problem import ConvProblem, Problem
from convoy.support import Support
from convoy.target import Target


class _Nchw(TorchExecutable):
    """fprop in nchw: torch's im2col, then weight [groups, k, length] · columns [groups, length, p·q]."""

    def __init__(self, problem: ConvProblem, images: int) -> None:
        self._problem, self._images = problem, images
        self._scratch = Scratch()
        self._scratch.add(_columns(problem, images), storage(problem))
        self.workspace_bytes = self._scratch.size_bytes

    def work(self) -> KernelWork:
        """Columns written and read once."""
        chunks = -(-self._problem.n // self._images)
        per_chunk = 2 if self._problem.groups == 1 else 1 + self._images
        return _work(self._problem, 2, chunks * per_chunk)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """im2col, then the products, `images` at a time."""
        problem, y = self._problem, buffers.results[0]
        assert y is not None
        groups, outputs, pixels = problem.groups, problem.k // problem.groups, problem.p * problem.q
        weight = buffers.constants[0].view(groups, outputs, -1)
        (columns,) = self._scratch.views(workspace)
        with products(problem.numerics, y.device):
            for first in range(0, problem.n, self._images):
                x = buffers.args[0][first : first + self._images]
                part = columns[: len(x)]
                _unfold(x, problem, part)
                if groups == 1:
                    into = y[first : first + len(x)].view(len(x), outputs, pixels)
                    torch.bmm(weight.expand(len(x), -1, -1), part, out=into)
                    continue
                for image, unfolded in enumerate(part, first):
                    into = y[image].view(groups, outputs, pixels)
                    torch.bmm(weight, unfolded.view(groups, -1, pixels), out=into)
        _epilogue(problem, buffers)


class _Nhwc(TorchExecutable):
    """fprop in nhwc: windows copied out of the zero-padded image, then columns [n·p·q, length] · weight [length, k]."""

    def __init__(self, problem: ConvProblem, images: int) -> None:
        self._problem, self._images = problem, images
        self._scratch = Scratch()
        self._scratch.add(
            (images, problem.h + 2 * problem.pad_h, problem.w + 2 * problem.pad_w, problem.c), storage(problem)
        )
        pixels, per_group = images * problem.p * problem.q, problem.c // problem.groups
        self._scratch.add((problem.groups, pixels, problem.r, problem.s, per_group), storage(problem))
        self.workspace_bytes = self._scratch.size_bytes

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The weight as [groups, r·s·c, k], in the order of a window's values."""
        problem = self._problem
        by_group = constants[0].view(problem.groups, problem.k // problem.groups, -1, problem.r, problem.s)
        length = problem.reduction_length
        return by_group.permute(0, 3, 4, 2, 1).reshape(problem.groups, length, -1).contiguous(), *constants[1:]

    def work(self) -> KernelWork:
        """The padded image and the columns written and read once."""
        return _work(self._problem, 2.5, 1 + 3 * -(-self._problem.n // self._images))

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """The windows, then the products, `images` at a time."""
        problem, y = self._problem, buffers.results[0]
        assert y is not None
        padded, columns = self._scratch.views(workspace)
        weight, outputs = buffers.constants[0], problem.k // problem.groups
        pixels = problem.p * problem.q
        padded.zero_()
        with products(problem.numerics, y.device):
            for first in range(0, problem.n, self._images):
                x = buffers.args[0][first : first + self._images]
                count = len(x)
                inner = padded[:count, problem.pad_h :, problem.pad_w :][:, : problem.h, : problem.w]
                inner.copy_(x.permute(0, 2, 3, 1))
                flat = columns.view(-1)[: problem.groups * count * pixels * problem.reduction_length]
                part = flat.view(problem.groups, count, problem.p, problem.q, problem.r, problem.s, -1)
                part.copy_(_windows(padded[:count], problem))
                into = y[first : first + count].permute(0, 2, 3, 1).view(count * pixels, problem.groups, outputs)
                unfolded = flat.view(problem.groups, count * pixels, -1)
                if problem.groups == 1:
                    torch.mm(unfolded[0], weight[0], out=into[:, 0])
                else:
                    torch.bmm(unfolded, weight, out=into.transpose(0, 1))
        _epilogue(problem, buffers)


class _GemmGradient(TorchExecutable):
    """dgrad and wgrad, image by image in nchw and in the sums' own dtype.

    Other layouts and half types pass through the workspace: col2im would round every one of its r · s sums.
    """

    def __init__(self, problem: ConvProblem) -> None:
        self._problem = problem
        dtype = compute_dtype(problem)
        self._scratch = Scratch()
        self._scratch.add(_columns(problem, 1), dtype)
        self._scratch.add((1, problem.c, problem.h, problem.w), dtype)
        self._scratch.add((1, problem.k, problem.p, problem.q), dtype)
        self._scratch.add(problem.weight_spec.shape, dtype)
        self.workspace_bytes = self._scratch.size_bytes

    def work(self) -> KernelWork:
        """Columns written, read and, in dgrad, added up."""
        return _work(self._problem, 3, 4 * self._problem.n + 2)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One direction or the other."""
        pieces = self._scratch.views(workspace)
        with products(self._problem.numerics, buffers.args[0].device):
            if self._problem.direction == "dgrad":
                self._dgrad(buffers, *pieces)
            else:
                self._wgrad(buffers, *pieces)

    def _dgrad(
        self, buffers: Buffers, columns: torch.Tensor, dx: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor
    ) -> None:
        problem, result = self._problem, buffers.results[0]
        assert result is not None
        weight.copy_(buffers.args[1])
        transposed = weight.view(problem.groups, problem.k // problem.groups, -1).transpose(1, 2)
        for image in range(problem.n):
            dy.copy_(buffers.args[0][image : image + 1])
            by_group = dy.view(problem.groups, -1, problem.p * problem.q)
            torch.bmm(transposed, by_group, out=columns.view(problem.groups, -1, problem.p * problem.q))
            torch.ops.aten.col2im.out(columns, [problem.h, problem.w], *_window_sizes(problem), out=dx)
            result[image : image + 1].copy_(dx)

    def _wgrad(
        self, buffers: Buffers, columns: torch.Tensor, x: torch.Tensor, dy: torch.Tensor, dweight: torch.Tensor
    ) -> None:
        problem, result = self._problem, buffers.results[0]
        assert result is not None
        total = dweight.view(problem.groups, problem.k // problem.groups, -1).zero_()
        for image in range(problem.n):
            x.copy_(buffers.args[0][image : image + 1])
            dy.copy_(buffers.args[1][image : image + 1])
            _unfold(x, problem, columns)
            unfolded = columns.view(problem.groups, -1, problem.p * problem.q)
            total.baddbmm_(dy.view(problem.groups, -1, problem.p * problem.q), unfolded.transpose(1, 2))
        result.copy_(dweight)
        if problem.epilogue.bias:
            dbias = buffers.results[1]
            assert dbias is not None
            torch.sum(buffers.args[1], (0, 2, 3), out=dbias)


def _work(problem: ConvProblem, passes: float, calls: int) -> KernelWork:
    columns = problem.n * prod(_columns(problem, 1)) * storage(problem).itemsize
    after = (problem.epilogue.residual + (problem.epilogue.activation != "none") + problem.epilogue.bias) * 2
    moved = problem.bytes_min + passes * columns + after * problem.y_spec.size_bytes
    half = problem.direction == "fprop" and storage(problem) != compute_dtype(problem)
    return KernelWork(problem.flops, moved, calls + after // 2, half)


def _columns(problem: ConvProblem, images: int) -> tuple[int, int, int]:
    """[images, c · r · s, p · q]."""
    return images, problem.c * problem.r * problem.s, problem.p * problem.q


def _window_sizes(problem: ConvProblem) -> tuple[list[int], list[int], list[int], list[int]]:
    """Kernel, dilation, padding, stride: the order of ATen's im2col and col2im."""
    return (
        [problem.r, problem.s],
        [problem.dilation_h, problem.dilation_w],
        [problem.pad_h, problem.pad_w],
        [problem.stride_h, problem.stride_w],
    )


def _unfold(x: torch.Tensor, problem: ConvProblem, columns: torch.Tensor) -> None:
    torch.ops.aten.im2col.out(x, *_window_sizes(problem), out=columns)


def _windows(padded: torch.Tensor, problem: ConvProblem) -> torch.Tensor:
    """All windows of padded images [n, h, w, c] as a view [groups, n, p, q, r, s, c / groups]."""
    image, row, pixel, channel = padded.stride()
    per_group = problem.c // problem.groups
    shape = (problem.groups, len(padded), problem.p, problem.q, problem.r, problem.s, per_group)
    strides = (
        per_group * channel,
        image,
        row * problem.stride_h,
        pixel * problem.stride_w,
        row * problem.dilation_h,
        pixel * problem.dilation_w,
        channel,
    )
    return padded.as_strided(shape, strides, padded.storage_offset())


def _epilogue(problem: ConvProblem, buffers: Buffers) -> None:
    epilogue, y = problem.epilogue, buffers.results[0]
    assert y is not None
    bias = buffers.constants[1] if epilogue.bias else None
    finish(y, bias, buffers.args[1] if epilogue.residual else None, epilogue.activation)


class Gemm(TorchEngine):
    """im2col + GEMM, any shape, all three directions."""

    id = "gemm"
    family = "gemm"
    offered_by_default = False

    def supports(self, problem: Problem, target: Target) -> Support:
        """Any convolution, in any direction."""
        del target
        return plain_convolution(problem, ("fprop", "dgrad", "wgrad"))

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """`images` unfolded at once: one keeps the columns small, all give the largest product."""
        del target
        assert isinstance(problem, ConvProblem)
        counts = (1, problem.n) if problem.n > 1 and problem.direction == "fprop" else (1,)
        return [Knobs.of(images=count) for count in counts]

    def executable(self, problem: Problem, knobs: Knobs) -> TorchExecutable:
        """The launch that the knobs describe."""
        assert isinstance(problem, ConvProblem)
        if problem.direction != "fprop":
            return _GemmGradient(problem)
        images = max(1, min(knobs.integer("images"), problem.n))
        return _Nhwc(problem, images) if problem.layout == "nhwc" else _Nchw(problem, images)


ENGINE = Gemm()
