"""cpu.gated_1x1 and cpu.depthwise_mean: right by float64, the bits of their kernels one after the other, within their buffers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from convoy.engines.base import Buffers, Engine
from convoy.engines.compilers import host_compiler
from convoy.engines.cpu import cpu_depthwise, cpu_direct
from convoy.engines.cpu.chains import cpu_depthwise_mean, cpu_gated_1x1
from convoy.engines.cpu.chains.layer_call import LAYER_H
from convoy.engines.cpu.cpu_direct import PART_BYTES, DirectPartition, tile
from convoy.engines.cpu.native_launch import PARALLEL_H
from convoy.engines.cpu.weight_tiles import VECTORS_H
from convoy.graph.text import parse_graph
from convoy.measurement.candidate import prepare
from convoy.measurement.data import make_data
from convoy.measurement.device.detect import detect_target
from convoy.measurement.guards import run_guarded
from convoy.measurement.reference_data import ReferenceData
from convoy.problem import ConvProblem, Knobs, SubgraphProblem
from convoy.target import Target
from tests.unit.engines import sanitized
from tests.unit.engines.banded_cases import Part
from tests.unit.engines.cpu_gate_cases import MEANS, averaged, gated

CPU = detect_target("cpu")
pytestmark = pytest.mark.skipif(not host_compiler.compiler_support(), reason="needs a C compiler")

GATED = cpu_gated_1x1.ENGINE
AVERAGED = cpu_depthwise_mean.ENGINE

BF16_ERROR = 2.0**-7
"""More than the error of a few roundings to bf16 in a row."""

GATES = {
    "a block of EfficientNet": gated((2, 96, 14, 14), 24),
    "its residual": gated((1, 144, 9, 7), 24, residual=True),
    "MobileNetV3's": gated((3, 72, 7, 7), 40, activation="hardswish", order="%g, %x"),
    "RegNet's, with everything": gated((2, 40, 6, 5), 40, residual=True, activation="relu"),
    "channels that fill no register": gated((2, 13, 5, 7), 17, bias=False),
    "more filters than a tile": gated((1, 20, 9, 9), 150),
    "several bands": gated((1, 320, 20, 20), 16, activation="silu"),
    "one pixel": gated((3, 16, 1, 1), 8),
    "a value and itself": gated((1, 16, 6, 6), 16, residual=True),
    "no image": gated((0, 16, 6, 6), 8),
}

AVERAGES = {
    "a block of EfficientNet": averaged((2, 96, 14, 14), Part(0, 3, 1, 1, activation="silu")),
    "of stride 2": averaged((1, 24, 13, 11), Part(0, 5, 2, 2, activation="hardswish"), "mean"),
    "flat": averaged((3, 40, 7, 7), Part(0, 3, 1, 1, activation="relu"), "flat"),
    "from the end": averaged((2, 32, 5, 6), Part(0, 3, 1, 1), "from the end"),
    "channels that fill no register": averaged((2, 5, 9, 8), Part(0, 3, 2, 1, bias=False)),
    "a register and some": averaged((1, 71, 8, 8), Part(0, 7, 1, 3, activation="silu")),
    "padding wider than the image": averaged((1, 8, 2, 3), Part(0, 3, 1, 5)),
    "dilation": averaged((1, 8, 15, 15), Part(0, 3, 1, 2, dilation=2)),
    "one pixel": averaged((2, 16, 1, 1), Part(0, 3, 1, 1, activation="silu")),
    "worth several threads": averaged((2, 480, 28, 28), Part(0, 3, 1, 1)),
    "no image": averaged((0, 16, 6, 6), Part(0, 3, 1, 1)),
}

ALL = [pytest.param(GATED, problem, id=f"gated, {name}") for name, problem in GATES.items()]
ALL += [pytest.param(AVERAGED, problem, id=f"averaged, {name}") for name, problem in AVERAGES.items()]


def as_bf16(problem: SubgraphProblem) -> SubgraphProblem:
    return SubgraphProblem(problem.text.replace("fp32", "bf16"), problem.layout)


@pytest.mark.parametrize(("engine", "problem"), ALL)
def test_it_is_right_by_float64_and_keeps_to_its_buffers(engine: Engine, problem: SubgraphProblem) -> None:
    for given, bound in ((problem, 1e-6), (as_bf16(problem), BF16_ERROR)):
        assert engine.supports(given, CPU), engine.supports(given, CPU).reason
        bench = ReferenceData(given, CPU)
        bench.fill()
        for knobs in engine.space(given, CPU):
            assert prepare(bench, engine.config(knobs)).error < bound


def launched(engine: Engine, problem: ConvProblem, x: Tensor, rest: list[Tensor], constants: list[Tensor]) -> Tensor:
    """A convolution by its own kernel."""
    executable = engine.build(problem, Knobs(), CPU)
    made = torch.full(problem.y_spec.shape, torch.nan).contiguous(memory_format=torch.channels_last)
    workspace = torch.empty(max(1, executable.workspace_bytes), dtype=torch.uint8)
    executable.launch(Buffers((x, *rest), [made], executable.pack(constants)), workspace)
    return made


def guarded(engine: Engine, problem: SubgraphProblem, knobs: Knobs) -> list[Tensor]:
    executable = engine.build(problem, knobs, CPU)
    assert executable.workspace_bytes == engine.workspace_bytes(problem, knobs)
    trial = run_guarded(executable, problem, make_data(problem, 5, "normal"))
    assert not trial.fault
    return [result for result in trial.results if result is not None]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", GATES)
def test_a_gated_convolution_has_the_bits_of_its_parts(name: str, threads: int) -> None:
    problem = GATES[name]
    plan = cpu_gated_1x1.plan_of(problem.text)
    assert plan is not None
    given = make_data(problem, 5, "normal")
    product = (given.args[plan.x] * given.args[plan.gate]).contiguous(memory_format=torch.channels_last)
    rest = [given.args[plan.residual]] if plan.residual >= 0 else []
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        wanted = launched(cpu_direct.ENGINE, plan.convolution, product, rest, list(given.constants))
        torch.set_num_threads(threads)
        for size in cpu_gated_1x1.SLOT_BYTES:
            (found,) = guarded(GATED, problem, Knobs.of(slot_bytes=size))
            assert torch.equal(found, wanted)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", AVERAGES)
def test_an_averaged_convolution_has_the_bits_of_its_kernel(name: str, threads: int) -> None:
    problem = AVERAGES[name]
    layer = cpu_depthwise_mean.convolution_of(problem.text)
    assert layer is not None
    given = make_data(problem, 5, "normal")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        wanted = launched(cpu_depthwise.ENGINE, layer, given.args[0], [], list(given.constants))
        means = [guarded(AVERAGED, problem, Knobs())[1]]
        torch.set_num_threads(threads)
        found, mean = guarded(AVERAGED, problem, Knobs())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, wanted)
    assert torch.equal(mean, means[0])
    torch.testing.assert_close(mean.flatten(), wanted.double().mean((2, 3)).flatten().float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mean", MEANS)
def test_integers_come_out_exact(mean: str) -> None:
    problem = averaged((2, 24, 8, 4), Part(0, 3, 1, 1, activation="relu"), mean)
    given = make_data(problem, 3, "integer")
    executable = AVERAGED.build(problem, Knobs(), CPU)
    y = torch.empty(2, 24, 8, 4).contiguous(memory_format=torch.channels_last)
    made = torch.empty(2, 24) if mean == "flat" else torch.empty(2, 24, 1, 1)
    workspace = torch.empty(executable.workspace_bytes, dtype=torch.uint8)
    executable.launch(Buffers(given.args, [y, made], executable.pack(given.constants)), workspace)
    exact = torch.nn.functional.conv2d(given.args[0], *given.constants, padding=1, groups=24).relu()
    assert torch.equal(y, exact)
    assert torch.equal(made.flatten(), exact.mean((2, 3)).flatten())


def test_bands_are_as_large_as_a_slot_allows_and_one_for_each_thread() -> None:
    plan = cpu_gated_1x1.plan_of(gated((1, 320, 20, 20), 16).text)
    assert plan is not None
    assert [plan.bands(size, 2) for size in (128 << 10, 256 << 10, 64 << 10)] == [4, 2, 8]
    assert plan.bands(1 << 30, 2) == 2
    assert plan.slot_values(128 << 10, 2) == 17 * 6 * 320
    few = cpu_gated_1x1.plan_of(gated((1, 8, 2, 5), 8).text)
    assert few is not None
    assert few.bands(1 << 30, 16) == 2
    assert GATED.space(gated((1, 8, 2, 5), 8), CPU) == [Knobs.of(slot_bytes=128 << 10)]
    assert len(GATED.space(gated((1, 320, 20, 20), 16), CPU)) == 3


BASE = gated((1, 8, 9, 9), 16)
MEAN = averaged((1, 8, 9, 9), Part(0, 3, 1, 1, activation="relu"))
MANY = PART_BYTES // (4 * tile()) + 76
"""Channels whose weights, for a tile of output channels, are more than a part: tiles differ from CPU to CPU."""


@pytest.mark.parametrize(
    ("engine", "problem", "reason"),
    [
        (GATED, SubgraphProblem(BASE.text, "nchw"), "needs layout nhwc"),
        (GATED, SubgraphProblem(BASE.text.replace("constant %w", "input %w"), "nhwc"), "got another subgraph"),
        (GATED, SubgraphProblem(BASE.text.replace("return %y", "return %y, %s"), "nhwc"), "got another subgraph"),
        (GATED, SubgraphProblem(BASE.text.replace("[1,8,1,1]", "[1,8,9,9]"), "nhwc"), "got another subgraph"),
        (GATED, SubgraphProblem(BASE.text.replace("fp32", "fp16"), "nhwc"), "needs values of one dtype, fp32 or bf16"),
        (GATED, gated((1, MANY, 3, 3), 16), f"whole tiles, got {MANY} input channels"),
        (GATED, MEAN, "got another subgraph"),
        (AVERAGED, BASE, "got another subgraph"),
        (AVERAGED, SubgraphProblem(MEAN.text, "nchw"), "needs layout nhwc"),
        (AVERAGED, SubgraphProblem(MEAN.text.replace("return %a, %m", "return %m"), "nhwc"), "got another subgraph"),
        (AVERAGED, SubgraphProblem(MEAN.text.replace("return %a, %m", "return %m, %a"), "nhwc"), "another subgraph"),
        (AVERAGED, SubgraphProblem(MEAN.text.replace("fp32", "fp16"), "nhwc"), "needs values of one dtype"),
        (AVERAGED, averaged((1, 8, 9, 9), Part(0, 9, 1, 4)), "at most 49 values"),
    ],
)
def test_what_they_do_not_take_has_a_reason(engine: Engine, problem: SubgraphProblem, reason: str) -> None:
    support = engine.supports(problem, CPU)
    assert not support
    assert reason in support.reason
    assert "runs on CPUs" in engine.supports(problem, Target("cuda", "GPU", "sm_90", 1, 1, 1)).reason


def groups_in(engine: Engine, problem: SubgraphProblem) -> list[tuple[str, ...]]:
    return [tuple(group) for group in engine.fusions(parse_graph(problem.text))]


def test_they_find_their_groups_in_a_graph() -> None:
    assert groups_in(GATED, gated((1, 8, 4, 4), 8, residual=True, activation="relu")) == [("s", "y", "t", "a")]
    assert groups_in(AVERAGED, MEAN) == [("y", "a", "m")]
    assert groups_in(GATED, MEAN) == groups_in(AVERAGED, BASE) == []
    strided = BASE.text.replace("(1, 1), (0, 0)", "(2, 2), (0, 0)").replace("%y: fp32[1,16,9,9]", "%y: fp32[1,16,5,5]")
    assert groups_in(GATED, SubgraphProblem(strided, "nhwc")) == []
    for engine in (GATED, AVERAGED):
        (problem,) = engine.samples()
        assert engine.supports(problem, CPU)
        assert isinstance(problem, SubgraphProblem)
        assert len(groups_in(engine, problem)) == 1


def test_threads_that_share_tiles_are_no_reason_to_differ() -> None:
    """A convolution whose threads would share its tiles: the bands have all of them, in the same order."""
    plan = cpu_gated_1x1.plan_of(gated((1, 96, 7, 7), 160).text)
    assert plan is not None
    assert DirectPartition.of(plan.convolution, 2).groups > 1
    assert DirectPartition.of(plan.rows, 1).groups == 1


GATED_MAIN = """
#include <stdlib.h>
int main(void) {
    for (int64_t bands = 1; bands < 4; bands++) {
        int64_t pixels = 23, c = 10, k = 9, tile = VECTORS * LANES, tiles = (k + tile - 1) / tile;
        int64_t blocks = (pixels + 5) / 6, most = (blocks + bands - 1) / bands * 6;
        Gated z = {2, pixels, bands, 1, most * c};
        z.layer = (Layer){(void (*)(const void *, void *const *))convoy_direct,
                          {1, c, pixels, 1, k, 1, 1, 0, 0, 1, 1, 1, 1, pixels, 1, 0, 1, 1, 1, 1, c, 1, 0}, 7, 0, 3, 4};
        float *x = calloc(2 * pixels * c, 4), *gate = calloc(2 * c, 4), *residual = calloc(2 * pixels * k, 4);
        float *y = calloc(2 * pixels * k, 4), *slot = calloc(z.slot_values - MISSING, 4);
        float *weight = calloc(tiles * c * tile, 4), *bias = calloc(tiles * tile, 4), *zeros = calloc(c, 4);
        convoy_gated_1x1(&z, (void *const[]){x, gate, residual, y, slot, 0, weight, bias, 0, 0, zeros, 0});
        free(x), free(gate), free(residual), free(y), free(slot), free(weight), free(bias), free(zeros);
    }
    return 0;
}
"""

MEAN_MAIN = """
#include <stdlib.h>
int main(void) {
    for (int64_t c = 1; c < 40; c += 6) {
        int64_t h = 9, w = 7, p = 5, q = 4;
        Mean z = {2, 1};
        z.layer = (Layer){(void (*)(const void *, void *const *))convoy_depthwise,
                          {1, c, h, w, c, 3, 3, 1, 1, 2, 2, 1, 1, p, q, 0, 0, 1}, 5, 0, -1, 4};
        float *x = calloc(2 * h * w * c, 4), *weight = calloc(9 * c, 4), *bias = calloc(c, 4), *y = calloc(2 * p * q * c, 4);
        float *mean = calloc(2 * c, 4), *sums = calloc(2 * p * c - MISSING, 4);
        convoy_depthwise_mean(&z, (void *const[]){x, y, mean, sums, 0, weight, bias, 0, 0});
        free(x), free(weight), free(bias), free(y), free(mean), free(sums);
    }
    return 0;
}
"""


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize(
    ("kernel", "source", "main", "flags"),
    [
        (cpu_direct.SOURCE, cpu_gated_1x1.SOURCE, GATED_MAIN, ("-DVECTORS=2", "-DPIXELS=6")),
        (cpu_depthwise.SOURCE, cpu_depthwise_mean.SOURCE, MEAN_MAIN, ()),
    ],
    ids=["gated", "averaged"],
)
def test_they_read_and_write_nothing_else(
    tmp_path: Path, kernel: Path, source: Path, main: str, flags: tuple[str, ...], missing: int
) -> None:
    """By the compiler's own sanitizers; with a workspace that is one value too small they must say so."""
    parts = [part.read_text(encoding="utf-8") for part in (PARALLEL_H, VECTORS_H, LAYER_H, kernel)]
    own = source.read_text(encoding="utf-8")
    for name in set(re.findall(r"#define (\w+) ", parts[-1])) & set(re.findall(r"#define (\w+) ", own)):
        own = f"#undef {name}\n{own}"
    done = sanitized.run(tmp_path, "".join([*parts, own, main]), "-DLANES=4", f"-DMISSING={missing}", *flags)
    assert (done.returncode == 0) is (missing == 0), done.stderr[-2000:]
