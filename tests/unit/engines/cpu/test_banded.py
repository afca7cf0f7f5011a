"""cpu.banded: the same bits as its kernels one after the other, for any band and number of threads, within its buffers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from convoy.engines.base import Buffers
from convoy.engines.compilers import host_compiler
from convoy.engines.cpu import cpu_depthwise
from convoy.engines.cpu.chains import cpu_banded, cpu_depthwise_mean, cpu_gated_1x1, layer_call
from convoy.engines.cpu.chains.cpu_banded import ENGINE, plan_of
from convoy.engines.cpu.cpu_direct import PART_BYTES, DirectPartition, tile
from convoy.engines.cpu.native_launch import PARALLEL_H
from convoy.engines.cpu.weight_tiles import VECTORS_H
from convoy.measurement.candidate import prepare
from convoy.measurement.data import make_data
from convoy.measurement.device.detect import detect_target
from convoy.measurement.guards import run_guarded
from convoy.measurement.reference_data import ReferenceData
from convoy.problem import Knobs, SubgraphProblem
from convoy.target import Target
from tests.unit.engines import sanitized
from tests.unit.engines.banded_cases import Part, inverted, piece, problems

CPU = detect_target("cpu")
pytestmark = pytest.mark.skipif(not host_compiler.compiler_support(), reason="needs a C compiler")

Shape = tuple[int, int, int, int]
FIVE = Part(0, 5, 2, 2, activation="hardswish")

CASES: dict[str, tuple[Shape, Sequence[Part], bool]] = {
    "a block": ((2, 8, 11, 9), inverted(8, 48, 8), True),
    "a block of stride 2": ((3, 16, 12, 13), inverted(16, 96, 24, stride=2), False),
    "a first block": ((2, 32, 9, 9), inverted(32, 32, 16), False),
    "a stem before it": ((1, 3, 21, 19), [Part(32, 3, 2, 1, activation="relu6"), *inverted(32, 32, 16)], False),
    "widened and filtered": ((2, 8, 10, 10), inverted(8, 40, 1, activation="silu")[:2], False),
    "5x5 of stride 2": ((1, 12, 17, 14), [Part(30, activation="hardswish"), FIVE, Part(20)], False),
    "channels that fill no register": ((2, 3, 7, 6), inverted(3, 17, 5, activation="relu"), False),
    "more filters than a tile": ((1, 20, 9, 9), inverted(20, 150, 70), False),
    "3x3 everywhere": (
        (2, 4, 14, 9),
        [Part(6, 3, pad=1), Part(0, 3, 2, 1), Part(5, 3, pad=1, activation="relu")],
        True,
    ),
    "no padding": ((1, 8, 12, 12), [Part(16), Part(0, 3), Part(8)], False),
    "dilation": ((1, 8, 15, 15), [Part(16), Part(0, 3, pad=2, dilation=2), Part(8, bias=False)], False),
    "padding wider than the image": ((1, 4, 2, 3), [Part(8), Part(0, 3, pad=5), Part(4)], False),
    "a step longer than the filter": ((2, 4, 16, 7), [Part(8), Part(0, 1, 3), Part(4)], False),
    "one pixel": ((1, 8, 1, 1), inverted(8, 24, 8), True),
    "no image": ((0, 8, 6, 6), inverted(8, 24, 8), True),
}


def one_by_one(case: str, problem: SubgraphProblem) -> torch.Tensor:
    """The convolutions by their own kernels, one after the other, on the piece's data."""
    shape, parts, residual = CASES[case]
    given = make_data(problem, 5, "normal")
    value, constants = given.args[0], list(given.constants)
    for stage in problems(shape, parts, residual=residual):
        own = [constants.pop(0) for _ in range(1 + stage.epilogue.bias)]
        made = torch.full(stage.y_spec.shape, torch.nan).contiguous(memory_format=torch.channels_last)
        engine = cpu_banded.DEPTHWISE if stage.groups > 1 else cpu_banded.DIRECT
        executable = engine.build(stage, Knobs(), CPU)
        workspace = torch.empty(max(1, executable.workspace_bytes), dtype=torch.uint8)
        args = (value, given.args[1]) if stage.epilogue.residual else (value,)
        executable.launch(Buffers(args, [made], executable.pack(own)), workspace)
        value = made
    return value


