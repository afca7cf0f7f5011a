"""cuda.gated_1x1: its arithmetic on an emulated device, what NVRTC makes of it, and other subgraphs refused."""

import re
import shutil
from dataclasses import replace

import pytest
import torch

from convoy.engines.gates.gated_1x1 import ENGINE
from convoy.engines.gates.gated_1x1_pattern import Gated1x1
from convoy.engines.gates.gated_1x1_tile import GatedTile
from convoy.engines.gates.squeeze_excitation import GateTile
from convoy.engines.hopper.nvrtc_kernel import SpillError
from convoy.errors import InputError
from convoy.measurement.data import make_data
from convoy.measurement.oracle import oracle
from convoy.target import Target
from tests.unit.engines.emulated_cuda import address, hopper_libraries
from tests.unit.engines.gated_1x1_cases import CASES, piece
from tests.unit.engines.spills import spilled_bytes

TARGET = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
LIMITS = {"fp16": 1e-3, "bf16": 8e-3}
RUN = """
extern "C" int run(const Weight* x, const Weight* first, const float* bias, const Weight* second, const float* shift,
                   float* parts, const Weight* weight, const float* product_bias, const uint4* residual, uint4* y,
                   int squeezes, int blocks) {
  int faults = launch(squeezes, THREADS, 1, %d + 64, [=] {
    squeeze((const uint4*)x, first, parts);
  });
  return faults + launch(blocks, BLOCK_THREADS, 1, %d + 64, [=] {
    gated(x, bias, second, shift, parts, weight, product_bias, residual, y);
  });
}
"""


@pytest.fixture(autouse=True)
def libraries_are_there(monkeypatch):
    """`supports` asks whether NVRTC is there; the emulated device needs none."""
    monkeypatch.setattr("convoy.engines.gates.gated_1x1.absence", lambda: "")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    build = hopper_libraries(tmp_path_factory.mktemp("gated_1x1"))

    def of(found, tile, changes):
        squeezed, _ = tile.squeeze.shared_bytes(found.block)
        run = RUN % (squeezed, tile.shared_bytes(found))
        return build("gated_1x1", tile.parameters(found, dependent=True), run, found.block.dtype, changes)

    return of


