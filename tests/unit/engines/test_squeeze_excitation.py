"""cuda.squeeze_excitation: its arithmetic on an emulated device, what NVRTC makes of it, and other subgraphs refused."""

import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn

from convoy.engines.base import Knobs
from convoy.engines.gates.squeeze_excitation import ENGINE, MOST_PARTS, GateTile
from convoy.engines.gates.squeeze_excitation_pattern import SqueezeExcitation, squeeze_excitations
from convoy.engines.subgraph import parse_subgraph
from convoy.errors import InputError
from convoy.measurement.data import make_data
from convoy.measurement.oracle import oracle
from convoy.pipeline.net import capture_net
from convoy.settings import Settings, checked_settings
from convoy.target import Target
from tests.unit.engines.emulated_cuda import address, hopper_libraries
from tests.unit.engines.spills import assert_no_spills
from tests.unit.engines.squeeze_excitation_cases import CASES, block

TARGET = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
LIMITS = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 8e-3}
RUN = """
extern "C" int run(const uint4* x, const Weight* first, const float* bias, const Weight* second, const float* shift,
                   float* parts, const uint4* residual, uint4* y, int grid) {
  int faults = launch(grid, THREADS, 1, %d + 64, [=] { squeeze(x, first, parts); });
  return faults + launch(grid, THREADS, 1, %d + 64, [=] { excite(x, bias, second, shift, parts, residual, y); });
}
"""


@pytest.fixture(autouse=True)
def libraries_are_there(monkeypatch):
    """`supports` asks whether NVRTC is there; the emulated device needs none."""
    monkeypatch.setattr("convoy.engines.gates.squeeze_excitation.absence", lambda: "")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    build = hopper_libraries(tmp_path_factory.mktemp("squeeze_excitation"))

    def of(found, tile, changes):
        parameters = tile.parameters(found, dependent=True)
        return build("squeeze_excitation", parameters, RUN % tile.shared_bytes(found), found.dtype, changes)

    return of


def error_of(library, name, tile, mean="mean", changes=()):
    """The relative error beside float64, of a result that is written between guards over garbage."""
    problem = block(name, mean=mean)
    found = SqueezeExcitation.of(problem)
    data = make_data(problem, 3, "normal")
    data.args[0].add_(1.0)  # a mean that matters
    (exact,) = oracle(problem, data)
    x, *residual = (t.contiguous(memory_format=torch.channels_last) for t in data.args)
    given, packed = iter(data.constants), []
    for bias in found.biases:
        packed.append(next(given).flatten(1).t().contiguous())
        packed.append(next(given).float().contiguous() if bias else None)
    guard = 64
    room = torch.full((x.numel() + 2 * guard,), 99.0).to(x.dtype)
    n, c, h, w = x.shape
    y = room[guard:-guard].fill_(float("nan")).view(n, h, w, c).permute(0, 3, 1, 2)
    parts = torch.full((tile.workspace_bytes(found) // 4 + guard,), float("nan"))
    first, bias, second, shift = packed
    given = (x, first, bias, second, shift, parts, residual[0] if residual else None, y)
    faults = library(found, tile, changes).run(*map(address, given), tile.parts(found) * found.images)
    assert faults == 0
    assert (room[:guard] == 99).all()
    assert (room[-guard:] == 99).all()
    assert parts[-guard:].isnan().all()
    return float((y.double() - exact).norm() / exact.norm())


COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")
TILES = {
    "large": GateTile(32, 5, 128), "many hidden": GateTile(64, 1, 256), "residual": GateTile(32, 3, 128),
    "efficientnet": GateTile(32, 2, 128), "one pixel": GateTile(32, 1, 256), "mobilenet": GateTile(64, 2, 128),
}  # fmt: skip
"""Tiles with several parts and columns, in place of the engine's first one."""


@COMPILER
@pytest.mark.parametrize("name", CASES)
def test_results_are_right(library, name):
    problem = block(name)
    tile = TILES.get(name) or GateTile.of(ENGINE.space(problem, TARGET)[0])
    assert error_of(library, name, tile, "adaptive" if name in TILES else "mean") < LIMITS[CASES[name][5]]


@COMPILER
@pytest.mark.parametrize(
    "change",
    [
        ("sum * (1.f / PIXELS)", "sum"),
        ("i * COUNT < PROGRAMS ?", "i * COUNT < PROGRAMS - 1 ?"),
        ("word_at(hidden + h * 8)", "word_at(hidden)"),
        ("v[i] *= gate[i]", "v[i] *= gate[0]"),
    ],
)
def test_a_planted_fault_is_seen(library, change):
    assert error_of(library, "efficientnet", TILES["efficientnet"], changes=[change]) > 1e-3


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", ["residual and relu", "many hidden", "one hidden"])
def test_it_compiles_without_spills(name, arch):
    bindings = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        bindings.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(str(error))
    problem, target = block(name), replace(TARGET, arch=arch)
    assert ENGINE.supports(problem, target)
    executable = ENGINE.build(problem, ENGINE.space(problem, target)[0], target)
    assert_no_spills(executable.log)
    assert executable.dependent == (arch == "sm_90")


def test_settings_fill_the_device_and_no_more(monkeypatch):
    for sizes in ((1, 16, 4, 112, 112), (2, 2304, 96, 7, 7)):
        monkeypatch.setitem(CASES, "sized", (*sizes, "fp16", "silu", "sigmoid", (True, True), ""))
        problem = block("sized")
        found, space = SqueezeExcitation.of(problem), ENGINE.space(problem, TARGET)
        assert len(space) == len(set(space)) > 1
        assert all(1 <= GateTile.of(knobs).parts(found) <= MOST_PARTS for knobs in space)
        guesses = [ENGINE.estimate_us(problem, knobs, TARGET) for knobs in space]
        assert guesses == sorted(guesses)
        assert all(max(GateTile.of(knobs).shared_bytes(found)) < 48 << 10 for knobs in space)


@pytest.mark.parametrize("change", [{"block_c": 48}, {"threads": 64}, {"rows": 0}])
def test_knobs_that_make_no_kernel_are_refused(change):
    with pytest.raises(InputError, match="block_c 32, 64 or 128"):
        GateTile.of(Knobs.of(**{"block_c": 64, "rows": 1, "threads": 128, **change}))


BASE = block("residual and relu").text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BASE.replace("aten.sigmoid", "aten.tanh"), "another subgraph"),
        (BASE.replace("return %z", "return %g, %z"), "another subgraph"),
        (BASE.replace("add.Tensor(%y, %r)", "add.Tensor(%y, %x)"), "another subgraph"),
        (BASE.replace("mul.Tensor(%x, %g)", "mul.Tensor(%r, %g)"), "another subgraph"),
        (BASE.replace("constant %b1: fp16[32]", "input %b1: fp16[32]"), "another subgraph"),
        (BASE.replace("fp16", "fp64"), "needs fp16, bf16 or fp32, got fp64"),
        (BASE.replace("fp16[3,", "fp16[0,"), "images that are not empty"),
        (BASE.replace("32", "36"), "channels as a multiple of 8, got 36"),
        (block("many hidden").text.replace("200", "2000"), "1 to 1024 channels between the layers, got 2000"),
    ],
    ids=["tanh", "gate returned", "x twice", "no x", "bias of a call", "fp64", "no images", "odd", "hidden"],
)
def test_other_subgraphs_are_refused(text, says):
    assert says in ENGINE.supports(replace(block("residual and relu"), text=text), TARGET).reason