def has_same_order(case: str, threads: int) -> bool:
    """Whether the convolutions by themselves add in the order of the bands: not where threads share the tiles of one.

    On a CPU with narrow vectors a layer has more tiles, which threads then share; one thread adds in the bands' order.
    """
    shape, parts, residual = CASES[case]
    dense = (stage for stage in problems(shape, parts, residual=residual) if stage.groups == 1)
    return all(DirectPartition.of(stage, threads).groups == 1 for stage in dense)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_its_kernels(case: str, threads: int) -> None:
    shape, parts, residual = CASES[case]
    problem = piece(shape, parts, residual=residual)
    assert ENGINE.supports(problem, CPU), ENGINE.supports(problem, CPU).reason
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads if has_same_order(case, threads) else 1)
        wanted = one_by_one(case, problem)
        torch.set_num_threads(threads)
        assert not wanted.isnan().any()
        for rows in (1, 2, 3, 16):
            knobs = Knobs.of(rows=rows)
            executable = ENGINE.build(problem, knobs, CPU)
            assert executable.workspace_bytes == ENGINE.workspace_bytes(problem, knobs)
            trial = run_guarded(executable, problem, make_data(problem, 5, "normal"))
            assert not trial.fault
            (result,) = trial.results
            assert result is not None
            assert torch.equal(result, wanted)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("case", ["a block", "5x5 of stride 2", "3x3 everywhere"])
def test_it_is_right_by_float64(case: str) -> None:
    shape, parts, residual = CASES[case]
    problem = piece(shape, parts, residual=residual)
    bench = ReferenceData(problem, CPU)
    bench.fill()
    for knobs in ENGINE.space(problem, CPU):
        assert prepare(bench, ENGINE.config(knobs)).error < 1e-6


def test_bands_are_as_long_as_a_slot_allows() -> None:
    problem = piece((8, 16, 112, 112), inverted(16, 96, 24, stride=2))
    rows = [knobs.integer("rows") for knobs in ENGINE.space(problem, CPU)]
    assert rows == [2, 1, 4]
    plan = plan_of(problem.text)
    assert isinstance(plan, cpu_banded.BandPlan)
    assert plan.windows(2) == [5, 2]
    assert plan.windows(200) == [112, 56]
    assert plan.slot_floats(2)[-1] == cpu_banded.STATE_FLOATS + 5 * 112 * 96 + 2 * 56 * 96


BASE = piece((1, 8, 9, 9), inverted(8, 24, 8), residual=True)
MANY = PART_BYTES // (4 * tile()) + 76
"""Channels whose weights, for a tile of output channels, are more than a part: tiles differ from CPU to CPU."""


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (piece((1, 8, 9, 9), [Part(8)]), "computes a chain of 2 to 4 convolutions"),
        (piece((1, 8, 9, 9), [Part(8)] * 5), "computes a chain of 2 to 4 convolutions"),
        (SubgraphProblem(BASE.text, "nchw"), "needs layout nhwc"),
        (SubgraphProblem(BASE.text.replace("constant %w1", "input %w1"), "nhwc"), "with constant weights"),
        (SubgraphProblem(BASE.text.replace("return %s", "return %s, %a0"), "nhwc"), "that each read the result before"),
        (SubgraphProblem(BASE.text.replace("conv2d(%a0", "conv2d(%a0x", 1), "nhwc"), "a0x"),
        (piece((1, 8, 9, 9), inverted(8, 24, 8), dtype="bf16"), "needs fp32, got bf16"),
        (
            piece((1, 8, 9, 9), [Part(MANY), Part(0, 3, pad=1), Part(16)]),
            f"whole tiles, got {MANY} input and 16 output channels",
        ),
        (piece((1, 8, 9, 9), [Part(16), Part(0, 9, pad=4)]), "at most 49 values"),
    ],
    ids=["one", "five", "layout", "fresh", "returned", "no graph", "dtype", "weights", "taps"],
)
def test_what_it_does_not_take_has_a_reason(problem: SubgraphProblem, reason: str) -> None:
    support = ENGINE.supports(problem, CPU)
    assert not support
    assert reason in support.reason
    assert "runs on CPUs" in ENGINE.supports(BASE, Target("cuda", "GPU", "sm_90", 1, 1, 1)).reason


