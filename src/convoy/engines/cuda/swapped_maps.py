"""What the tensor-copy unit is told for `swapped.cu`: of x, of y and of a residual."""

from __future__ import annotations

from convoy.engines.cuda.maps import BoxMap, PixelMap
from convoy.engines.cuda.swapped_form import CHANNELS, Form
from convoy.problem import ConvProblem

_BYTES = 2


def pixel_map(problem: ConvProblem, form: Form) -> PixelMap | BoxMap:
    """x: runs of pixels for each tap, or with a halo boxes of some rows and their neighbours."""
    if not form.halo:
        return PixelMap.of(problem, form.pixels // form.cluster)
    return _boxes(
        problem.n, problem.h, problem.w, problem.c, problem.c, (CHANNELS, form.halo, form.halo_rows(problem.w), 1)
    )


def result_map(problem: ConvProblem, form: Form, pitch: int) -> BoxMap:
    """Y or a residual, each pixel `pitch` elements from the one before: 64 filters of as many pixels as are copied at once."""
    n, p, q, k = problem.n, problem.p, problem.q, problem.k
    if not form.halo:
        return _boxes(1, 1, n * p * q, k, pitch, (64, form.unit, 1, 1))
    columns = min(form.halo, form.unit)
    return _boxes(n, p, q, k, pitch, (64, columns, form.unit // columns, 1))


def _boxes(n: int, h: int, w: int, c: int, pitch: int, box: tuple[int, int, int, int]) -> BoxMap:
    return BoxMap((c, w, h, n), (pitch * _BYTES, w * pitch * _BYTES, h * w * pitch * _BYTES), box)
