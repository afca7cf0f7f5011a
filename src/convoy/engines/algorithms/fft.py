"""fft: convolution by one FFT of the whole padded image."""

from __future__ import annotations

from collections.abc import Sequence

from convoy.engines.algorithms.fft_convolution import SpectralConvolution, fast_length, padded_sides, spectrum_fits
from convoy.engines.base import Knobs
from convoy.engines.support_checks import plain_convolution, transforms_allowed
from convoy.engines.torch_engine import TorchEngine, TorchExecutable
from convoy.problem import ConvProblem, Problem
from convoy.support import Support
from convoy.target import Target


class Fft(TorchEngine):
    """Whole-image FFT: pays for large filters on small images."""

    id = "fft"
    family = "fft"
    offered_by_default = False

    def supports(self, problem: Problem, target: Target) -> Support:
        """Any dense convolution whose weight has a spectrum of fair size."""
        support = plain_convolution(problem)
        if not support or not isinstance(problem, ConvProblem):
            return support
        if not (support := transforms_allowed(problem)):
            return support
        return spectrum_fits(problem, *_sides(problem), target)

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """`images` transformed at a time."""
        del target
        assert isinstance(problem, ConvProblem)
        return [Knobs.of(images=count) for count in dict.fromkeys((1, max(problem.n, 1)))]

    def executable(self, problem: Problem, knobs: Knobs) -> TorchExecutable:
        """The launch that the knobs describe."""
        assert isinstance(problem, ConvProblem)
        return SpectralConvolution(problem, *_sides(problem), knobs.integer("images"))


def _sides(problem: ConvProblem) -> tuple[int, int]:
    height, width = padded_sides(problem)
    return fast_length(height), fast_length(width)


ENGINE = Fft()
