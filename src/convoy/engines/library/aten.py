"""aten: what PyTorch does today. The baseline of every region, on CPUs and GPUs.

Convolutions go to whom ATen gives them: oneDNN on a CPU, cuDNN with its benchmark on a GPU. Epilogues follow as ATen calls
that overwrite the convolution's new result, as `nn.ReLU(inplace=True)` and `out += x` do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from convoy.engines import nondeterminism
from convoy.engines.activations import finish, pool2d
from convoy.engines.base import DETERMINISTIC, Buffers, Engine, Executable, Knobs, Packed
from convoy.engines.interpret import compile_graph
from convoy.engines.known_defects import defect_of
from convoy.engines.product_precision import products
from convoy.engines.subgraph import SubgraphResults, parse_subgraph, torch_format, torch_support
from convoy.engines.support_checks import plain_convolution, torch_sizes, volume_convolution
from convoy.engines.torch_flags import convolutions, without_onednn
from convoy.problem import (
    Conv3dProblem,
    ConvolutionProblem,
    ConvProblem,
    LayoutProblem,
    LinearProblem,
    Problem,
    SubgraphProblem,
)
from convoy.regions.whole import LEAST_LAYERS, layers_of
from convoy.support import Support
from convoy.target import Target


class _AtenConvolution(Executable):
    """torch.conv2d or conv3d, and the epilogue. ATen's convolution cannot write to a given tensor.

    (The overload `aten.convolution.out` makes a new tensor and copies it.) Where oneDNN has a known defect, ATen's own
    convolution is used.
    """

    allocates_results = True

    def __init__(self, problem: ConvolutionProblem, target: Target, *, deterministic: bool) -> None:
        self._problem, self._held = problem, deterministic
        self._device = torch.device(target.device)
        self._memory_format = torch_format(problem.layout, len(problem.x_spec.shape))
        self._sizes = torch_sizes(problem)
        volumes = isinstance(problem, Conv3dProblem)
        self._convolve: Callable[..., torch.Tensor] = torch.conv3d if volumes else torch.conv2d
        self._avoids_onednn = self._device.type == "cpu" and defect_of(problem, target) is not None
        self.deterministic = deterministic or not _unsteady(problem, target)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The weight in x's memory format: ATen computes in channels_last where either has it."""
        if not constants:
            return ()
        return constants[0].detach().contiguous(memory_format=self._memory_format), *constants[1:]

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        del workspace
        chosen = convolutions(self._problem.numerics, self._device, deterministic=self._held)
        with without_onednn() if self._avoids_onednn else chosen:
            if self._problem.direction == "fprop":
                buffers.results[0] = self._forward(buffers)
            else:
                buffers.results[:] = self._gradients(buffers)

    def _forward(self, buffers: Buffers) -> torch.Tensor:
        epilogue = self._problem.epilogue
        bias = buffers.constants[1] if epilogue.bias else None
        y = self._convolve(buffers.args[0], buffers.constants[0], bias, *self._sizes)
        finish(y, None, buffers.args[1] if epilogue.residual else None, epilogue.activation)
        return pool2d(y, epilogue.pool).contiguous(memory_format=self._memory_format)

    def _gradients(self, buffers: Buffers) -> list[torch.Tensor | None]:
        problem = self._problem
        stride, padding, dilation, groups = self._sizes
        first, second = buffers.args
        # ATen reads only the sizes of the operand whose gradient is computed.
        if problem.direction == "dgrad":
            dy, weight = first, second
            x = dy.new_empty(1).expand(problem.x_spec.shape)
            wanted = [True, False, False]
        else:
            x, dy = first, second
            weight = dy.new_empty(1).expand(problem.weight_spec.shape)
            wanted = [False, True, problem.epilogue.bias]
        made = torch.ops.aten.convolution_backward.default(
            dy, x, weight, [problem.k], stride, padding, dilation, False, [0] * len(stride), groups, wanted
        )
        images = [t.contiguous(memory_format=self._memory_format) for t in made[:2] if t is not None]
        return [*images, *made[2:]] if wanted[2] else images


def _unsteady(problem: Problem, target: Target) -> str:
    """Why ATen's default algorithm may give different bits from run to run; empty if it is deterministic.

    For convolutions that holds for cuDNN's gradients (its documentation, "Reproducibility"), for subgraphs see
    `nondeterminism.TABLE`.
    """
    if isinstance(problem, SubgraphProblem):
        return nondeterminism.describe(nondeterminism.in_aten(parse_subgraph(problem.text), target.device))
    if target.device == "cuda" and isinstance(problem, ConvolutionProblem) and problem.direction != "fprop":
        return f"{problem.direction} by cuDNN may give different bits from run to run"
    return ""


def _has_steady_setting(problem: Problem, target: Target) -> bool:
    """Whether a nondeterministic problem also has a deterministic algorithm."""
    if not _unsteady(problem, target):
        return False
    return not isinstance(problem, SubgraphProblem) or nondeterminism.has_deterministic_variant(
        parse_subgraph(problem.text), target.device
    )


