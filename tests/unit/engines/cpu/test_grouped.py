"""cpu.grouped: exact on integers at every border, within its buffers, and the same bits for any number of threads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from convoy.engines.compilers import host_compiler
from convoy.engines.cpu.grouped import cpu_grouped
from convoy.engines.cpu.grouped.cpu_grouped import ENGINE, GroupedPartition
from convoy.engines.cpu.native_launch import PARALLEL_H
from convoy.engines.cpu.weight_tiles import VECTORS_H
from convoy.measurement.accuracy import judge, make_data
from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem, Epilogue, Knobs
from convoy.target import Target
from tests.unit.engines import sanitized

CPU = detect_target("cpu")
pytestmark = pytest.mark.skipif(not host_compiler.compiler_support(), reason="needs a C compiler")

FULL = Epilogue(bias=True, residual=True, activation="relu6")
RELU = Epilogue(bias=True, activation="relu")
BASE = ConvProblem(2, 40, 11, 9, 40, 3, 3, 1, 1, groups=5, layout="nhwc", numerics="strict", epilogue=RELU)

SHAPES = {
    "groups of 8": BASE,
    "groups of 8, stride 2": replace(BASE, stride_h=2, stride_w=2),
    "groups of 4": replace(BASE, groups=10),
    "groups of 20": replace(BASE, groups=2),
    "groups of 16": replace(BASE, c=48, k=48, groups=3, epilogue=FULL),
    "groups of 24": replace(BASE, c=48, k=48, groups=2),
    "groups of 32": replace(BASE, c=64, k=64, groups=2, epilogue=FULL),
    "3 channels for 4 filters": replace(BASE, c=15, k=20),
    "one channel for 8 filters": replace(BASE, c=5),
    "12 channels for 8 filters": replace(BASE, c=60),
    "more pixels than a block": replace(BASE, w=26, epilogue=FULL),
    "several bands": replace(BASE, h=40, w=60, stride_h=2, stride_w=2, epilogue=FULL),
    "a row wider than the slot": replace(BASE, h=5, w=300, c=64, k=64, groups=2),
    "5x5": replace(BASE, r=5, s=5, pad_h=2, pad_w=2),
    "1x1": replace(BASE, r=1, s=1, pad_h=0, pad_w=0),
    "1x1, stride 2": replace(BASE, r=1, s=1, pad_h=0, pad_w=0, stride_h=2, stride_w=2),
    "uneven": replace(BASE, r=2, s=5, pad_h=0, pad_w=3, stride_h=3, stride_w=2),
    "stride 3": replace(BASE, stride_h=2, stride_w=3, w=25),
    "dilation": replace(BASE, dilation_h=2, dilation_w=3, pad_h=2, pad_w=3),
    "dilation and stride": replace(BASE, dilation_w=2, stride_w=2, pad_w=2, w=12),
    "narrower than the filter": replace(BASE, w=2, pad_w=2),
    "padding wider than the image": replace(BASE, h=2, w=3, pad_h=5, pad_w=6),
    "columns that no tap reads": replace(BASE, r=1, s=1, pad_h=0, pad_w=0, stride_w=4),
    "one pixel": replace(BASE, h=3, w=3, pad_h=0, pad_w=0),
    "no epilogue": replace(BASE, epilogue=Epilogue()),
    "silu": replace(BASE, epilogue=Epilogue(True, activation="silu")),
    "gelu of groups of 24": replace(BASE, c=48, k=48, groups=2, epilogue=Epilogue(True, activation="gelu")),
    "hardswish of a sum": replace(BASE, groups=10, epilogue=Epilogue(residual=True, activation="hardswish")),
    "no image": replace(BASE, n=0),
}


@pytest.mark.parametrize(("dtype", "threads"), [("fp32", 1), ("fp32", 3), ("bf16", 1)])
@pytest.mark.parametrize("shape", SHAPES)
def test_integers_are_exact_at_every_border(shape: str, dtype: str, threads: int) -> None:
    problem = replace(SHAPES[shape], x_dtype=dtype, weight_dtype=dtype, y_dtype=dtype)
    assert ENGINE.supports(problem, CPU), ENGINE.supports(problem, CPU).reason
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for kind in ("integer", "normal"):
            data = make_data(problem, 3, kind)
            verdict = judge(ENGINE.build(problem, Knobs(), CPU), ENGINE.family, problem, data, kind)
            assert verdict.ok, verdict.reason
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"groups": 1}, "got 1 groups of 40 channels and 40 filters"),
        ({"groups": 40}, "a multiple of 4, got 40 groups of 1 channels and 1 filters"),
        ({"c": 200}, "at most 32 channels and filters"),
        ({"k": 200}, "at most 32 channels and filters"),
        ({"w": 100_000}, "input rows of at most 1048576 bytes, got 9600192"),
        ({"layout": "nchw"}, "needs layout nhwc"),
        ({"x_dtype": "fp16", "weight_dtype": "fp16", "y_dtype": "fp16"}, "needs fp32 or bf16, got fp16"),
    ],
    ids=["no groups", "depthwise", "channels", "filters", "rows", "layout", "dtype"],
)
def test_what_it_does_not_take_has_a_reason(change: dict[str, object], reason: str) -> None:
    support = ENGINE.supports(replace(BASE, **change), CPU)
    assert not support
    assert reason in support.reason
    assert "runs on CPUs" in ENGINE.supports(BASE, Target("cuda", "GPU", "sm_90", 1, 1, 1)).reason


@pytest.mark.parametrize("shape", SHAPES)
def test_a_band_fits_its_slot_and_bands_cover_the_image(shape: str) -> None:
    problem = SHAPES[shape]
    cut = GroupedPartition.of(problem)
    assert 1 <= cut.bands <= problem.p
    reach = (problem.r - 1) * problem.dilation_h
    for band in range(cut.bands):
        rows = problem.p * (band + 1) // cut.bands - problem.p * band // cut.bands
        values = ((rows - 1) * problem.stride_h + reach + 1) * cut.width * (problem.c // problem.groups)
        assert values <= cut.slot_floats
    one_row = (reach + 1) * cut.width * (problem.c // problem.groups)
    assert 4 * cut.slot_floats <= max(cpu_grouped.SLOT_BYTES, 4 * one_row)


def test_a_library_is_for_groups_of_one_size_and_has_a_name_of_its_own() -> None:
    """A package links the kernels of a net: two functions of one name would be one."""
    shapes = [BASE, replace(BASE, c=60), replace(BASE, groups=10), replace(BASE, stride_w=2), replace(BASE, stride_w=5)]
    names = [cpu_grouped.kernel(shape).function for shape in shapes]
    sizes = ["8_8_1", "12_8_1", "4_4_1", "8_8_2", "8_8_0"]
    assert names == [f"convoy_grouped_{size}" for size in sizes]
    assert cpu_grouped.kernel(replace(BASE, h=30, r=5, s=5)) == cpu_grouped.kernel(BASE)
    bf16 = cpu_grouped.kernel(replace(BASE, x_dtype="bf16", weight_dtype="bf16", y_dtype="bf16"))
    assert bf16.function == "convoy_grouped_8_8_1_bf16"


MAIN = """
#include <stdlib.h>
int main(void) {
    for (int64_t w = 1; w < 40; w = 2 * w + 3)
        for (int64_t side = 1; side <= 5; side += 2)
            for (int64_t dilation = 1; dilation <= 2; dilation++)
                for (int64_t bands = 1; bands <= 2; bands++) {
                    int64_t h = 6, pad = side, reach = (side - 1) * dilation, stride = STRIDE ? STRIDE : 3;
                    int64_t p = (h + 2 * pad - reach - 1) / stride + 1, q = (w + 2 * pad - reach - 1) / stride + 1;
                    int64_t width = (q - 1) * stride + reach + 1, rows = (up(p, bands) - 1) * stride + reach + 1;
                    int64_t c = 3 * CIN, k = 3 * KOUT, slot = rows * width * CIN;
                    Sizes z = {2, c, h, w, k, side, side, pad, pad, stride, stride, dilation, dilation, p, q, 3,
                               SILU, 1, bands, width, 1, slot};
                    float *weight = calloc(side * side * CIN * k, 4), *bias = calloc(k, 4), *held = calloc(slot, 4);
                    stored *x = calloc(2 * c * h * w, sizeof *x), *y = calloc(2 * k * p * q, sizeof *y);
                    stored *residual = calloc(2 * k * p * q, sizeof *y);
                    GROUPED(&z, (void *const[]){x, weight, bias, residual, y + MISSING, held});
                    free(x), free(weight), free(bias), free(residual), free(y), free(held);
                }
    return 0;
}
"""

FORMS = {
    "4 lanes": ("-DLANES=4", "-DCIN=3", "-DKOUT=12", "-DSTRIDE=1", "-DPIXELS=4"),
    "16 lanes, bf16": ("-DLANES=16", "-DCIN=32", "-DKOUT=32", "-DSTRIDE=2", "-DPIXELS=12", "-DBF16"),
    "any stride": ("-DLANES=8", "-DCIN=8", "-DKOUT=8", "-DSTRIDE=0", "-DPIXELS=12"),
}


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("form", FORMS)
def test_it_reads_and_writes_nothing_else(tmp_path: Path, form: str, missing: int) -> None:
    """By the compiler's own sanitizers; with a result that begins one value late they must say so."""
    source = "".join(part.read_text(encoding="utf-8") for part in (PARALLEL_H, VECTORS_H, cpu_grouped.SOURCE)) + MAIN
    done = sanitized.run(tmp_path, source, *FORMS[form], "-DGROUPED=convoy_grouped", f"-DMISSING={missing}")
    assert (done.returncode == 0) is (missing == 0), done.stderr[-2000:]


def test_the_sizes_are_those_of_the_source() -> None:
    assert sanitized.sizes_of(cpu_grouped.SOURCE) == [name for name, _ in cpu_grouped._GroupedSizes._fields_]