MAIN = """
#include <stdlib.h>
int main(void) {
    for (int64_t rows = 1; rows < 9; rows += 3)
        for (int64_t stride = 1; stride < 3; stride++)
            for (int64_t step = 1; step < 3; step++) {
                int64_t c = 4, h = 9, w = 5, p = (h - 1) / stride + 1, q = (w - 1) / stride + 1;
                int64_t window = least(h, (rows - 1) * stride + 3);
                Bands z = {2, (p + rows - 1) / rows, 1, STATE_FLOATS + window * w * c - MISSING, 2};
                z.stage[0] = (Stage){{(void (*)(const void *, void *const *))convoy_depthwise,
                                      {1, c, h, w, c, 3, 3, 1, 1, 1, 1, 1, 1, h, w, 0, 0, 1}, 5, 0, -1, 4}, STATE_FLOATS};
                z.stage[1] = (Stage){{(void (*)(const void *, void *const *))convoy_depthwise,
                                      {1, c, h, w, c, 3, 3, 1, 1, stride, stride, 1, 1, p, q, 0, 1, 1}, 5, 0, 3, 4}, 0};
                float *x = calloc(2 * c * h * w, 4), *weight = calloc(9 * c, 4), *bias = calloc(c, 4);
                float *residual = calloc(2 * c * p * q, 4), *y = calloc(2 * c * p * q, 4), *slot = calloc(z.slot_floats, 4);
                void *const tensors[] = {x, residual, y, slot, 0, weight, bias, 0, 0, 0, weight, bias, 0, 0};
                if (step == 1) convoy_banded(&z, tensors);
                /* bands as threads take them from each other: the last one first */
                for (int64_t unit = 2 * z.bands - 1; step == 2 && unit >= 0; unit--) run_band(&z, tensors, unit, slot);
                free(x), free(weight), free(bias), free(residual), free(y), free(slot);
            }
    return 0;
}
"""


@pytest.mark.parametrize("missing", [0, 1])
def test_it_reads_and_writes_nothing_else(tmp_path: Path, missing: int) -> None:
    """By the compiler's own sanitizers; with a slot that is one value too small they must say so."""
    parts = (PARALLEL_H, VECTORS_H, cpu_depthwise.SOURCE, layer_call.LAYER_H, cpu_banded.SOURCE)
    source = "".join(part.read_text(encoding="utf-8") for part in parts) + MAIN
    done = sanitized.run(tmp_path, source, "-DLANES=4", f"-DMISSING={missing}")
    assert (done.returncode == 0) is (missing == 0), done.stderr[-2000:]


def test_the_sizes_are_those_of_the_source() -> None:
    sources = (layer_call.LAYER_H, *(module.SOURCE for module in (cpu_banded, cpu_gated_1x1, cpu_depthwise_mean)))
    source = re.sub(r"/\*.*?\*/", "", "".join(part.read_text("utf-8") for part in sources), flags=re.DOTALL)
    for name, module in (
        ("MOST_STAGES", cpu_banded),
        ("STATE_FLOATS", cpu_banded),
        ("MOST_WORDS", layer_call),
        ("MOST_POINTERS", layer_call),
    ):
        assert f"#define {name} {getattr(module, name)}\n" in source
    structs = {"Layer": layer_call.LayerCall, "Stage": cpu_banded._Stage, "Bands": cpu_banded._Bands}
    for struct, made in {**structs, "Gated": cpu_gated_1x1._Gated, "Mean": cpu_depthwise_mean._Mean}.items():
        found = re.search(rf"typedef struct \{{([^}}]*)\}} {struct};", source)
        assert found is not None
        fields = re.findall(r"(?:\w |,|\*)\s*\(?\*?(\w+)(?:\[\w+\])?(?:\)\([^)]*\))?(?=[,;])", found[1])
        assert fields == [name for name, _ in made._fields_]
    order = re.search(r"enum \{ ([^}]*) \};", source)
    assert order is not None
    names = [name.lower() for name in order[1].split(", ")]
    for engine in (cpu_banded.DIRECT, cpu_banded.DEPTHWISE):
        stage = problems((1, 8, 5, 5), [Part(0 if engine is cpu_banded.DEPTHWISE else 8)])[0]
        executable = engine.build(stage, Knobs(), CPU)
        native = executable.native(executable.pack([torch.zeros(stage.weight_spec.shape), torch.zeros(8)]))
        fields = [name for name, _ in native.settings._fields_]
        assert fields[: len(names)] == names
        assert len(fields) <= layer_call.MOST_WORDS
        assert len(native.tensors) <= layer_call.MOST_POINTERS
