"""TMA descriptors of x, y and the residual for `igemm_swap_ab.cu`."""

from __future__ import annotations

from dataclasses import replace

from convoy.engines.hopper.igemm_swap_ab_limits import ROW_BYTES
from convoy.engines.hopper.igemm_swap_ab_tile_config import SwapAbTile
from convoy.engines.hopper.tensor_maps import BoxMap, PixelMap
from convoy.problem import ConvProblem
from convoy.problem.spec import DTYPE_BYTES


def pixel_map(problem: ConvProblem, form: SwapAbTile) -> PixelMap | BoxMap:
    """Descriptor of x: runs of pixels for each tap or, with a halo, boxes of rows. Planes are stored one after the other."""
    if not form.halo:
        return PixelMap.of(replace(problem, n=problem.n * form.planes), form.pixels // form.cluster)
    n, h, w, c = problem.n * form.planes, problem.h, problem.w, problem.c
    each = DTYPE_BYTES[problem.x_dtype]
    return _boxes(n, h, w, c, c, (ROW_BYTES // each, form.halo, form.halo_rows(w), 1), each)


def result_map(problem: ConvProblem, form: SwapAbTile, pitch: int) -> BoxMap:
    """Descriptor of y or the residual, whose pixels are `pitch` elements apart: boxes of 64 filters by `form.unit` pixels."""
    n, p, q, k = problem.n, problem.p, problem.q, problem.k
    if not form.halo:
        return _boxes(1, 1, n * p * q, k, pitch, (64, form.unit, 1, 1))
    columns = min(form.halo, form.unit)
    return _boxes(n, p, q, k, pitch, (64, columns, form.unit // columns, 1))


def _boxes(n: int, h: int, w: int, c: int, pitch: int, box: tuple[int, int, int, int], each: int = 2) -> BoxMap:
    return BoxMap((c, w, h, n), (pitch * each, w * pitch * each, h * w * pitch * each), box)
