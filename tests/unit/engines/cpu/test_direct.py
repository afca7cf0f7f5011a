"""cpu.direct: exact on integers however a problem is cut, within its buffers, and the same bits for any number of threads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from convoy.engines.base import Buffers
from convoy.engines.compilers import host_compiler
from convoy.engines.cpu import cpu_direct
from convoy.engines.cpu.cpu_direct import ENGINE, PART_BYTES, PIXELS, DirectPartition, tile
from convoy.engines.cpu.native_launch import PARALLEL_H
from convoy.engines.cpu.weight_tiles import VECTORS_H
from convoy.measurement.accuracy import judge, make_data
from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem, Epilogue, Knobs, LinearProblem
from convoy.target import Target
from tests.unit.engines import sanitized

CPU = detect_target("cpu")
pytestmark = pytest.mark.skipif(not host_compiler.compiler_support(), reason="needs a C compiler")

RELU = Epilogue(True, activation="relu")
BASE = ConvProblem(2, 20, 11, 9, 70, 3, 3, 1, 1, layout="nhwc", numerics="strict", epilogue=RELU)
FULL = Epilogue(bias=True, residual=True, activation="relu6")

MANY = PART_BYTES // (4 * tile()) + 76
"""Input channels whose weights, for a tile of output channels, are more than a part: tiles differ from CPU to CPU."""

SHAPES = {
    "3x3": BASE,
    "1x1": replace(BASE, r=1, s=1, pad_h=0, pad_w=0),
    "1x1 in parts": replace(BASE, r=1, s=1, pad_h=0, pad_w=0, c=MANY, h=5),
    "3x3 in parts": replace(BASE, n=1, c=max(530, MANY // 3), h=7, w=7, k=130),
    "a filter row larger than a part": replace(BASE, n=1, c=1030, h=4, w=5, k=9),
    "1x1, stride 2": replace(BASE, r=1, s=1, pad_h=0, pad_w=0, stride_h=2, stride_w=2),
    "7x7 of three channels": replace(BASE, c=3, h=30, w=29, r=7, s=7, pad_h=3, pad_w=3, stride_h=2, stride_w=2),
    "dilation": replace(BASE, dilation_h=2, dilation_w=3, pad_h=2, pad_w=3),
    "padding on both sides of a row": replace(BASE, w=2, s=5, pad_w=4),
    "padding wider than the image": replace(BASE, h=2, w=3, pad_h=5, pad_w=6),
    "no padding, uneven strides": replace(BASE, pad_h=0, pad_w=0, stride_h=3, stride_w=2),
    "one pixel": replace(BASE, h=3, w=3, pad_h=0, pad_w=0),
    "one channel": replace(BASE, c=1, k=1),
    "a whole tile": replace(BASE, k=tile()),
    "three quarters of a tile": replace(BASE, k=3 * tile() // 4, epilogue=FULL),
    "half a tile and a bit": replace(BASE, k=tile() // 2 + 1, epilogue=FULL),
    "every epilogue": replace(BASE, epilogue=FULL),
    "no epilogue": replace(BASE, epilogue=Epilogue()),
    "silu": replace(BASE, epilogue=Epilogue(True, activation="silu")),
    "gelu": replace(BASE, epilogue=Epilogue(True, activation="gelu")),
    "hardswish of a sum": replace(BASE, epilogue=Epilogue(residual=True, activation="hardswish")),
    "a sigmoid of one pixel": replace(BASE, h=3, w=3, pad_h=0, pad_w=0, epilogue=Epilogue(True, activation="sigmoid")),
    "no image": replace(BASE, n=0),
}


def launched(problem: ConvProblem, args: tuple[torch.Tensor, ...], constants: tuple[torch.Tensor, ...]) -> torch.Tensor:
    executable = ENGINE.build(problem, Knobs(), CPU)
    assert executable.workspace_bytes == ENGINE.workspace_bytes(problem, Knobs())
    y = torch.full(problem.y_spec.shape, torch.nan).contiguous(memory_format=torch.channels_last)
    workspace = torch.full((executable.workspace_bytes,), 255, dtype=torch.uint8)
    executable.launch(Buffers(args, [y], executable.pack(constants)), workspace)
    return y


@pytest.mark.parametrize(("dtype", "threads"), [("fp32", 1), ("fp32", 3), ("bf16", 1)])
@pytest.mark.parametrize("shape", SHAPES)
def test_integers_are_exact_however_a_problem_is_cut(shape: str, dtype: str, threads: int) -> None:
    problem = replace(SHAPES[shape], x_dtype=dtype, weight_dtype=dtype, y_dtype=dtype)
    assert ENGINE.supports(problem, CPU), ENGINE.supports(problem, CPU).reason
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        executable = ENGINE.build(problem, Knobs(), CPU)
        for kind in ("integer", "normal"):
            verdict = judge(executable, ENGINE.family, problem, make_data(problem, 3, kind), kind)
            assert verdict.ok, verdict.reason
    finally:
        torch.set_num_threads(before)


def test_shapes_in_parts_are_cut_so() -> None:
    parts = {name: DirectPartition.of(problem, 1) for name, problem in SHAPES.items() if problem.n}
    assert parts["1x1 in parts"].part_c < MANY
    assert parts["3x3 in parts"].part_r == 1
    assert parts["a filter row larger than a part"].part_r == 1
    assert parts["3x3"] == DirectPartition(bands=2, groups=1, part_r=3, part_c=20, slot_floats=0)


@pytest.mark.parametrize("pixels", range(1, 2 * PIXELS + 2))
def test_any_number_of_pixels(pixels: int) -> None:
    problem = replace(BASE, n=1, h=1, w=pixels, c=5, k=3)
    verdict = judge(
        ENGINE.build(problem, Knobs(), CPU), ENGINE.family, problem, make_data(problem, 4, "integer"), "integer"
    )
    assert verdict.ok, verdict.reason


LINEAR = {
    "one row": LinearProblem(1, 700, 130, epilogue=RELU),
    "some rows": LinearProblem(8, 33, 65, epilogue=FULL),
    "bf16": LinearProblem(3, 33, 65, "bf16", "half", FULL),
    "in parts": LinearProblem(3, 1100, 20, epilogue=Epilogue()),
    "a value": LinearProblem(1, 1, 1, numerics="strict"),
    "no row": LinearProblem(0, 8, 8),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_layers_are_convolutions_of_one_pixel(name: str) -> None:
    problem = LINEAR[name]
    assert ENGINE.supports(problem, CPU)
    for kind in ("integer", "normal"):
        executable = ENGINE.build(problem, Knobs(), CPU)
        assert executable.workspace_bytes == ENGINE.workspace_bytes(problem, Knobs())
        verdict = judge(executable, ENGINE.family, problem, make_data(problem, 3, kind), kind)
        assert verdict.ok, verdict.reason
    refused = ENGINE.supports(replace(problem, dtype="fp16"), CPU)
    assert not refused
    assert "needs fp32 or bf16, got fp16" in refused.reason


@pytest.mark.parametrize("threads", [1, 2, 5, 16])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    problem = replace(SHAPES["3x3 in parts"], epilogue=FULL)
    data = make_data(problem, 5)
    before = torch.get_num_threads()
    alone = launched(problem, data.args, data.constants)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(launched(problem, data.args, data.constants), alone)
    finally:
        torch.set_num_threads(before)


def test_a_program_built_for_fewer_threads_than_there_are_now_stays_in_its_workspace() -> None:
    problem, before = SHAPES["1x1 in parts"], torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        executable = ENGINE.build(problem, Knobs(), CPU)
        torch.set_num_threads(4)
        assert judge(executable, ENGINE.family, problem, make_data(problem, 6, "integer"), "integer").ok
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("activation", ["none", "relu", "relu6"])
def test_what_is_not_finite_goes_where_pytorch_lets_it_go(activation: str) -> None:
    problem = replace(BASE, c=2, r=1, s=1, pad_h=0, pad_w=0, epilogue=Epilogue(activation=activation))
    x = torch.ones(2, 2, 11, 9).contiguous(memory_format=torch.channels_last)
    x[0, 0, 0, 0], x[0, 1, 3, 4], x[1, 0, 5, 5] = torch.nan, torch.inf, -torch.inf
    weight = torch.ones(70, 2, 1, 1)
    y = torch.conv2d(x, weight)
    expected = {"none": y, "relu": torch.relu(y), "relu6": torch.nn.functional.relu6(y)}[activation]
    torch.testing.assert_close(launched(problem, (x,), (weight,)), expected, equal_nan=True, rtol=0, atol=0)


def test_threads_share_tiles_where_there_are_few_pixels() -> None:
    for tiles, groups in ((64, 32), (24, 24), (20, 20), (8, 8), (5, 4), (4, 4), (3, 3)):
        deep = DirectPartition.of(replace(BASE, n=1, c=512, h=7, w=7, k=tiles * tile()), 4)
        assert (deep.bands, deep.groups) == (2 if tiles < 4 else 1, groups)
    wide = replace(BASE, n=1, c=64, h=56, w=56, k=64)
    assert DirectPartition.of(wide, 2).groups == 1
    assert DirectPartition.of(wide, 2).bands == -(-56 * 56 // (PIXELS * cpu_direct.BAND_BLOCKS))
    few = replace(BASE, n=1, c=8, h=20, w=20, k=tile())
    division = DirectPartition.of(few, 16)
    assert division.groups == 1
    assert division.bands == 16


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layout": "nchw"}, "needs layout nhwc"),
        ({"groups": 2}, "needs groups = 1"),
        ({"x_dtype": "fp16", "weight_dtype": "fp16", "y_dtype": "fp16", "numerics": "as_torch"}, "needs fp32 or bf16"),
        ({"direction": "dgrad", "epilogue": Epilogue()}, "computes fprop"),
    ],
    ids=["layout", "groups", "dtype", "direction"],
)
def test_what_it_does_not_take_has_a_reason(change: dict[str, object], reason: str) -> None:
    support = ENGINE.supports(replace(BASE, **change), CPU)
    assert not support
    assert reason in support.reason
    assert "runs on CPUs" in ENGINE.supports(BASE, Target("cuda", "GPU", "sm_90", 1, 1, 1)).reason


MAIN = """
#include <stdlib.h>
int main(void) {
    for (int64_t c = 1; c < 40; c += 19)
        for (int64_t w = 1; w < 30; w = 2 * w + 3)
            for (int64_t side = 1; side <= 5; side += 2)
                for (int64_t stride = 1; stride <= 2; stride++)
                    for (int64_t part = 1; part <= c; part += 18) {
                        int64_t h = 6, k = 3 * TILE / 2, pad = side / 2 + 1, part_r = part < c && side > 1 ? 1 : side;
                        int64_t p = (h + 2 * pad - side) / stride + 1, q = (w + 2 * pad - side) / stride + 1;
                        int64_t blocks = up(p * q, PIXELS), bands = blocks > 2 ? 3 : 1, slot = up(blocks, bands) * PIXELS * TILE;
                        Sizes z = {2, c, h, w, k, side, side, pad, pad, stride, stride, 1, 1, p, q, RELU, 1,
                                   bands, 2, part_r, side > 1 ? c : part, 1, slot};
                        float *weight = calloc(2 * TILE * side * side * c, 4), *bias = calloc(2 * TILE, 4);
                        float *workspace = calloc(slot, 4);
                        stored *x = calloc(2 * c * h * w, sizeof *x), *zeros = calloc(side * c, sizeof *x);
                        stored *residual = calloc(2 * k * p * q, sizeof *x), *y = calloc(2 * k * p * q, sizeof *x);
                        NAMED(convoy_direct)(&z, (void *const[]){x, weight, bias, residual, y + MISSING, zeros, workspace});
                        free(x), free(weight), free(bias), free(residual), free(y), free(zeros), free(workspace);
                    }
    return 0;
}
"""


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("flags", [("-DLANES=4",), ("-DLANES=8", "-DBF16")], ids=["fp32", "bf16"])
def test_it_reads_and_writes_nothing_else(tmp_path: Path, flags: tuple[str, ...], missing: int) -> None:
    """By the compiler's own sanitizers; with a result that begins one value late they must say so."""
    source = "".join(part.read_text(encoding="utf-8") for part in (PARALLEL_H, VECTORS_H, cpu_direct.SOURCE)) + MAIN
    flags = (*flags, "-O0", "-DVECTORS=2", f"-DPIXELS={PIXELS}", f"-DMISSING={missing}")
    done = sanitized.run(tmp_path, source, *flags)
    assert (done.returncode == 0) is (missing == 0), done.stderr[-2000:]