def error_of(library, name, tile=None, mean="mean", changes=()):
    """The relative error beside float64, of a result that is written between guards over garbage."""
    problem = piece(name, mean=mean)
    found = Gated1x1.of(problem)
    tile = tile or GatedTile.of(ENGINE.space(problem, TARGET)[0])
    data = make_data(problem, 3, "normal")
    data.args[0].add_(1.0)  # a mean that matters
    (exact,) = oracle(problem, data)
    x, *residual = (t.contiguous(memory_format=torch.channels_last) for t in data.args)
    given, packed = iter(data.constants), []
    for index, bias in enumerate((*found.block.biases, found.bias)):
        weight = next(given).flatten(1)
        packed.append((weight.t() if index < 2 else weight).contiguous())
        packed.append(next(given).float().contiguous() if bias else None)
    first, bias, second, shift, weight, product_bias = packed
    guard, shape = 64, exact.shape
    room = torch.full((exact.numel() + 2 * guard,), 99.0).to(x.dtype)
    y = room[guard:-guard].fill_(float("nan")).view(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2)
    parts = torch.full((tile.squeeze.workspace_bytes(found.block) // 4 + guard,), float("nan"))
    given = (x, first, bias, second, shift, parts, weight, product_bias, residual[0] if residual else None, y)
    squeezes = tile.squeeze.parts(found.block) * found.block.images
    assert library(found, tile, changes).run(*map(address, given), squeezes, tile.grid(found)) == 0
    assert (room[:guard] == 99).all()
    assert (room[-guard:] == 99).all()
    assert parts[-guard:].isnan().all()
    return float((y.double() - exact).norm() / exact.norm())


COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")
SQUEEZE = GateTile(32, 2, 128)
TILES = {
    "efficientnet": GatedTile(SQUEEZE, 32, 1, 16, 2, 1, 32, 2),  # the last chunk and the last filters are half empty
    "mobilenet": GatedTile(SQUEEZE, 16, 1, 24, 1, 4, 64, 3),
    "regnet": GatedTile(SQUEEZE, 16, 2, 32, 1, 2, 32, 3),
    "many hidden": GatedTile(SQUEEZE, 16, 1, 88, 1, 2, 32, 4),
    "many pixels": GatedTile(GateTile(32, 5, 128), 112, 4, 16, 7, 1, 16, 2),
    "many channels": GatedTile(SQUEEZE, 16, 1, 24, 1, 8, 128, 2),
}
"""Tiles with several blocks, warps and chunks, in place of the engine's first one."""


@COMPILER
@pytest.mark.parametrize("name", CASES)
def test_results_are_right(library, name):
    dtype = CASES[name][0][5]
    assert error_of(library, name, TILES.get(name), "adaptive" if name in TILES else "mean") < LIMITS[dtype]


@COMPILER
def test_the_engines_own_first_setting_is_right(library):
    for name in ("efficientnet", "many channels"):
        assert error_of(library, name) < LIMITS[CASES[name][0][5]]


@COMPILER
@pytest.mark.parametrize(
    "change",
    [
        ("multiply_pair<BFLOAT>(a[2], high)", "multiply_pair<BFLOAT>(a[2], low)"),
        ("chunk % CHUNKS * (CHUNK * 2) + lane % 4 * 4", "lane % 4 * 4"),
        ("turn * WARPS_K", "turn"),
        ("k < WARPS_K", "k < 1"),
        ("sum * (1.f / PIXELS)", "sum"),
    ],
)
def test_a_planted_fault_is_seen(library, change):
    assert error_of(library, "many channels", GatedTile(SQUEEZE, 16, 1, 24, 1, 2, 64, 2), changes=[change]) > 2e-2


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", CASES)
def test_it_compiles_without_spills(name, arch):
    bindings = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        bindings.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(str(error))
    problem, target = piece(name), replace(TARGET, arch=arch)
    assert ENGINE.supports(problem, target)
    executable = ENGINE.build(problem, ENGINE.space(problem, target)[0], target)
    assert spilled_bytes(executable.log) == [0, 0]
    assert executable.dependent == (arch == "sm_90")


BLOCKS = [
    (1, 32, 8, 112, 16),
    (32, 144, 6, 56, 24),
    (32, 120, 32, 28, 40),
    (8, 64, 16, 56, 64),  # the assembler spills some settings unless it is told that one block beside others is enough
    (32, 200, 48, 14, 80),
    (1, 480, 20, 14, 80),
    (32, 480, 20, 14, 80),
    (8, 480, 20, 14, 112),
]
"""Images, channels, hidden channels, side, filters."""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("sizes", BLOCKS)
def test_every_setting_of_a_net_compiles_without_spills(sizes, arch, monkeypatch):
    bindings = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        bindings.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(str(error))
    n, channels, hidden, side, filters = sizes
    case = ((n, channels, hidden, side, side, "fp16", "silu", "sigmoid", (True, True)), filters, True, "add")
    monkeypatch.setitem(CASES, "sized", case)
    problem, target = piece("sized"), replace(TARGET, arch=arch)
    assert ENGINE.supports(problem, target)
    for knobs in ENGINE.space(problem, target):
        assert spilled_bytes(ENGINE.build(problem, knobs, target).log) == [0, 0]


def test_kernels_that_spill_are_compiled_for_fewer_blocks_beside_each_other_and_then_refused(monkeypatch):
    ways = []

    def compiled(engine, source, target, options):
        values = {name: text for name, text in source.headers if name.endswith("squeeze_excitation_config.cuh")}
        (text,) = values.values()
        ways.append(tuple(int(re.search(rf"{name} = (\d+)", text)[1]) for name in ("MIN_BLOCKS_PER_SM", "MOST_HELD")))
        raise SpillError(engine, "the kernel spills registers", "")

    monkeypatch.setattr("convoy.engines.gates.gated_1x1.compile_cubin", compiled)
    problem = piece("regnet")
    with pytest.raises(SpillError):
        ENGINE.build(problem, ENGINE.space(problem, TARGET)[0], TARGET)
    assert ways == [(0, 32), (1, 32), (1, 0)]


def test_settings_are_few_and_ranked(monkeypatch):
    for pixels, channels, hidden, filters in ((112, 32, 8, 16), (56, 144, 6, 24), (14, 240, 10, 80)):
        sizes = (2, channels, hidden, pixels, pixels, "fp16", "silu", "sigmoid", (True, True))
        monkeypatch.setitem(CASES, "sized", (sizes, filters, True, "add"))
        problem = piece("sized")
        found, space = Gated1x1.of(problem), ENGINE.space(problem, TARGET)
        assert 1 < len(space) == len(set(space)) <= 6
        guesses = [ENGINE.estimate_us(problem, knobs, TARGET) for knobs in space]
        assert guesses == sorted(guesses)
        assert all(GatedTile.of(knobs).shared_bytes(found) <= 232448 for knobs in space)


@pytest.mark.parametrize(
    "change", [{"block_m": 24}, {"block_n": 12}, {"chunk": 24}, {"passes": 0}, {"stages": 1}, {"warps_k": 64}]
)
def test_knobs_that_make_no_kernel_are_refused(change):
    knobs = GatedTile(SQUEEZE, 32, 1, 16, 1, 2, 64, 2).knobs
    changed = type(knobs).of(**{**dict(knobs.items_), **change})
    with pytest.raises(InputError, match="block_m in multiples of 16 warps_m"):
        GatedTile.of(changed)
    assert GatedTile.of(knobs).knobs == knobs


BASE = piece("regnet").text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BASE.replace("aten.sigmoid", "aten.tanh"), "another subgraph"),
        (BASE.replace("return %z", "return %g, %z"), "another subgraph"),
        (BASE.replace("aten.relu.default(%t)", "aten.silu.default(%t)"), "another subgraph"),
        (BASE.replace("bf16", "fp32"), "needs fp16 or bf16"),
        (BASE.replace("56", "52"), "multiples of 8"),
        (re.sub(r"([\[,])16([\],])", r"\g<1>101\2", BASE), "1 to 9600 weights of a layer, got 101 x 96"),
    ],
)
def test_other_subgraphs_are_refused(text, says):
    problem = replace(piece("regnet"), text=text)
    assert says in ENGINE.supports(problem, TARGET).reason


def test_gates_of_as_many_weights_as_the_bound_are_taken():
    text = re.sub(r"([\[,])16([\],])", r"\g<1>100\2", BASE)
    assert ENGINE.supports(replace(piece("regnet"), text=text), TARGET)
