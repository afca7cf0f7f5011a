"""pointwise: a 1x1 convolution, or a linear layer, as the one matrix product that it is.

`nchw`: y[n] = weight [k, c] · x[n] [c, p·q]. `nhwc`: y [n·p·q, k] = x [n·p·q, c] · weight^T. The bias goes in as the product's
addend. A stride first copies the pixels that are read into the workspace. dgrad at stride 1 is the same product with the
weight transposed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from convoy.engines.activations import finish
from convoy.engines.base import Buffers, Knobs, Packed
from convoy.engines.cost_model import KernelWork
from convoy.engines.product_precision import products
from convoy.engines.scratch import Scratch
from convoy.engines.support_checks import plain_convolution, storage
from convoy.engines.torch_engine import TorchEngine, TorchExecutable
from convoy.problem import ConvProblem, LinearProblem, Problem
from convoy.support import Support
from convoy.target import Target


class _Rows(TorchExecutable):
    """nhwc and linear: rows of x times the weight; `transposed` packs the weight as [c, k] rather than [k, c]."""

    def __init__(self, problem: ConvProblem | LinearProblem, *, transposed: bool) -> None:
        self._problem, self._transposed = problem, transposed
        self._scratch = _strided_pixels(problem)
        self.workspace_bytes = self._scratch.size_bytes

    def work(self) -> KernelWork:
        """One product."""
        return _work(self._problem, 1)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The weight as the right-hand side, [c, k]; a view of it unless `transposed`."""
        if not constants:
            return ()
        weight = constants[0].view(constants[0].shape[:2]).t()
        return weight.contiguous() if self._transposed else weight, *constants[1:]

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """The product with the bias, then the rest of the epilogue."""
        problem, result = self._problem, buffers.results[0]
        assert result is not None
        x, y, residual = buffers.args[0], result, buffers.args[1] if problem.epilogue.residual else None
        if isinstance(problem, ConvProblem):
            x = _read(problem, x.permute(0, 2, 3, 1), self._scratch, workspace)
            x, y = x.view(-1, x.shape[-1]), y.permute(0, 2, 3, 1)
            y = y.view(-1, y.shape[-1])
        weight = buffers.constants[0] if buffers.constants else buffers.args[1].flatten(1)
        with products(problem.numerics, y.device):
            if problem.epilogue.bias:
                torch.addmm(buffers.constants[1], x, weight, out=y)
            else:
                torch.mm(x, weight, out=y)
        finish(result, None, residual, problem.epilogue.activation)


class _Columns(TorchExecutable):
    """nchw: the weight times every image's columns; `per_image` makes one product for each image rather than a batch of them."""

    def __init__(self, problem: ConvProblem, *, per_image: bool) -> None:
        self._problem, self._per_image = problem, per_image
        self._scratch = _strided_pixels(problem)
        self.workspace_bytes = self._scratch.size_bytes

    def work(self) -> KernelWork:
        """One product, or one for each image."""
        assert isinstance(self._problem, ConvProblem)
        return _work(self._problem, self._problem.n if self._per_image else 1)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """The products with the bias, then the rest of the epilogue."""
        problem, result = self._problem, buffers.results[0]
        assert result is not None
        x = _read(problem, buffers.args[0], self._scratch, workspace)
        pixels = problem.p * problem.q
        x, y = x.view(*x.shape[:2], pixels), result.view(*result.shape[:2], pixels)
        weight = buffers.constants[0].flatten(1) if buffers.constants else buffers.args[1].flatten(1).t()
        bias = buffers.constants[1].unsqueeze(1) if problem.epilogue.bias else None
        with products(problem.numerics, y.device):
            if self._per_image:
                for image, into in zip(x, y, strict=True):
                    if bias is None:
                        torch.mm(weight, image, out=into)
                    else:
                        torch.addmm(bias, weight, image, out=into)
            elif bias is None:
                torch.bmm(weight.expand(problem.n, -1, -1), x, out=y)
            else:
                torch.baddbmm(bias, weight.expand(problem.n, -1, -1), x, out=y)
        residual = buffers.args[1] if problem.epilogue.residual else None
        finish(result, None, residual, problem.epilogue.activation)


