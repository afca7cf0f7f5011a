"""A built plan as an executable: cuDNN runs its graph, and ATen the rest of the epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from convoy.engines.activations import finish
from convoy.engines.base import Buffers, Executable, Packed
from convoy.engines.gpu.device_tensors import ALIGNMENT, aligned
from convoy.engines.gpu.library_calls import LibraryCall, noted
from convoy.engines.library.cudnn import library
from convoy.engines.library.cudnn.graphs import BIAS, RESIDUAL, WEIGHT, X, Y
from convoy.engines.library.cudnn.plan_text import plan_text
from convoy.engines.library.cudnn.plans import Facts
from convoy.engines.subgraph import torch_format
from convoy.errors import LaunchError
from convoy.problem import ConvolutionProblem, Epilogue


class CudnnConvolution(Executable):
    """One plan of one problem.

    Args:
        problem: the convolution.
        fused: the part of its epilogue that is in the graph.
        graph: holds the built plan.
        index: the plan's index in the graph.
        facts: the plan's properties.
    """

    def __init__(self, problem: ConvolutionProblem, fused: Epilogue, graph: Any, index: int, facts: Facts) -> None:
        self.workspace_bytes = facts.workspace_bytes
        self.deterministic = facts.deterministic
        self._index = index
        self._graph = graph
        self._problem = problem
        self._epilogue = problem.epilogue
        self._fused = fused
        self._format = torch_format(problem.layout, len(problem.x_spec.shape))
        self._activation = problem.epilogue.activation if fused.activation == "none" else "none"

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The weight in x's memory format; both at an aligned address."""
        made = [tensor.detach() for tensor in constants]
        if made:
            made[0] = made[0].contiguous(memory_format=self._format)
        return tuple(aligned(t) for t in made)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        pointers = self._pointers(buffers)
        scratch = self._scratch(workspace)

        def run() -> None:
            self._graph.execute_plan_at_index(pointers, scratch, self._index, handle=library.handle())

        def described() -> LibraryCall:
            return LibraryCall(plan_text(self._graph), tuple(pointers.items()), scratch or 0, self.workspace_bytes)

        try:
            noted(run, described)
        except library.errors() as error:
            raise LaunchError(f"cudnn: {self._problem}: {library.first_line(error)}") from error
        if self._problem.direction == "fprop":
            self._finish(buffers)
        elif self._epilogue.bias:
            bias_gradient = buffers.results[1]
            assert bias_gradient is not None
            dy = buffers.args[1]
            torch.sum(dy, (0, *range(2, dy.dim())), out=bias_gradient)

    def _pointers(self, buffers: Buffers) -> dict[int, int]:
        """Uid → address."""
        first, *more = buffers.args
        result = buffers.results[0]
        if result is None:
            raise LaunchError("result 0: no tensor was given to write to")
        if self._problem.direction == "dgrad":
            return self._addresses({Y: first, WEIGHT: more[0], X: result})
        if self._problem.direction == "wgrad":
            return self._addresses({X: first, Y: more[0], WEIGHT: result})
        found = self._addresses({X: first, Y: result})
        found[WEIGHT] = buffers.constants[0].data_ptr()
        if self._fused.bias:
            found[BIAS] = buffers.constants[1].data_ptr()
        if self._fused.residual:
            found |= self._addresses({RESIDUAL: more[0]})
        return found

    def _addresses(self, tensors: dict[int, torch.Tensor]) -> dict[int, int]:
        found: dict[int, int] = {}
        for uid, tensor in tensors.items():
            if not tensor.is_contiguous(memory_format=self._format):
                expected = f"those of a dense {self._problem.layout} tensor"
                raise LaunchError(f"{_NAMES[uid]}: strides {tuple(tensor.stride())} are not {expected}")
            address = tensor.data_ptr()
            if address % ALIGNMENT:
                raise LaunchError(f"{_NAMES[uid]}: its memory starts at {address:#x}, which is no multiple of 16 bytes")
            found[uid] = address
        return found

    def _scratch(self, workspace: torch.Tensor | None) -> int | None:
        """The workspace's address."""
        if not self.workspace_bytes:
            return None
        given = 0 if workspace is None else workspace.numel()
        if workspace is None or given < self.workspace_bytes:
            raise LaunchError(f"workspace: got {given} bytes, expected at least {self.workspace_bytes}")
        return workspace.data_ptr()

    def _finish(self, buffers: Buffers) -> None:
        """The part of the epilogue that is not in the graph."""
        y = buffers.results[0]
        assert y is not None
        bias = buffers.constants[1] if self._epilogue.bias and not self._fused.bias else None
        residual = buffers.args[1] if self._epilogue.residual and not self._fused.residual else None
        finish(y, bias, residual, self._activation)


_NAMES: Final = {X: "x", WEIGHT: "weight", Y: "y", BIAS: "bias", RESIDUAL: "residual"}
