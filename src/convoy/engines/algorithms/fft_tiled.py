"""fft_tiled: convolution by FFTs of overlapping tiles (overlap-save): the weight's spectrum stays small on large images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from convoy.engines.algorithms.fft_convolution import SpectralConvolution, padded_sides, span, spectrum_fits
from convoy.engines.base import Knobs
from convoy.engines.support_checks import plain_convolution, transforms_allowed
from convoy.engines.torch_engine import TorchEngine, TorchExecutable
from convoy.problem import ConvProblem, Problem
from convoy.support import Support
from convoy.target import Target

TILES: Final = (8, 16, 32, 64)
"""Sides of a tile, in pixels."""


class FftTiled(TorchEngine):
    """FFT of square tiles that are smaller than the image and at least half of which is new."""

    id = "fft_tiled"
    family = "fft"
    offered_by_default = False

    def supports(self, problem: Problem, target: Target) -> Support:
        """Any dense convolution on an image larger than a tile."""
        support = plain_convolution(problem)
        if not support or not isinstance(problem, ConvProblem):
            return support
        if not (support := transforms_allowed(problem)):
            return support
        tiles = _tiles(problem)
        if not tiles:
            sides = "x".join(map(str, padded_sides(problem)))
            spans = "x".join(map(str, span(problem)))
            return Support.no(
                f"no tile of {TILES[0]} to {TILES[-1]} pixels is twice the filter's span of {spans} "
                f"and smaller than the padded image of {sides}"
            )
        return spectrum_fits(problem, min(tiles), min(tiles), target)

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """`tile`: the side of a tile in pixels, the smallest that is four times the filter's span first."""
        assert isinstance(problem, ConvProblem)
        fitting = [tile for tile in _tiles(problem) if spectrum_fits(problem, tile, tile, target)]
        return [Knobs.of(tile=tile) for tile in fitting]

    def executable(self, problem: Problem, knobs: Knobs) -> TorchExecutable:
        """The launch that the knobs describe."""
        assert isinstance(problem, ConvProblem)
        return SpectralConvolution(problem, knobs.integer("tile"), knobs.integer("tile"), images=1)


def _tiles(problem: ConvProblem) -> list[int]:
    least, most = 2 * max(span(problem)), max(padded_sides(problem))
    fitting = [tile for tile in TILES if least <= tile < most]
    return sorted(fitting, key=lambda tile: (tile < 2 * least, tile))


ENGINE = FftTiled()
