"""cpu.winograd: right at every border however a problem is cut, within its buffers, the same bits for any number of threads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from convoy.engines.base import Buffers
from convoy.engines.compilers import host_compiler
from convoy.engines.cpu import cpu_winograd
from convoy.engines.cpu.cpu_direct import PIXELS, tile
from convoy.engines.cpu.cpu_winograd import BAND_KIB, ENGINE, TILES, WinogradPartition
from convoy.engines.cpu.native_launch import PARALLEL_H
from convoy.engines.cpu.weight_tiles import VECTORS_H
from convoy.measurement.accuracy import judge, make_data
from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem, Epilogue, Knobs
from convoy.target import Target
from tests.unit.engines import sanitized

CPU = detect_target("cpu")
pytestmark = pytest.mark.skipif(not host_compiler.compiler_support(), reason="needs a C compiler")

RELU = Epilogue(True, activation="relu")
BASE = ConvProblem(2, 20, 11, 9, 70, 3, 3, 1, 1, layout="nhwc", epilogue=RELU)
FULL = Epilogue(bias=True, residual=True, activation="relu6")

SHAPES = {
    "edges that no tile fits": BASE,
    "whole tiles": replace(BASE, h=8, w=12),
    "several bands": replace(BASE, c=96, h=30, w=31, k=40),
    "tiles of two images in one band": replace(BASE, n=5, h=4, w=4, c=40),
    "no padding": replace(BASE, pad_h=0, pad_w=0),
    "padding of two": replace(BASE, pad_h=2, pad_w=2),
    "padding wider than the image": replace(BASE, h=2, w=3, pad_h=5, pad_w=6),
    "one pixel": replace(BASE, h=3, w=3, pad_h=0, pad_w=0),
    "one row": replace(BASE, h=1, w=17),
    "one channel": replace(BASE, c=1, k=1),
    "three channels": replace(BASE, c=3, k=33),
    "a register of channels": replace(BASE, c=16, k=16),
    "a whole tile of channels": replace(BASE, c=32, k=tile(), epilogue=FULL),
    "three quarters of one": replace(BASE, k=3 * tile() // 4, epilogue=FULL),
    "every epilogue": replace(BASE, epilogue=FULL),
    "no epilogue": replace(BASE, epilogue=Epilogue()),
    "silu": replace(BASE, epilogue=Epilogue(True, activation="silu")),
    "gelu": replace(BASE, epilogue=Epilogue(True, activation="gelu")),
    "hardswish of a sum": replace(BASE, epilogue=Epilogue(residual=True, activation="hardswish")),
    "no image": replace(BASE, n=0),
}


def knobs(m: int, band_kib: int = BAND_KIB[0]) -> Knobs:
    return Knobs.of(m=m, band_kib=band_kib)


def launched(
    problem: ConvProblem, m: int, args: tuple[torch.Tensor, ...], constants: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    executable = ENGINE.build(problem, knobs(m), CPU)
    assert executable.workspace_bytes == ENGINE.workspace_bytes(problem, knobs(m))
    y = torch.full(problem.y_spec.shape, torch.nan).contiguous(memory_format=torch.channels_last)
    workspace = torch.full((executable.workspace_bytes,), 255, dtype=torch.uint8)
    executable.launch(Buffers(args, [y], executable.pack(constants)), workspace)
    return y


@pytest.mark.parametrize("m", TILES)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_results_keep_their_bound_at_every_border(shape: str, threads: int, m: int) -> None:
    problem = SHAPES[shape]
    assert ENGINE.supports(problem, CPU), ENGINE.supports(problem, CPU).reason
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        executable = ENGINE.build(problem, knobs(m), CPU)
        for kind in ("normal", "cancelling"):
            data = make_data(problem, 3, kind)
            verdict = judge(executable, ENGINE.family, problem, data, kind)
            assert verdict.ok, verdict.reason
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("m", "multiple"), [(2, 4), (4, 576)])
def test_where_the_transformed_weights_are_integers_the_result_is_exact(m: int, multiple: int) -> None:
    """4 G g G^T has no fractions for m = 2, 576 of them none for m = 4; sums stay under 2^24."""
    problem = replace(BASE, c=3, epilogue=Epilogue())
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-1, 2, (2, 3, 11, 9), generator=generator).float().contiguous(memory_format=torch.channels_last)
    weight = torch.randint(-1, 2, (70, 3, 3, 3), generator=generator).float() * multiple
    expected = torch.conv2d(x.double(), weight.double(), padding=1)
    assert torch.equal(launched(problem, m, (x,), (weight,)).double(), expected)


@pytest.mark.parametrize("m", TILES)
@pytest.mark.parametrize("tiles", range(1, 2 * PIXELS + 2))
def test_any_number_of_tiles(tiles: int, m: int) -> None:
    problem = replace(BASE, n=1, h=m, w=tiles * m, c=5, k=3)
    verdict = judge(ENGINE.build(problem, knobs(m), CPU), ENGINE.family, problem, make_data(problem, 4), "normal")
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("m", TILES)
@pytest.mark.parametrize("threads", [2, 5, 16])
def test_any_number_of_threads_gives_the_same_bits(threads: int, m: int) -> None:
    problem = replace(SHAPES["several bands"], epilogue=FULL)
    data = make_data(problem, 5)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = launched(problem, m, data.args, data.constants)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(launched(problem, m, data.args, data.constants), alone)
    finally:
        torch.set_num_threads(before)


def test_a_program_built_for_fewer_threads_than_there_are_now_stays_in_its_workspace() -> None:
    problem, before = SHAPES["several bands"], torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        executable = ENGINE.build(problem, knobs(4), CPU)
        torch.set_num_threads(4)
        assert judge(executable, ENGINE.family, problem, make_data(problem, 6), "normal").ok
    finally:
        torch.set_num_threads(before)


def test_bands_fit_a_cache_and_threads_share_channels_where_there_are_few_of_them() -> None:
    wide = replace(BASE, n=1, c=64, h=224, w=224, k=64)
    for m in TILES:
        division = WinogradPartition.of(wide, knobs(m), 2)
        assert division.groups == 1
        assert division.bands % 2 == 0
        assert BAND_KIB[0] << 9 < 4 * division.slot_floats <= BAND_KIB[0] << 10
    deep = replace(BASE, n=1, c=512, h=7, w=7, k=512)
    assert (WinogradPartition.of(deep, knobs(4), 4).bands, WinogradPartition.of(deep, knobs(4), 4).groups) == (1, 4)
    assert WinogradPartition.of(replace(deep, k=20), knobs(4), 16).groups == -(-20 // host_compiler.lanes())


def test_settings_that_cut_a_problem_alike_are_offered_once() -> None:
    assert ENGINE.space(replace(BASE, n=1, c=8, h=7, w=7), CPU) == [knobs(4), knobs(2)]
    many = ENGINE.space(replace(BASE, n=1, c=512, h=28, w=28, k=512), CPU)
    assert many == [knobs(4), knobs(2), knobs(4, BAND_KIB[1]), knobs(2, BAND_KIB[1])]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"r": 5}, "needs a 3x3 filter, got 5x3"),
        ({"stride_h": 2}, "needs stride 1, got 2x1"),
        ({"dilation_w": 2}, "needs dilation 1, got 1x2"),
        ({"groups": 2}, "needs groups = 1"),
        ({"layout": "nchw"}, "needs layout nhwc"),
    ],
    ids=["filter", "stride", "dilation", "groups", "layout"],
)
def test_what_it_does_not_take_has_a_reason(change: dict[str, object], reason: str) -> None:
    support = ENGINE.supports(replace(BASE, **change), CPU)
    assert not support
    assert reason in support.reason
    assert "runs on CPUs" in ENGINE.supports(BASE, Target("cuda", "GPU", "sm_90", 1, 1, 1)).reason


MAIN = """
#include <stdlib.h>
int main(void) {
    for (int64_t m = 2; m <= 4; m += 2)
        for (int64_t c = 1; c < 40; c += 19)
            for (int64_t w = 1; w < 20; w = 2 * w + 3)
                for (int64_t pad = 0; pad <= 3; pad += 1 + pad)
                    for (int64_t bands = 1; bands <= 3; bands += 2) {
                        int64_t h = 6, k = 3 * TILE / 2, p = h + 2 * pad - 2, q = w + 2 * pad - 2, positions = (m + 2) * (m + 2);
                        if (q < 1) continue;
                        int64_t rows = up(p, m), columns = up(q, m), tiles = 2 * rows * columns, row = up(c, LANES) * LANES + 1;
                        if (bands > up(tiles, PIXELS)) continue;
                        int64_t slot = positions * up(up(tiles, PIXELS), bands) * PIXELS * (row + TILE);
                        int64_t activation = c > 20 ? SILU : RELU;
                        Sizes z = {2, c, h, w, k, pad, pad, p, q, activation, 1, m, rows, columns, bands, 2, row, 1, slot};
                        float *x = calloc(2 * c * h * w, 4), *weight = calloc(2 * TILE * positions * c, 4);
                        float *bias = calloc(2 * TILE, 4), *residual = calloc(2 * k * p * q, 4), *y = calloc(2 * k * p * q, 4);
                        float *workspace = calloc(slot, 4);
                        convoy_winograd(&z, (void *const[]){x, weight, bias, residual, y + MISSING, workspace});
                        free(x), free(weight), free(bias), free(residual), free(y), free(workspace);
                    }
    return 0;
}
"""


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("lanes", [4, 8])
def test_it_reads_and_writes_nothing_else(tmp_path: Path, lanes: int, missing: int) -> None:
    """By the compiler's own sanitizers; with a result that begins one value late they must say so."""
    source = "".join(part.read_text(encoding="utf-8") for part in (PARALLEL_H, VECTORS_H, cpu_winograd.SOURCE)) + MAIN
    flags = (f"-DLANES={lanes}", "-DVECTORS=2", f"-DPIXELS={PIXELS}", f"-DMISSING={missing}")
    done = sanitized.run(tmp_path, source, *flags)
    assert (done.returncode == 0) is (missing == 0), done.stderr[-2000:]


def test_the_sizes_are_those_of_the_source() -> None:
    assert sanitized.sizes_of(cpu_winograd.SOURCE) == [name for name, _ in cpu_winograd._WinogradSizes._fields_]
