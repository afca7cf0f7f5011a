"""winograd4: Winograd's F(4x4,3x3): four times fewer multiplications than the direct sum, ten to thirty times its error.

The transforms amplify the rounding of their operands: products of half or TF32 operands would leave one or two correct
digits. Products are therefore fp32, whatever the tensors' dtype and PyTorch's flags.
"""

from __future__ import annotations

from collections.abc import Sequence

from convoy.engines.algorithms.winograd_convolution import WinogradConvolution, chunks, winograd_support
from convoy.engines.algorithms.winograd_transforms import F4
from convoy.engines.base import Knobs
from convoy.engines.support_checks import compute_dtype
from convoy.engines.torch_engine import TorchEngine, TorchExecutable
from convoy.problem import ConvProblem, Problem
from convoy.support import Support
from convoy.target import Target


class Winograd4(TorchEngine):
    """F(4x4,3x3) at stride 1, fp32 products always."""

    id = "winograd4"
    family = "winograd"
    offered_by_default = False

    def supports(self, problem: Problem, target: Target) -> Support:
        """3x3 filters at stride 1, where products are fp32 or fp64."""
        support = winograd_support(problem)
        if (
            support
            and isinstance(problem, ConvProblem)
            and target.device == "cuda"
            and problem.x_dtype in ("fp16", "bf16")
        ):
            return Support.no(f"F(4x4) with {problem.x_dtype} products is too inexact, and with fp32 products too slow")
        return support

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """`images`, and `rows` of tiles, at a time."""
        assert isinstance(problem, ConvProblem)
        return [Knobs.of(images=images, rows=rows) for images, rows in chunks(problem, F4, target.device)]

    def executable(self, problem: Problem, knobs: Knobs) -> TorchExecutable:
        """The launch that the knobs describe."""
        assert isinstance(problem, ConvProblem)
        return WinogradConvolution(
            problem, F4, knobs.integer("images"), knobs.integer("rows"), compute_dtype(problem), exact=True
        )


ENGINE = Winograd4()