class _AtenLinear(Executable):
    """addmm into the given result, then the rest of the epilogue in place."""

    def __init__(self, problem: LinearProblem, target: Target) -> None:
        self._numerics, self._epilogue = problem.numerics, problem.epilogue
        self._device = torch.device(target.device)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The weight seen as [c, k]; its memory stays as it is."""
        return tuple(t.detach().t() for t in constants)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        del workspace
        y = buffers.results[0]
        assert y is not None
        with products(self._numerics, self._device):
            if self._epilogue.bias:
                torch.addmm(buffers.constants[1], buffers.args[0], buffers.constants[0], out=y)
            else:
                torch.mm(buffers.args[0], buffers.constants[0], out=y)
        finish(y, None, buffers.args[1] if self._epilogue.residual else None, self._epilogue.activation)


class _AtenSubgraph(Executable):
    """The operators of a subgraph, one after another."""

    allocates_results = True

    def __init__(self, problem: SubgraphProblem, target: Target) -> None:
        self.function = compile_graph(parse_subgraph(problem.text))
        self._results = SubgraphResults(problem)
        self.deterministic = not _unsteady(problem, target)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        del workspace
        made = self.function(buffers.args, buffers.constants)
        self._results.store(made, (*buffers.args, *buffers.constants), buffers.results)


class _AtenNet(_AtenSubgraph):
    """A subgraph with convolutions, by the algorithms that PyTorch's benchmark finds, with weights in x's memory format."""

    def __init__(self, problem: SubgraphProblem, target: Target) -> None:
        super().__init__(problem, target)
        self._device = torch.device(target.device)
        self._layout = problem.layout

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Constants in the memory format in which ATen's convolutions read them."""
        held = [t.detach() for t in constants]
        return tuple(
            t.contiguous(memory_format=torch_format(self._layout, t.dim())) if t.dim() in (4, 5) else t for t in held
        )

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        with convolutions("as_torch", self._device):
            super().launch(buffers, workspace)


class _DeterministicSubgraph(_AtenSubgraph):
    """The same by the algorithms that give the same bits in every run, which all of its operators have."""

    def __init__(self, problem: SubgraphProblem, target: Target) -> None:
        super().__init__(problem, target)
        self.deterministic = True

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        with nondeterminism.deterministic_algorithms():
            super().launch(buffers, workspace)


class _AtenCopy(Executable):
    """Copies a value into another memory format."""

    def accept_slice(self, result: int, pitch: int, offset: int) -> bool:
        """A copy goes anywhere."""
        return True

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        del workspace
        assert buffers.results[0] is not None
        buffers.results[0].copy_(buffers.args[0])


class Aten(Engine):
    """PyTorch's own operators."""

    id = "aten"
    family = "library"
    version = 2

    def supports(self, problem: Problem, target: Target) -> Support:
        """Everything on ordinary tensors of one dtype."""
        del target
        if isinstance(problem, Conv3dProblem):
            return volume_convolution(problem, ("fprop", "dgrad", "wgrad"))
        if isinstance(problem, ConvProblem):
            return plain_convolution(problem, ("fprop", "dgrad", "wgrad"), pools=True)
        if isinstance(problem, SubgraphProblem):
            return torch_support(problem)
        if isinstance(problem, LayoutProblem) and "blocked" in (problem.source, problem.layout):
            return Support.no("copies between nchw and nhwc, got blocked")
        return Support.yes()

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """The default knobs; if they are nondeterministic, also knobs for PyTorch's deterministic algorithms.

        cuDNN's gradients use `torch.backends.cudnn.deterministic`, subgraphs `torch.use_deterministic_algorithms`. A subgraph
        with an operator that has no deterministic algorithm gets no such knobs.
        """
        plain = Knobs()
        return (plain, Knobs.of(**{DETERMINISTIC: True})) if _has_steady_setting(problem, target) else (plain,)

    def nondeterminism_reason(self, problem: Problem, knobs: Knobs, target: Target) -> str:
        """Yes for cuDNN's gradients and for subgraphs with certain operators."""
        return "" if knobs.get(DETERMINISTIC) else _unsteady(problem, target)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Nothing is compiled."""
        if isinstance(problem, ConvolutionProblem):
            return _AtenConvolution(problem, target, deterministic=bool(knobs.get(DETERMINISTIC)))
        if isinstance(problem, LinearProblem):
            return _AtenLinear(problem, target)
        if isinstance(problem, SubgraphProblem):
            if knobs.get(DETERMINISTIC):
                return _DeterministicSubgraph(problem, target)
            several = layers_of(parse_subgraph(problem.text).nodes) >= LEAST_LAYERS
            return (_AtenNet if several else _AtenSubgraph)(problem, target)
        return _AtenCopy()


ENGINE = Aten()
