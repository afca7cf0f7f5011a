"""winograd2: Winograd's F(2x2,3x3): 2.25 times fewer multiplications than the direct sum, two to three times its error."""

from __future__ import annotations

from collections.abc import Sequence

from convoy.engines.algorithms.winograd_convolution import WinogradConvolution, chunks, winograd_support
from convoy.engines.algorithms.winograd_transforms import F2
from convoy.engines.base import Knobs
from convoy.engines.support_checks import compute_dtype, storage
from convoy.engines.torch_engine import TorchEngine, TorchExecutable
from convoy.problem import ConvProblem, Problem
from convoy.support import Support
from convoy.target import Target


class Winograd2(TorchEngine):
    """F(2x2,3x3) at stride 1; half tensors are transformed in fp32."""

    id = "winograd2"
    family = "winograd"
    offered_by_default = False

    def supports(self, problem: Problem, target: Target) -> Support:
        """3x3 filters at stride 1."""
        del target
        return winograd_support(problem)

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """`images`, and `rows` of tiles, at a time; for half tensors, `products` of `fp32` or `half` operands."""
        assert isinstance(problem, ConvProblem)
        kinds = ("fp32",) if storage(problem) == compute_dtype(problem) else ("fp32", "half")
        if target.device == "cuda":
            kinds = kinds[::-1]
        return [
            Knobs.of(images=images, rows=rows, products=kind)
            for kind in kinds
            for images, rows in chunks(problem, F2, target.device)
        ]

    def executable(self, problem: Problem, knobs: Knobs) -> TorchExecutable:
        """The launch that the knobs describe."""
        assert isinstance(problem, ConvProblem)
        dtype = storage(problem) if knobs["products"] == "half" else compute_dtype(problem)
        return WinogradConvolution(problem, F2, knobs.integer("images"), knobs.integer("rows"), dtype)


ENGINE = Winograd2()