def test_it_needs_channels_last_a_gpu_and_nvrtc(monkeypatch):
    assert "needs layout nhwc" in ENGINE.supports(block("relu", layout="nchw"), TARGET).reason
    cpu = Target("cpu", "a CPU", "avx2", 2, 8 << 30, 1 << 20)
    assert "needs a CUDA device" in ENGINE.supports(block("relu"), cpu).reason
    monkeypatch.setattr("convoy.engines.gates.squeeze_excitation.absence", lambda: "needs cuda-core")
    assert "needs cuda-core" in ENGINE.supports(block("relu"), TARGET).reason


def test_what_a_subgraph_computes_and_which_nodes_join():
    found = SqueezeExcitation.of(block("residual and relu"))
    assert (found.images, found.pixels, found.channels, found.hidden) == (3, 15, 32, 8)
    assert (found.inner, found.outer, found.residual, found.relu) == ("relu", "sigmoid", True, True)
    groups = list(squeeze_excitations(parse_subgraph(BASE)))
    assert groups == [("m", "s", "a", "e", "g", "y"), ("m", "s", "a", "e", "g", "y", "t", "z")]


class Gated(nn.Module):
    """A block as torchvision and timm write it, and one whose mean another layer reads."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.conv, self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        mean = x.mean((2, 3), keepdim=True)
        y = x * torch.sigmoid(self.second(torch.relu(self.first(mean))))
        return y + mean if self.shared else torch.relu(y + x.flip(0))


@pytest.mark.parametrize("shared", [False, True])
def test_blocks_of_a_module_become_regions_unless_others_read_what_is_in_them(shared, tmp_path):
    settings = checked_settings(Settings(effort="none", db=tmp_path / "perf.db"))
    net = capture_net("gated", Gated(shared).eval(), (torch.randn(2, 3, 9, 9),), {}, settings, TARGET)
    groups = [set(group) for group in squeeze_excitations(net.captured.graph)]
    regions = [set(region.nodes) for region in net.regions]
    assert len(groups) == (0 if shared else 2)
    assert all(group in regions for group in groups)
