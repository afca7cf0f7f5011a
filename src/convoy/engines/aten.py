"""aten: what PyTorch does today. The baseline of every region, on CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - the field writes F

from convoy.engines.activations import IN_PLACE, finish
from convoy.engines.base import Buffers, Engine, Executable, Knobs, Packed
from convoy.engines.interpret import compile_graph
from convoy.graph.text import parse_graph
from convoy.problem import ConvProblem, LayoutProblem, LinearProblem, Problem, SubgraphProblem
from convoy.support import Support
from convoy.target import Target


class _Convolution(Executable):
    """F.conv2d and the epilogue as in-place calls. ATen's convolution has no form that writes to a given tensor."""

    allocates_results = True

    def __init__(self, problem: ConvProblem, target: Target) -> None:
        self._problem = problem
        self._memory_format = torch.channels_last if problem.layout == "nhwc" else torch.contiguous_format
        self._cuda = target.device == "cuda"
        self._sizes = (
            (problem.stride_h, problem.stride_w),
            (problem.pad_h, problem.pad_w),
            (problem.dilation_h, problem.dilation_w),
            problem.groups,
        )
        self.deterministic = not self._cuda or problem.direction == "fprop"

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        if not constants:
            return ()
        return constants[0].contiguous(memory_format=self._memory_format), *constants[1:]

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        del workspace
        if not self._cuda:
            self._run(buffers)
            return
        strict = self._problem.numerics == "strict"
        flags = torch.backends.cudnn.flags(
            enabled=True, benchmark=True, deterministic=False, allow_tf32=not strict and torch.backends.cudnn.allow_tf32
        )
        with flags:
            self._run(buffers)

    def _run(self, buffers: Buffers) -> None:
        problem = self._problem
        if problem.direction != "fprop":
            buffers.results[:] = self._gradients(buffers)
            return
        bias = buffers.constants[1] if problem.epilogue.bias else None
        y = F.conv2d(buffers.args[0], buffers.constants[0], bias, *self._sizes)
        y = finish(y, None, buffers.args[1] if problem.epilogue.residual else None, problem.epilogue.activation)
        buffers.results[0] = y.contiguous(memory_format=self._memory_format)

    def _gradients(self, buffers: Buffers) -> list[torch.Tensor | None]:
        problem = self._problem
        stride, padding, dilation, groups = self._sizes
        wants = [problem.direction == "dgrad", problem.direction == "wgrad", problem.epilogue.bias]
        if problem.direction == "dgrad":
            dy, weight = buffers.args
            x = torch.empty(1, dtype=dy.dtype, device=dy.device).expand(problem.x_spec.shape)
            wants[2] = False
        else:
            x, dy = buffers.args
            weight = torch.empty(1, dtype=dy.dtype, device=dy.device).expand(problem.weight_spec.shape)
        dx, dweight, dbias = torch.ops.aten.convolution_backward(
            dy, x, weight, [problem.k], stride, padding, dilation, False, [0, 0], groups, wants
        )
        if problem.direction == "dgrad":
            return [dx.contiguous(memory_format=self._memory_format)]
        return [dweight.contiguous(), dbias] if problem.epilogue.bias else [dweight.contiguous()]


class _Linear(Executable):
    """addmm into the given result, then the rest of the epilogue in place."""

    def __init__(self, problem: LinearProblem) -> None:
        self._epilogue = problem.epilogue

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        return constants[0].t(), *constants[1:]

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        del workspace
        y = buffers.results[0]
        assert y is not None
        if self._epilogue.bias:
            torch.addmm(buffers.constants[1], buffers.args[0], buffers.constants[0], out=y)
        else:
            torch.mm(buffers.args[0], buffers.constants[0], out=y)
        if self._epilogue.residual:
            y.add_(buffers.args[1])
        IN_PLACE[self._epilogue.activation](y)


class _Subgraph(Executable):
    """The operators of a piece of the graph, one after another. Results that are views of an argument are copied."""

    allocates_results = True

    def __init__(self, problem: SubgraphProblem) -> None:
        self._function = compile_graph(parse_graph(problem.text))
        self._memory_format = torch.channels_last if problem.layout == "nhwc" else torch.contiguous_format

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        del workspace
        results = self._function(buffers.args, buffers.constants)
        for index, result in enumerate(results):
            four = result.dim() == 4
            buffers.results[index] = result.contiguous(
                memory_format=self._memory_format if four else torch.contiguous_format
            )


class _Copy(Executable):
    """Copies a value into another memory format."""

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        del workspace
        result = buffers.results[0]
        assert result is not None
        result.copy_(buffers.args[0])


class Aten(Engine):
    """PyTorch's own operators: F.conv2d (cuDNN with benchmark on a GPU, oneDNN on a CPU), F.linear, and everything else."""

    id = "aten"
    family = "library"

    def supports(self, problem: Problem, target: Target) -> Support:
        if isinstance(problem, LayoutProblem) and "blocked" in (problem.source, problem.layout):
            return Support.no("ATen tensors have no blocked layout")
        if isinstance(problem, LayoutProblem):
            return Support.yes()
        if problem.layout == "blocked":
            return Support.no("ATen tensors have no blocked layout")
        if isinstance(problem, ConvProblem):
            if len({problem.x_dtype, problem.weight_dtype, problem.y_dtype}) != 1:
                return Support.no("ATen needs x, weight and y of one dtype")
            if problem.direction == "dgrad" and problem.epilogue:
                return Support.no("a data gradient has no epilogue")
        return Support.yes()

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        del knobs
        if isinstance(problem, ConvProblem):
            return _Convolution(problem, target)
        if isinstance(problem, LinearProblem):
            return _Linear(problem)
        return _Subgraph(problem) if isinstance(problem, SubgraphProblem) else _Copy()


ENGINE = Aten()
