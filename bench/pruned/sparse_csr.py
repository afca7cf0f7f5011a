"""sparse_csr: im2col, then a sparse matrix in CSR form times the columns, by torch: cuSPARSE on a GPU, MKL on a CPU."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from convoy.engines.activations import finish
from convoy.engines.base import Buffers, Engine, Executable, Knobs, Packed
from convoy.engines.support_checks import plain_convolution
from convoy.problem import ConvProblem, Problem
from convoy.support import Support
from convoy.target import Target


@dataclass(frozen=True)
class Held:
    """A sparse matrix, in a box: what handles constants asks tensors for their strides, and a sparse one has none."""

    matrix: torch.Tensor


class SparseProduct(Executable):
    """One problem; the columns of all images lie side by side, as one matrix."""

    allocates_results = True

    def __init__(self, problem: ConvProblem) -> None:
        self.problem = problem

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The weight as [k, c · r · s] in CSR form."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch calls its CSR support a beta
            return Held(constants[0].flatten(1).to_sparse_csr()), *constants[1:]

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """im2col, the product, the epilogue."""
        del workspace
        problem, (weight, *bias) = self.problem, buffers.constants
        sizes = ((problem.dilation_h, problem.dilation_w), (problem.pad_h, problem.pad_w))
        strides = (problem.stride_h, problem.stride_w)
        columns = torch.nn.functional.unfold(buffers.args[0], (problem.r, problem.s), *sizes, strides)
        product = weight.matrix @ columns.transpose(0, 1).flatten(1)
        y = product.view(problem.k, problem.n, problem.p, problem.q).transpose(0, 1).contiguous()
        residual = buffers.args[1] if problem.epilogue.residual else None
        buffers.results[0] = finish(y, bias[0] if bias else None, residual, problem.epilogue.activation)


class SparseCsr(Engine):
    """Forward convolutions on pruned weights, fp32, nchw, groups = 1."""

    id = "sparse_csr"
    family = "gemm"
    reads_mask = True

    def supports(self, problem: Problem, target: Target) -> Support:
        """What torch's CSR product takes."""
        del target
        support = plain_convolution(problem)
        if not support or not isinstance(problem, ConvProblem):
            return support
        if not problem.weight_mask or problem.x_dtype != "fp32" or problem.layout != "nchw" or problem.groups != 1:
            return Support.no("needs a masked problem in fp32, nchw and groups = 1")
        return Support.yes()

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Nothing is compiled."""
        del knobs, target
        assert isinstance(problem, ConvProblem)
        return SparseProduct(problem)
