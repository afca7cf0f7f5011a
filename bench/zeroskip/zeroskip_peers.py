"""What engines that skip zeros are compared with: convolution then pooling, and im2col with a sparse product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from convoy.engines.activations import finish, pool2d
from convoy.engines.base import Buffers, Executable
from convoy.engines.triton.pooling.pool_pass import ReduceWindows, window_support
from convoy.problem import ConvProblem, Epilogue
from convoy.target import Target


class Unfused(Executable):
    """A convolution by one engine, then PyTorch's pooling, or our own: what has to be beaten."""

    allocates_results = True

    def __init__(self, executable: Executable, problem: ConvProblem, windows: ReduceWindows | None = None) -> None:
        self.executable, self.problem, self.windows = executable, problem, windows
        self.workspace_bytes = executable.workspace_bytes

    def pack(self, constants: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """As the convolution wants it."""
        return self.executable.pack(constants)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Both."""
        x, shape = buffers.args[0], self.problem.conv_spec.shape
        y = None
        if not self.executable.allocates_results:
            y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        inner = Buffers(buffers.args, [y], buffers.constants)
        self.executable.launch(inner, workspace)
        made = inner.results[0]
        if self.windows is None:
            buffers.results[0] = pool2d(made, self.problem.epilogue.pool)  # type: ignore[arg-type]
            return
        pooled = torch.empty(
            self.problem.y_spec.shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last
        )
        self.windows.launch(made, pooled, None, None)  # type: ignore[arg-type]
        buffers.results[0] = pooled


def own_pooling(problem: ConvProblem, target: Target) -> ReduceWindows | None:
    """Our pooling kernel, where there is one for the window."""
    pool, dtype = problem.epilogue.pool, problem.y_dtype
    if target.device != "cuda" or pool is None or not window_support(pool):
        return None
    n, k, p, q = problem.conv_spec.shape
    return ReduceWindows("triton.pooling", (n, k, p, q), 1, (dtype, dtype), Epilogue(pool=pool), target)


class SparseColumns(Executable):
    """im2col in CSR form, made once for each input outside the timed region, times the dense weight: torch's sparse product."""

    allocates_results = True

    def __init__(self, problem: ConvProblem, x: torch.Tensor) -> None:
        self.problem = problem
        sizes = (
            (problem.dilation_h, problem.dilation_w),
            (problem.pad_h, problem.pad_w),
            (problem.stride_h, problem.stride_w),
        )
        columns = torch.nn.functional.unfold(x.contiguous(), (problem.r, problem.s), *sizes)
        self.columns = columns.transpose(1, 2).flatten(0, 1).to_sparse_csr()

    def pack(self, constants: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """The weight as [c · r · s, k]."""
        return constants[0].flatten(1).t().contiguous(), *constants[1:]

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """The product and the epilogue."""
        del workspace
        problem = self.problem
        made = (
            (self.columns @ buffers.constants[0]).view(problem.n, problem.p, problem.q, problem.k).permute(0, 3, 1, 2)
        )
        bias = buffers.constants[1] if problem.epilogue.bias else None
        buffers.results[0] = pool2d(finish(made, bias, None, problem.epilogue.activation), problem.epilogue.pool)
