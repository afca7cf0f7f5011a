"""A dense convolution kernel, then one pooling pass over its result."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from convoy.engines.base import Buffers, Executable, Packed
from convoy.engines.gpu.device_tensors import checked, scratch
from convoy.engines.scratch import Scratch
from convoy.engines.triton.pooling.pool_pass import ReduceWindows
from convoy.engines.triton.triton_build import TORCH_DTYPE
from convoy.problem import ConvProblem, Epilogue
from convoy.target import Target


class ConvThenPool(Executable):
    """The dense kernel, and one pass over its result."""

    def __init__(self, engine: str, problem: ConvProblem, dense: Executable, target: Target) -> None:
        self.dense, self.problem = dense, problem
        self.room = conv_then_pool_scratch(problem, dense.workspace_bytes)
        self.workspace_bytes = self.room.size_bytes
        spec = problem.conv_spec
        if spec.elements:
            alone = Epilogue(pool=problem.epilogue.pool)
            dtypes = (problem.y_dtype, problem.y_dtype)
            n, k, p, q = spec.shape
            self.pooling = ReduceWindows(engine, (n, k, p, q), 1, dtypes, alone, target)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """As the convolution wants it."""
        return self.dense.pack(constants)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Both."""
        if self.problem.conv_spec.elements == 0:
            return
        _, y, _ = checked(buffers, self.problem.epilogue.residual)
        made, inner = self.room.views(scratch(workspace, self.workspace_bytes))
        n, k, p, q = self.problem.conv_spec.shape
        made = made.view(n, p, q, k).permute(0, 3, 1, 2)
        self.dense.launch(Buffers(buffers.args, [made], buffers.constants), inner if inner.numel() else None)
        self.pooling.launch(made, y, None, None)


def conv_then_pool_scratch(problem: ConvProblem, dense_bytes: int) -> Scratch:
    """Scratch for the convolution's result, and the dense engine's workspace."""
    room = Scratch()
    room.add((problem.conv_spec.elements,), TORCH_DTYPE[problem.y_dtype])
    room.add((dense_bytes,), torch.uint8)
    return room