def _work(problem: ConvProblem | LinearProblem, calls: int) -> KernelWork:
    after = (problem.epilogue.residual + (problem.epilogue.activation != "none")) * 2
    strided = isinstance(problem, ConvProblem) and (problem.stride_h, problem.stride_w) != (1, 1)
    moved = problem.bytes_min + after * problem.y_spec.size_bytes + strided * problem.x_spec.size_bytes
    return KernelWork(problem.flops, moved, calls + after // 2 + strided, problem.x_spec.dtype in ("fp16", "bf16"))


def _strided_pixels(problem: ConvProblem | LinearProblem) -> Scratch:
    """Scratch for the pixels that a stride picks, in the memory format of x."""
    scratch = Scratch()
    if isinstance(problem, ConvProblem) and (problem.stride_h, problem.stride_w) != (1, 1):
        n, c, p, q = problem.n, problem.c, problem.p, problem.q
        scratch.add((n, p, q, c) if problem.layout == "nhwc" else (n, c, p, q), storage(problem))
    return scratch


def _read(problem: ConvProblem, x: torch.Tensor, scratch: Scratch, workspace: torch.Tensor | None) -> torch.Tensor:
    """The pixels that are read, dense: x itself, or a copy of the strided ones."""
    if not scratch.size_bytes:
        return x
    (pixels,) = scratch.views(workspace)
    rows, columns = slice(None, None, problem.stride_h), slice(None, None, problem.stride_w)
    return pixels.copy_(x[:, rows, columns] if problem.layout == "nhwc" else x[:, :, rows, columns])


class Pointwise(TorchEngine):
    """1x1 convolutions without padding, and linear layers."""

    id = "pointwise"
    family = "gemm"

    def supports(self, problem: Problem, target: Target) -> Support:
        """1x1 filters without padding or groups; every linear layer."""
        del target
        if isinstance(problem, LinearProblem):
            return Support.yes()
        support = plain_convolution(problem, ("fprop", "dgrad"))
        if not support or not isinstance(problem, ConvProblem):
            return support
        if (problem.r, problem.s) != (1, 1):
            return Support.no(f"needs a 1x1 filter, got {problem.r}x{problem.s}")
        if problem.pad_h or problem.pad_w:
            return Support.no(f"needs padding 0, got {problem.pad_h}x{problem.pad_w}")
        if problem.groups != 1:
            return Support.no(f"needs groups = 1, got {problem.groups}")
        if problem.direction == "dgrad" and (problem.stride_h, problem.stride_w) != (1, 1):
            return Support.no(f"computes dgrad at stride 1, got {problem.stride_h}x{problem.stride_w}")
        return Support.yes()

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """How the weight lies (rows) or whether images are batched (columns)."""
        del target
        assert isinstance(problem, (ConvProblem, LinearProblem))
        if isinstance(problem, ConvProblem) and problem.layout == "nchw":
            return [Knobs.of(per_image=choice) for choice in ((True, False) if problem.n > 1 else (True,))]
        gradient = isinstance(problem, ConvProblem) and problem.direction == "dgrad"
        return [Knobs.of(transposed=choice) for choice in ((False,) if gradient else (False, True))]

    def executable(self, problem: Problem, knobs: Knobs) -> TorchExecutable:
        """The launch that the knobs describe."""
        if isinstance(problem, ConvProblem) and problem.layout == "nchw":
            return _Columns(problem, per_image=bool(knobs["per_image"]))
        assert isinstance(problem, (ConvProblem, LinearProblem))
        return _Rows(problem, transposed=bool(knobs["transposed"]))


ENGINE = Pointwise()
