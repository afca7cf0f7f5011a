"""cpu.direct_bf16: exact on integers however a problem is cut, by emulated instructions and, where they are, by real ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from convoy.engines.base import Buffers
from convoy.engines.compilers import host_compiler, instruction_sets
from convoy.engines.cpu.bf16 import bf16_units, cpu_direct_bf16
from convoy.engines.cpu.bf16.bf16_partition import (
    BAND_BYTES,
    PANELS,
    SUMS_BYTES,
    Bf16Partition,
    in_one_image,
    panels_of,
)
from convoy.engines.cpu.bf16.bf16_units import UNITS
from convoy.engines.cpu.bf16.cpu_direct_bf16 import ENGINE, Bf16Convolution, convolution_of, kernel, knob_space, takes
from convoy.engines.cpu.native_launch import KernelSource
from convoy.measurement.accuracy import judge, make_data
from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem, Epilogue, Knobs, LinearProblem
from convoy.target import Target
from tests.unit.engines import sanitized

CPU = detect_target("cpu")
pytestmark = pytest.mark.skipif(not host_compiler.compiler_support(), reason="needs a C compiler")

RELU = Epilogue(True, activation="relu")
FULL = Epilogue(bias=True, residual=True, activation="relu6")
BASE = ConvProblem(
    2, 20, 11, 9, 70, 3, 3, 1, 1,
    layout="nhwc", x_dtype="bf16", weight_dtype="bf16", y_dtype="bf16", numerics="half", epilogue=RELU,
)  # fmt: skip
POINTWISE = replace(BASE, r=1, s=1, pad_h=0, pad_w=0)

SHAPES = {
    "3x3": BASE,
    "1x1": POINTWISE,
    "1x1 in place": replace(POINTWISE, c=64, epilogue=FULL),
    "1x1 in place, less than a panel": replace(POINTWISE, n=1, c=32, h=4, w=5),
    "1x1, stride 2": replace(POINTWISE, stride_h=2, stride_w=2),
    "1x1, padded": replace(POINTWISE, c=32, pad_h=1, pad_w=2),
    "3x3, padded panels": replace(BASE, c=32, epilogue=FULL),
    "3x3 of two panels and more": replace(BASE, n=1, c=64, h=9, w=12, k=33),
    "padded panels of groups, dilated": replace(
        BASE, c=64, k=34, groups=2, dilation_h=2, dilation_w=3, pad_h=2, pad_w=1
    ),
    "1x5, padding beyond the filter": replace(BASE, c=32, r=1, s=5, pad_h=1, pad_w=6, k=16),
    "2x3 without padding": replace(BASE, c=32, r=2, pad_h=0, pad_w=0, k=40),
    "7x7 of three channels": replace(BASE, c=3, h=30, w=29, r=7, s=7, pad_h=3, pad_w=3, stride_h=2, stride_w=2),
    "dilation": replace(BASE, dilation_h=2, dilation_w=3, pad_h=2, pad_w=3),
    "padding on both sides of a row": replace(BASE, w=2, s=5, pad_w=4),
    "padding wider than the image": replace(BASE, h=2, w=3, pad_h=5, pad_w=6),
    "no padding, uneven strides": replace(BASE, pad_h=0, pad_w=0, stride_h=3, stride_w=2),
    "one pixel": replace(BASE, h=3, w=3, pad_h=0, pad_w=0),
    "one channel": replace(BASE, c=1, k=1),
    "16, 32, 48 and 64 channels of a block": replace(BASE, k=160, epilogue=FULL),
    "a tile and a bit": replace(BASE, k=17, epilogue=FULL),
    "three tiles": replace(BASE, k=48, h=5, w=4),
    "groups": replace(BASE, c=24, k=60, groups=3, epilogue=FULL),
    "groups of whole steps, in place": replace(POINTWISE, c=64, k=34, groups=2),
    "every epilogue": replace(BASE, epilogue=FULL),
    "no epilogue": replace(BASE, epilogue=Epilogue()),
    "silu": replace(BASE, epilogue=Epilogue(True, activation="silu")),
    "gelu of a sum": replace(BASE, epilogue=Epilogue(True, residual=True, activation="gelu")),
    "no image": replace(BASE, n=0),
}


def halved(problem: ConvProblem) -> ConvProblem:
    """The same on fp32 tensors under numerics `half`."""
    return replace(problem, x_dtype="fp32", weight_dtype="fp32", y_dtype="fp32", numerics="half")


def faults_of(problem: ConvProblem, knobs: Knobs, kinds: tuple[str, ...] = ("integer", "normal")) -> list[str]:
    executable = Bf16Convolution(problem, knobs, emulated=True)
    assert executable.workspace_bytes == ENGINE.workspace_bytes(problem, knobs)
    verdicts = [judge(executable, ENGINE.family, problem, make_data(problem, 3, kind), kind) for kind in kinds]
    return [f"{knobs}: {verdict.reason}" for verdict in verdicts if not verdict.ok]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_integers_are_exact_however_a_problem_is_cut(shape: str, threads: int) -> None:
    problem, before = SHAPES[shape], torch.get_num_threads()
    assert takes(problem, CPU), takes(problem, CPU).reason
    try:
        torch.set_num_threads(threads)
        faults = [fault for knobs in knob_space(problem, UNITS) for fault in faults_of(problem, knobs)]
        if threads == 1:
            faults += [
                fault for knobs in knob_space(halved(problem), UNITS) for fault in faults_of(halved(problem), knobs)
            ]
    finally:
        torch.set_num_threads(before)
    assert faults == []


@pytest.mark.parametrize("pixels", range(1, 67, 5))
def test_any_number_of_pixels(pixels: int) -> None:
    problem = replace(BASE, n=1, h=1, w=pixels, c=5, k=40)
    assert [fault for knobs in knob_space(problem, UNITS) for fault in faults_of(problem, knobs, ("integer",))] == []


LINEAR = {
    "one row": LinearProblem(1, 700, 130, "bf16", "half", RELU),
    "some rows": LinearProblem(8, 33, 65, "bf16", "half", FULL),
    "many rows in place": LinearProblem(70, 64, 20, "bf16", "half"),
    "a value": LinearProblem(1, 1, 1, "bf16", "half"),
    "no row": LinearProblem(0, 8, 8, "bf16", "half"),
    "fp32": LinearProblem(3, 40, 70, "fp32", "half", RELU),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_layers_are_convolutions_of_one_pixel(name: str) -> None:
    problem = LINEAR[name]
    assert takes(problem, CPU)
    for knobs in knob_space(convolution_of(problem), UNITS):
        executable = Bf16Convolution(convolution_of(problem), knobs, emulated=True)
        assert executable.workspace_bytes == ENGINE.workspace_bytes(problem, knobs)
        for kind in ("integer", "normal"):
            verdict = judge(executable, ENGINE.family, problem, make_data(problem, 3, kind), kind)
            assert verdict.ok, verdict.reason


def launched(problem: ConvProblem, knobs: Knobs, *, emulated: bool = True) -> torch.Tensor:
    executable, data = Bf16Convolution(problem, knobs, emulated=emulated), make_data(problem, 5)
    dtype = torch.bfloat16 if problem.x_dtype == "bf16" else torch.float32
    y = torch.full(problem.y_spec.shape, torch.nan, dtype=dtype).contiguous(memory_format=torch.channels_last)
    workspace = torch.full((executable.workspace_bytes,), 255, dtype=torch.uint8)
    executable.launch(Buffers(data.args, [y], executable.pack(data.constants)), workspace)
    return y


@pytest.mark.parametrize("shape", ["1x1 in place", "3x3 of two panels and more"])
@pytest.mark.parametrize("unit", UNITS)
def test_threads_channels_and_panels_do_not_change_the_bits(unit: str, shape: str) -> None:
    problem, before = SHAPES[shape], torch.get_num_threads()
    settings = knob_space(problem, (unit,))
    assert len(settings) == 4
    alone = launched(problem, settings[0])
    try:
        for threads in (2, 5):
            torch.set_num_threads(threads)
            assert all(torch.equal(launched(problem, knobs), alone) for knobs in settings)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    "shape", ["3x3", "1x1 in place", "3x3, padded panels", "groups", "7x7 of three channels", "gelu of a sum"]
)
def test_the_cpus_own_instructions_give_what_the_emulation_gives(unit: str, shape: str) -> None:
    if unit not in bf16_units.bf16_units()[0]:
        pytest.skip(f"this process cannot use {unit}")
    for problem in (SHAPES[shape], halved(SHAPES[shape])):
        assert ENGINE.supports(problem, CPU)
        for knobs in knob_space(problem, (unit,)):
            executable = ENGINE.build(problem, knobs, CPU)
            for kind in ("integer", "normal", "cancelling"):
                verdict = judge(executable, ENGINE.family, problem, make_data(problem, 3, kind), kind)
                assert verdict.ok, verdict.reason
            found, wanted = launched(problem, knobs, emulated=False).double(), launched(problem, knobs).double()
            assert float((found - wanted).norm() / wanted.norm()) < 2.0**-12  # a value may round the other way


def test_shapes_are_cut_as_their_names_say() -> None:
    for name in ("1x1 in place", "groups of whole steps, in place"):
        assert panels_of(SHAPES[name]) == ("in_place", "gathered")
    for name in ("3x3, padded panels", "padded panels of groups, dilated", "1x5, padding beyond the filter"):
        assert panels_of(SHAPES[name]) == ("padded", "gathered")
    for name in ("1x1, stride 2", "1x1, padded", "3x3", "7x7 of three channels"):
        assert panels_of(SHAPES[name]) == ("gathered",)
    assert panels_of(halved(SHAPES["1x1 in place"])) == ("gathered",)
    assert panels_of(halved(SHAPES["3x3, padded panels"])) == ("padded", "gathered")
    assert {panels for shape in SHAPES.values() for panels in panels_of(shape)} == set(PANELS)
    assert in_one_image(SHAPES["1x1"]).w == 2 * 11 * 9
    deep = replace(BASE, n=1, c=512, h=7, w=7, k=512)
    wide = replace(BASE, n=1, c=64, h=56, w=56, k=64)
    for panels in ("gathered", "padded"):
        cut = Bf16Partition.of(deep, 4, 32, panels)
        assert (cut.bands, cut.splits) == (1, 4)
        assert cut.slot_bytes - SUMS_BYTES <= BAND_BYTES
        cut = Bf16Partition.of(wide, 2, 32, panels)
        assert cut.splits == 1
        assert cut.bands >= 4
        assert cut.slot_bytes - SUMS_BYTES <= BAND_BYTES


PLANTED = {
    "a tile that is not zeroed": ("TILE_ZERO(3)", "(void)0", "amx"),
    "sums of two tiles exchanged": ("TILE_DP(2, 5, 6)", "TILE_DP(2, 4, 6)", "amx"),
    "the second rows' offset": ("t.a + 16 * u->a_step", "t.a + 15 * u->a_step", "amx"),
    "a step too few": ("steps = up(z->r * z->s * channels, STEP)", "steps = z->r * z->s * channels / STEP", "avx512"),
    "rows that are shared out with a gap": ("first = u->rows * i / parts", "first = up(u->rows * i, parts)", "avx512"),
    "the rest of a row that is not zeroed": ("if (to < end)", "if (0)", "avx512"),
    "taps beside the image": ("column < 0 || column >= z->w", "column < 0", "avx512"),
    "the second part of a split": (
        "least(tiles, blocks * (split + 1)",
        "least(tiles / 2, blocks * (split + 1)",
        "avx512",
    ),
    "the bias of the first tiles": ("e = {.bias = w->bias + tile * 16", "e = {.bias = w->bias", "avx512"),
    "a bound that is exchanged": ("not_above(value, 6.0f)", "not_above(value, 3.0f)", "avx512"),
    "padded panels, the next filter row": ("t->row += u->down", "t->row += u->across", "amx"),
    "padded panels, the next tap": ("t->tap * u->across", "0", "avx512"),
    "padded panels, the row of a pixel": ("/ w->line * z->q", "/ w->line * w->line", "avx512"),
    "padded panels, the rows above": ("top = first - z->pad_h", "top = first", "avx512"),
    "a residual of the first panel": ("w->residual + at : 0", "w->residual : 0", "avx512"),
}


SOURCES = (cpu_direct_bf16.BLOCKS_H, cpu_direct_bf16.EPILOGUE_H, cpu_direct_bf16.SOURCE)


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_shows(fault: str, tmp_path: Path) -> None:
    right, wrong, unit = PLANTED[fault]
    text, before = "".join(path.read_text(encoding="utf-8") for path in SOURCES), torch.get_num_threads()
    assert right in text
    faulty = tmp_path / "faulty.c"
    faulty.write_text(text.replace(right, wrong), encoding="utf-8")
    problem = replace(BASE, n=1, h=10, k=64, epilogue=FULL, c=32 if "padded" in fault else 20)
    panels = "padded" if "padded" in fault else "gathered"
    source = kernel("bf16", emulated=True)
    try:
        torch.set_num_threads(1 + (fault == "the second part of a split"))
        executable = Bf16Convolution(problem, Knobs.of(unit=unit, channels=32, panels=panels), emulated=True)
        executable.use(
            KernelSource((*source.parts[:-3], faulty), (*source.flags, "-O0"), source.engine, source.function)
        )
        verdict = judge(executable, ENGINE.family, problem, make_data(problem, 3, "integer"), "integer")
    finally:
        torch.set_num_threads(before)
    assert not verdict.ok


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layout": "nchw"}, "needs layout nhwc"),
        ({"c": 21, "k": 42, "groups": 21}, "needs groups of at least 4 input channels, got 1"),
        ({"x_dtype": "fp16", "weight_dtype": "fp16", "y_dtype": "fp16"}, "needs bf16 or fp32, got fp16"),
        (
            {"x_dtype": "fp32", "weight_dtype": "fp32", "y_dtype": "fp32", "numerics": "as_torch"},
            "needs bf16, or fp32 under numerics half, got fp32 under as_torch",
        ),
        ({"direction": "dgrad", "epilogue": Epilogue()}, "computes fprop"),
    ],
    ids=["layout", "groups", "dtype", "numerics", "direction"],
)
def test_what_it_does_not_take_has_a_reason(change: dict[str, object], reason: str) -> None:
    support = ENGINE.supports(replace(BASE, **change), CPU)
    assert not support
    assert reason in support.reason
    assert "runs on CPUs" in ENGINE.supports(BASE, Target("cuda", "GPU", "sm_90", 1, 1, 1)).reason


def test_doctor_asks_about_bf16() -> None:
    (sample,) = ENGINE.samples()
    assert takes(sample, CPU)
    assert bool(ENGINE.supports(sample, CPU)) == bool(bf16_units.bf16_units()[0])
    assert ENGINE.supports(sample, CPU) or "AVX-512 BF16" in ENGINE.supports(sample, CPU).reason


AVX512 = frozenset(flag for level in instruction_sets.KERNEL_LEVELS[:-1] for flag in level[1])
AMX = AVX512 | instruction_sets.KERNEL_LEVELS[-1][1]


@pytest.mark.parametrize(
    ("flags", "limit", "refusal", "units", "reason"),
    [
        (AMX, "", "", UNITS, ""),
        (AMX, "", "Linux refuses", ("avx512",), "Linux refuses"),
        (AMX, "avx512_bf16", "", ("avx512",), "AMX is not there"),
        (AMX, "avx512", "", (), "which CONVOY_MAX_CPU_ISA=avx512 rules out"),
        (AVX512, "", "", ("avx512",), "AMX is not there"),
        (AVX512 - {"avx512_bf16"}, "", "", (), "needs a CPU with AMX or AVX-512 BF16, which this one lacks"),
    ],
)
def test_the_units_follow_from_the_cpu_the_limit_and_the_system(
    flags, limit, refusal, units, reason, monkeypatch
) -> None:
    monkeypatch.setattr(bf16_units, "cpu_flags", lambda: flags)
    monkeypatch.setattr(bf16_units, "amx_refusal", lambda: refusal)
    monkeypatch.setattr(bf16_units, "_compiler_refusal", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    found, why = bf16_units._units.__wrapped__(limit)
    assert found == units
    assert reason in why
    assert bool(why) == ("amx" not in units)


MAIN = """
#include <stdlib.h>
int main(void) {
    for (int64_t c = 1; c < 70; c += 31)
        for (int64_t w = 1; w < 20; w = 4 * w + 9)
            for (int64_t side = 1; side <= 3; side += 2)
                for (int64_t stride = 1; stride <= 2; stride++)
                    for (int64_t kind = 0; kind < 4; kind++) {
                        int64_t h = 6, k = 40, pad = side / 2, channels = 32 + kind / 2 * 32;
                        int64_t p = (h + 2 * pad - side) / stride + 1, q = (w + 2 * pad - side) / stride + 1;
                        int64_t steps = up(side * side * c, STEP), row = (steps + 1) * STEP, count = up(p * q, PANEL);
                        int64_t fewer_copies = side > 1 ? PADDED : sizeof(stored) == 2 ? IN_PLACE : GATHERED;
                        int64_t panels = stride > 1 || c % 32 ? GATHERED : fewer_copies;
                        int64_t bands = count > 1 ? 2 : 1, held = (panels == IN_PLACE ? 1 : up(count, bands)) * PANEL;
                        if (panels == PADDED) row = c + STEP, held = (up(p, bands) + side - 1) * (w + 2 * pad) + PANEL;
                        int64_t slot = PANEL * COLUMNS * 4 + held * row * 2;
                        Sizes z = {2, c, h, w, k, side, side, pad, pad, stride, stride, 1, 1, 1, p, q, GELU, 1,
                                   kind % 2, channels, panels, bands, 2, 1, slot, row};
                        stored *x = calloc(2 * c * h * w, sizeof(stored)), *y = calloc(2 * k * p * q, sizeof(stored));
                        stored *residual = calloc(2 * k * p * q, sizeof(stored));
                        bf16 *weight = calloc(up(k, 16) * steps * TILE_VALUES, 2);
                        float *bias = calloc(up(k, 16) * 16, 4);
                        uint8_t *workspace = calloc(slot, 1);
                        FUNCTION(&z, (void *const[]){x, weight, bias, residual, y + MISSING, workspace});
                        free(x), free(weight), free(bias), free(residual), free(y), free(workspace);
                    }
    return 0;
}
"""


@pytest.mark.parametrize(("dtype", "missing"), [("bf16", 0), ("bf16", 1), ("fp32", 0)])
def test_it_reads_and_writes_nothing_else(tmp_path: Path, dtype: str, missing: int) -> None:
    """By the compiler's own sanitizers; with a result that begins one value late they must say so."""
    source = kernel(dtype, emulated=True)
    defines = [flag for flag in source.flags if flag.startswith("-D")]
    done = sanitized.run(
        tmp_path, source.text() + MAIN, *defines, f"-DMISSING={missing}", "-O0", "-Wl,--no-as-needed", "-lm"
    )
    assert (done.returncode == 0) is (missing == 0), done.stderr[-2000:]


def test_the_sizes_are_those_of_the_source() -> None:
    assert sanitized.sizes_of(cpu_direct_bf16.SOURCE) == [name for name, _ in cpu_direct_bf16._Bf16Sizes._fields_]
