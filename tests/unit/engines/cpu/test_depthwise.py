"""cpu.depthwise: exact on integers at every border, within its buffers, and the same bits for any number of threads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from convoy.engines.compilers import host_compiler
from convoy.engines.cpu import cpu_depthwise
from convoy.engines.cpu.cpu_depthwise import ENGINE
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
BASE = ConvProblem(
    2,
    40,
    11,
    9,
    40,
    3,
    3,
    1,
    1,
    groups=40,
    layout="nhwc",
    numerics="strict",
    epilogue=Epilogue(True, activation="relu"),
)

SHAPES = {
    "3x3": BASE,
    "3x3, stride 2": replace(BASE, stride_h=2, stride_w=2),
    "5x5": replace(BASE, r=5, s=5, pad_h=2, pad_w=2),
    "5x5, stride 2": replace(BASE, r=5, s=5, pad_h=2, pad_w=2, stride_h=2, stride_w=2, w=12),
    "5x5 with more padding than filter": replace(BASE, r=5, s=5, pad_h=6, pad_w=7, epilogue=FULL),
    "as many pixels as a block": replace(BASE, w=4),
    "a pixel more than a block": replace(BASE, w=5, epilogue=FULL),
    "7x7": replace(BASE, r=7, s=7, pad_h=3, pad_w=3, h=20, w=21),
    "7x7 of as many pixels as a block": replace(BASE, r=7, s=7, pad_h=3, pad_w=3, h=7, w=7, epilogue=FULL),
    "7x7, two more than a block": replace(BASE, r=7, s=7, pad_h=3, pad_w=3, h=5, w=9),
    "7x7 within the image": replace(BASE, r=7, s=7, pad_h=0, pad_w=0, h=9, w=22, epilogue=FULL),
    "7x7 with more padding than filter": replace(BASE, r=7, s=7, pad_h=8, pad_w=9, h=3, w=4),
    "7x7, stride 2": replace(BASE, r=7, s=7, pad_h=3, pad_w=3, stride_h=2, stride_w=2),
    "gelu": replace(BASE, epilogue=Epilogue(True, activation="gelu")),
    "1x1": replace(BASE, r=1, s=1, pad_h=0, pad_w=0),
    "uneven": replace(BASE, r=2, s=5, pad_h=0, pad_w=3, stride_h=3, stride_w=2),
    "dilation": replace(BASE, dilation_h=2, dilation_w=3, pad_h=2, pad_w=3),
    "dilation and stride": replace(BASE, dilation_w=2, stride_w=2, pad_w=2, w=12),
    "narrower than the filter": replace(BASE, w=2, pad_w=2),
    "padding wider than the image": replace(BASE, h=2, w=3, pad_h=5, pad_w=6),
    "no padding": replace(BASE, pad_h=0, pad_w=0),
    "one pixel": replace(BASE, h=3, w=3, pad_h=0, pad_w=0),
    "fewer channels than a register": replace(BASE, c=3, k=3, groups=3),
    "a register": replace(BASE, c=16, k=16, groups=16),
    "every epilogue": replace(BASE, epilogue=FULL),
    "no epilogue": replace(BASE, epilogue=Epilogue()),
    "silu": replace(BASE, epilogue=Epilogue(True, activation="silu")),
    "hardswish of a sum": replace(BASE, epilogue=Epilogue(residual=True, activation="hardswish")),
    "a sigmoid of one pixel": replace(BASE, h=3, w=3, pad_h=0, pad_w=0, epilogue=Epilogue(True, activation="sigmoid")),
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
        ({"k": 80}, "needs one filter per channel, got 40 channels, 80 filters"),
        ({"groups": 20}, "needs one filter per channel"),
        ({"r": 8, "s": 8, "pad_h": 4, "pad_w": 4}, "at most 49 values, got 8 x 8"),
        ({"layout": "nchw"}, "needs layout nhwc"),
        ({"x_dtype": "fp16", "weight_dtype": "fp16", "y_dtype": "fp16"}, "needs fp32 or bf16, got fp16"),
    ],
    ids=["filters", "groups", "taps", "layout", "dtype"],
)
def test_what_it_does_not_take_has_a_reason(change: dict[str, object], reason: str) -> None:
    support = ENGINE.supports(replace(BASE, **change), CPU)
    assert not support
    assert reason in support.reason
    assert "runs on CPUs" in ENGINE.supports(BASE, Target("cuda", "GPU", "sm_90", 1, 1, 1)).reason


def test_a_library_is_for_filters_of_one_side_and_has_a_name_of_its_own() -> None:
    """A package links the kernels of a net: two functions of one name would be one."""
    shapes = [BASE, *(replace(BASE, r=side, s=side) for side in (5, 7, 4)), replace(BASE, r=3, s=5)]
    kernels = [cpu_depthwise.kernel(shape) for shape in shapes]
    assert [kernel.function.removeprefix("convoy_depthwise") for kernel in kernels] == ["3", "5", "7", "", ""]
    assert kernels[3] == kernels[4]
    bf16 = cpu_depthwise.kernel(replace(BASE, x_dtype="bf16", weight_dtype="bf16", y_dtype="bf16"))
    assert len({kernel.function for kernel in (*kernels, bf16)}) == 5
    for kernel in (*kernels, bf16):
        assert kernel.bound()


MAIN = """
#include <stdlib.h>
int main(void) {
    for (int64_t c = 1; c < 40; c += 13)
        for (int64_t w = 1; w < 30; w = 2 * w + 3)
            for (int64_t side = 1; side <= 7; side += 2)
                for (int64_t stride = 1; stride <= 2; stride++)
                    for (int64_t dilation = 1; dilation <= 2; dilation++) {
                        int64_t h = 6, pad = side, reach = (side - 1) * dilation;
                        int64_t p = (h + 2 * pad - reach - 1) / stride + 1, q = (w + 2 * pad - reach - 1) / stride + 1;
                        if (w + 2 * pad <= reach || h + 2 * pad <= reach) continue;
                        Sizes z = {2, c, h, w, c, side, side, pad, pad, stride, stride, dilation, dilation, p, q, RELU, 1, 1};
                        float *weight = calloc(side * side * c, 4), *bias = calloc(c, 4);
                        stored *x = calloc(2 * c * h * w, sizeof *x), *y = calloc(2 * c * p * q, sizeof *y);
                        stored *residual = calloc(2 * c * p * q, sizeof *y);
                        NAMED(convoy_depthwise)(&z, (void *const[]){x, weight, bias, residual, y + MISSING});
                        free(x), free(weight), free(bias), free(residual), free(y);
                    }
    return 0;
}
"""


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("flags", [("-DLANES=4",), ("-DLANES=16", "-DBF16")], ids=["fp32", "bf16"])
def test_it_reads_and_writes_nothing_else(tmp_path: Path, flags: tuple[str, ...], missing: int) -> None:
    """By the compiler's own sanitizers; with a result that begins one value late they must say so."""
    source = "".join(part.read_text(encoding="utf-8") for part in (PARALLEL_H, VECTORS_H, cpu_depthwise.SOURCE)) + MAIN
    done = sanitized.run(tmp_path, source, *flags, f"-DMISSING={missing}")
    assert (done.returncode == 0) is (missing == 0), done.stderr[-2000:]


def test_the_sizes_are_those_of_the_source() -> None:
    assert sanitized.sizes_of(cpu_depthwise.SOURCE) == [name for name, _ in cpu_depthwise._DepthwiseSizes._fields_]
    assert f"#define MOST_TAPS {cpu_depthwise.MOST_TAPS}\n" in cpu_depthwise.SOURCE.read_text(encoding="utf-8")
