"""cuda.expand_depthwise: a 1x1 convolution and the depthwise one behind it in one kernel, `expand_depthwise.cu`.

y = act2(depthwise(act1(conv1x1(x)))): the first two layers of an inverted residual block, for nets that have a gate before the
third, as EfficientNet and MobileNetV3 (docs/kernels/chains.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from convoy.engines.hopper.chains.inverted_residual import InvertedResidualEngine
from convoy.engines.hopper.chains.inverted_residual_problem import (
    InvertedResidualProblem,
    expand_depthwise_of,
    expand_depthwise_sample,
)
from convoy.problem import Problem


class ExpandDepthwiseEngine(InvertedResidualEngine):
    """As `cuda.inverted_residual`, without the last layer: the filtered values are stored from the registers that they are in."""

    id = "cuda.expand_depthwise"
    patterns = ("expanded",)

    def samples(self) -> Sequence[Problem]:
        """EfficientNet-B0's third block up to its gate."""
        return (expand_depthwise_sample(),)

    def read(self, text: str) -> InvertedResidualProblem | str:
        """The two layers that a subgraph's text describes, or the reason why it is none."""
        return expand_depthwise_of(text)


ENGINE = ExpandDepthwiseEngine()
