"""Executables as steps call them, where a step's values differ from the tensors that an engine is given."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from convoy.engines.base import Buffers, Executable, Packed
from convoy.engines.cpu.native_launch import NativeExecutable
from convoy.engines.plane_views import PlaneViews
from convoy.engines.subgraph import torch_format
from convoy.graph.ir import Graph
from convoy.problem import ConvolutionProblem, ConvProblem, LinearProblem, Problem, volume_layout
from convoy.regions import Region


def adapted(executable: Executable, problem: Problem, region: Region | None, graph: Graph) -> Executable:
    """The executable itself, or one that calls it with the tensors that the problem describes.

    - A linear layer's values may have more than two dimensions; engines are given matrices, as views.
    - A three-dimensional convolution may be computed as a 2-D one, on views (`PlaneViews`).
    - The weight of a data gradient may be a constant (a transposed convolution); engines are given it as an argument.
    """
    if region is None:
        return executable
    if isinstance(problem, LinearProblem) and len(graph.values[region.args[0]].spec.shape) != 2:
        # A kernel in C only gets addresses, which are the same for both shapes.
        return executable if isinstance(executable, NativeExecutable) else _AsMatrices(executable)
    views = PlaneViews.of(problem, region)
    if views is not None and not isinstance(executable, NativeExecutable):
        executable = _OnPlanes(executable, views)
    return _WithWeight(executable) if has_constant_weight(problem, region.constants) else executable


def packed_constants(executable: Executable, problem: Problem, constants: Sequence[torch.Tensor]) -> Packed:
    """A step's constants in the arrangement in which its executable reads them."""
    if isinstance(problem, ConvolutionProblem) and has_constant_weight(problem, constants):
        layout = volume_layout(problem.layout)
        return tuple(t.detach().contiguous(memory_format=torch_format(layout, t.dim())) for t in constants)
    if isinstance(problem, ConvProblem) and constants and constants[0].dim() == 5:
        weight, *bias = constants
        constants = (weight.reshape(problem.weight_spec.shape), *bias)
    return executable.pack(constants)


def has_constant_weight(problem: Problem, constants: Sequence[object]) -> bool:
    """Whether a problem is a gradient whose second operand is a constant."""
    return isinstance(problem, ConvolutionProblem) and problem.direction != "fprop" and bool(constants)


class _Adapted(Executable):
    """Passes on what it is asked."""

    def __init__(self, inner: Executable) -> None:
        self.inner = inner
        self.workspace_bytes = inner.workspace_bytes
        self.allocates_results = inner.allocates_results
        self.deterministic = inner.deterministic

    def resident_bytes(self, constants: Packed) -> int:
        """Bytes of the wrapped executable's packed constants."""
        return self.inner.resident_bytes(constants)


class _AsMatrices(_Adapted):
    """Leading dimensions are rows."""

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One launch on views."""
        args = tuple(arg.view(-1, arg.shape[-1]) for arg in buffers.args)
        results = [None if result is None else result.view(-1, result.shape[-1]) for result in buffers.results]
        inner = Buffers(args, results, buffers.constants)
        self.inner.launch(inner, workspace)
        if self.allocates_results:
            leading = buffers.args[0].shape[:-1]
            buffers.results[:] = [
                None if result is None else result.view(*leading, result.shape[-1]) for result in inner.results
            ]


class _OnPlanes(_Adapted):
    """Volumes are images."""

    def __init__(self, inner: Executable, views: PlaneViews) -> None:
        super().__init__(inner)
        self._views = views

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One launch on views."""
        inner = Buffers(self._views.args(buffers.args), self._views.results(buffers.results), buffers.constants)
        self.inner.launch(inner, workspace)
        if self.allocates_results:
            buffers.results[:] = self._views.made(inner.results)


class _WithWeight(_Adapted):
    """The constants stand behind the arguments."""

    def accept_slice(self, result: int, pitch: int, offset: int) -> bool:
        """Slices that the wrapped executable accepts."""
        return self.inner.accept_slice(result, pitch, offset)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One launch with the weight as an argument."""
        inner = Buffers((*buffers.args, *buffers.constants), buffers.results)
        self.inner.launch(inner, workspace)