def test_the_sizes_are_those_of_the_source() -> None:
    assert sanitized.sizes_of(cpu_direct.SOURCE) == [name for name, _ in cpu_direct._DirectSizes._fields_]


@pytest.mark.parametrize("channels", [tile() * 2, tile() - 3])
@pytest.mark.parametrize("activation", ["silu", "sigmoid", "gelu", "hardswish", "hardsigmoid"])
def test_smooth_activations_are_pytorchs_far_from_zero_too(activation: str, channels: int) -> None:
    problem = replace(
        BASE, n=1, c=1, h=5, w=9, k=channels, r=1, s=1, pad_h=0, pad_w=0, epilogue=Epilogue(activation=activation)
    )
    far = (1e-30, 29.9, 87.5, 88.7, 90.0, 1e30, torch.inf)
    special = [torch.nan, 0.0, *far, *(-value for value in far)]
    x = torch.tensor([*special, *torch.linspace(-20, 20, 29).tolist()]).reshape(1, 1, 5, 9)
    expected = getattr(torch.nn.functional, activation)(x.double()).expand(-1, channels, -1, -1).float()
    made = launched(problem, (x,), (torch.ones(channels, 1, 1, 1),))
    torch.testing.assert_close(made, expected, equal_nan=True, rtol=4e-7, atol=2e-6 if activation == "gelu" else 1e-30)
