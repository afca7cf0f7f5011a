"""The problems that cuda.inverted_residual takes and refuses, its settings, and NVRTC's code for them; no device needed."""

import re
from dataclasses import replace

import pytest
import torch

from convoy.engines.competition import competing_engines
from convoy.engines.hopper.chains.inverted_residual import ENGINE
from convoy.engines.hopper.chains.inverted_residual_block import InvertedResidual
from convoy.engines.hopper.chains.inverted_residual_cost import estimate_inverted_us, inverted_tiles
from convoy.engines.hopper.chains.inverted_residual_problem import (
    inverted_residual_of,
    inverted_sample,
    inverted_subgraph,
    layers_of_inverted,
)
from convoy.engines.hopper.chains.inverted_residual_tile_config import InvertedTile
from convoy.engines.hopper.chains.inverted_residual_weights import pack_slices
from convoy.errors import InputError
from convoy.problem import Knobs, SubgraphProblem
from convoy.settings import Settings
from convoy.target import Target

pytestmark = pytest.mark.usefixtures("libraries_are_there")

GPU = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
A100 = replace(GPU, arch="sm_80", units=108)
SHARED = {GPU: 227 << 10, A100: 99 << 10}
RELU6 = ("relu6", "relu6")
EARLY = InvertedResidual(32, 56, 56, 24, 144, 24, 3, 1, "fp16", RELU6, True)
BLOCKS = {
    "16-96-24/2@112": replace(EARLY, h=112, w=112, c=16, mid=96, stride=2, residual=False),
    "24-144-24@56": EARLY,
    "32-192-64/2@28": replace(EARLY, h=28, w=28, c=32, mid=192, k=64, stride=2, residual=False),
    "64-384-64@14": replace(EARLY, h=14, w=14, c=64, mid=384, k=64),
    "160-960-320@7": replace(EARLY, h=7, w=7, c=160, mid=960, k=320, residual=False),
    "5x5 with silu": replace(EARLY, n=1, h=28, w=28, c=40, mid=240, k=40, taps=5, activations=("silu", "silu")),
    "5x5/2 with hardswish": replace(
        EARLY, h=28, w=28, c=40, mid=240, k=80, taps=5, stride=2, activations=("hardswish",) * 2, residual=False
    ),
}


def changed(before: str, after: str) -> SubgraphProblem:
    """The sample with another text."""
    assert before in inverted_sample().text
    return replace(inverted_sample(), text=inverted_sample().text.replace(before, after))


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("biased", [True, False])
def test_a_blocks_text_is_read_back(name, biased) -> None:
    block = replace(BLOCKS[name], dtype="bf16")
    found = inverted_residual_of(inverted_subgraph(block, biased=biased).text)
    assert not isinstance(found, str)
    assert found.block == block
    assert (found.weights, found.biases) == (((0, 2, 4), (1, 3, 5)) if biased else ((0, 1, 2), (-1, -1, -1)))
    layers = layers_of_inverted(inverted_subgraph(block).text)
    assert [layer.groups for layer in layers] == [1, block.mid, 1]
    assert [layer.epilogue.residual for layer in layers] == [False, False, block.residual]
    assert sum(layer.flops for layer in layers) == block.flops


def test_it_competes() -> None:
    assert "cuda.inverted_residual" in competing_engines(Settings())
    assert ENGINE.supports(inverted_sample(), GPU)
    assert ENGINE.supports(inverted_sample(), A100)


@pytest.mark.parametrize(
    ("problem", "target", "reason"),
    [
        (replace(inverted_sample(), layout="nchw"), GPU, "layout nhwc"),
        (inverted_sample(), replace(GPU, arch="sm_75"), "capability 8.0 or newer"),
        (changed("144", "140"), GPU, "multiples of 8"),
        (changed("fp16", "fp32"), GPU, "another subgraph"),
        (changed("return %s", "return %s, %a1"), GPU, "another subgraph"),
        (changed("(1, 1), (1, 1), (1, 1), 144)", "(1, 1), (2, 2), (2, 2), 144)"), GPU, "another subgraph"),
    ],
    ids=["nchw", "Turing", "channels", "fp32", "a result inside", "dilation"],
)
def test_refusals_have_reasons(problem, target, reason) -> None:
    found = ENGINE.supports(problem, target)
    assert not found
    assert reason in found.reason


@pytest.mark.parametrize("target", SHARED, ids=["H100", "A100"])
@pytest.mark.parametrize("name", BLOCKS)
def test_every_proposal_fits_and_its_knobs_come_back(name, target) -> None:
    block, hopper = BLOCKS[name], target is GPU
    found = inverted_tiles(block, target.units, SHARED[target], hopper=hopper)
    assert 4 < len(found) == len(set(found)) <= 16
    for tile in found:
        assert not tile.refusal(block, SHARED[target])
        assert tile.shared_bytes(block) <= SHARED[target]
        assert InvertedTile.of(Knobs.parse(str(tile.knobs))) == tile
        assert tile.slices(block) * tile.slice_k >= block.mid
        assert (tile.cluster - 1) * tile.own_slices(block) < tile.slices(block) <= tile.cluster * tile.own_slices(block)
        assert hopper or tile.cluster == 1
        pixels = tile.grid(block) // (tile.parts(block) * tile.cluster) * tile.tile_rows * tile.tile_columns
        assert pixels >= block.n * block.p * block.q
        assert tile.blocks_per_sm(block, hopper=hopper) * tile.warps <= 64
    times = [estimate_inverted_us(block, tile, target.units, hopper=hopper) for tile in found]
    assert times == sorted(times)
    assert times[0] > max(block.bytes_min / 3.1e6, block.flops / 8e8)  # not below the device's own limits


TIMES = {
    ("16-96-24/2@112", 32): (
        ((1, 2, 4, 2, 32, 1, 2, 2, 24), 32.02), ((1, 4, 2, 2, 32, 2, 3, 2, 24), 41.41), ((1, 2, 2, 2, 32, 2, 3, 2, 24), 44.38),
    ),
    ("24-144-24@56", 32): (
        ((7, 7, 2, 1, 48, 1, 2, 2, 24), 23.39), ((1, 7, 2, 1, 16, 1, 2, 2, 24), 31.17),
    ),
    ("24-144-24@56", 1): (
        ((1, 2, 2, 4, 64, 1, 2, 1, 24), 3.89), ((2, 1, 1, 4, 64, 1, 2, 1, 24), 4.87),
    ),
    ("32-192-64/2@28", 32): (
        ((1, 2, 4, 4, 64, 2, 3, 2, 64), 9.53), ((1, 1, 4, 2, 64, 2, 3, 2, 64), 11.20),
    ),
    ("64-384-64@14", 1): (
        ((1, 1, 2, 4, 64, 1, 2, 1, 32), 6.16), ((1, 1, 2, 4, 64, 2, 3, 1, 32), 6.39), ((1, 2, 2, 4, 64, 2, 3, 1, 64), 7.82),
    ),
    ("160-960-320@7", 1): (
        ((1, 1, 2, 4, 64, 1, 2, 1, 160), 21.57), ((1, 1, 4, 4, 64, 1, 2, 1, 160), 27.77), ((1, 1, 4, 1, 48, 2, 3, 2, 160), 46.78),
    ),
}  # fmt: skip
"""Microseconds of settings on an H100, by rising time; the kernel had no clusters yet. Tiles as far as `block_n`."""


@pytest.mark.parametrize("case", TIMES, ids=lambda case: f"{case[0]} n{case[1]}")
def test_estimates_are_near_recorded_times_and_in_their_order(case) -> None:
    name, batch = case
    block = replace(BLOCKS[name], n=batch)
    estimates = [estimate_inverted_us(block, InvertedTile(*sizes), GPU.units) for sizes, _ in TIMES[case]]
    assert estimates == sorted(estimates)
    for estimate, (_, us) in zip(estimates, TIMES[case], strict=True):
        assert 0.8 < us / estimate < 1.25


def test_more_images_take_longer() -> None:
    tile = InvertedTile(1, 2, 4, 1, 48, 1, 2, 2, 24)
    times = [estimate_inverted_us(replace(EARLY, n=n), tile, GPU.units) for n in (1, 2, 4, 8, 16, 32, 64, 128)]
    assert times == sorted(set(times))
    assert times[-1] / times[-2] == pytest.approx(2, rel=0.05)  # beside which launch and waits are short


def test_a_larger_halo_costs_more() -> None:
    """Tiles of four rows of y expand six rows of x, and tiles of eight rows ten."""
    low, high = (InvertedTile(1, 2, bands, 1, 48, 1, 2, 2, 24) for bands in (2, 4))
    pixels = [tile.positions(EARLY) * -(-EARLY.p // tile.tile_rows) for tile in (low, high)]
    assert pixels == [14 * 6 * 10, 7 * 10 * 10]
    times = [estimate_inverted_us(EARLY, tile, GPU.units) for tile in (low, high)]
    assert times[0] > times[1]
    assert estimate_inverted_us(replace(EARLY, taps=5), high, GPU.units) > times[1]


def test_what_a_tile_does_more_costs_more() -> None:
    """A second window of zeros, filters computed by two blocks, and activations that take more instructions."""
    block, tile = replace(EARLY, n=1), InvertedTile(1, 2, 2, 2, 32, 1, 2, 2, 24)
    us = estimate_inverted_us(block, tile, GPU.units)
    assert estimate_inverted_us(block, replace(tile, windows=2, stages=3), GPU.units) > us
    assert estimate_inverted_us(EARLY, replace(tile, block_n=16), GPU.units) > estimate_inverted_us(
        EARLY, tile, GPU.units
    )
    assert estimate_inverted_us(replace(block, activations=("silu", "relu6")), tile, GPU.units) > us
    assert estimate_inverted_us(block, tile, GPU.units // 4) > us


@pytest.mark.parametrize(
    "knobs",
    [
        "octets=1", "rows=0", "bands=3", "warps_k=5", "slice_k=24", "windows=3", "stages=1", "stages=7", "expand_m=3",
        "block_n=12", "cluster=3", "expand_n=3",
    ],
)  # fmt: skip
def test_knobs_that_name_no_tile_are_refused(knobs) -> None:
    name, value = knobs.split("=")
    right = InvertedTile(3, 2, 2, 1, 32, 1, 2, 1, 24) if name == "bands" else InvertedTile(2, 2, 1, 1, 32, 1, 2, 1, 24)
    assert InvertedTile.of(right.knobs) == right
    with pytest.raises(InputError, match="knobs"):
        InvertedTile.of(replace(right, **{name: int(value)}).knobs)


def test_clusters_are_for_hopper_alone() -> None:
    knobs = InvertedTile(2, 2, 1, 1, 48, 1, 2, 1, 24, cluster=2).knobs
    with pytest.raises(InputError, match=r"capability 9\.0 for clusters"):
        ENGINE.build(inverted_sample(), knobs, A100)


def test_packed_slices_are_the_weights_and_zeros() -> None:
    """Each value lies where the kernel reads it: two parts of the filters, and a second slice of which half is there."""
    block, tile = replace(EARLY, mid=24, k=24), InvertedTile(2, 2, 1, 1, 16, 1, 2, 1, 16)
    generator = torch.Generator().manual_seed(1)
    shapes = ((24, 24, 1, 1), (24, 1, 3, 3), (24, 24, 1, 1))
    first, taps, last = weights = [torch.randn(shape, generator=generator).half() for shape in shapes]
    bias = torch.randn(24, generator=generator).half()
    packed = pack_slices(weights, (None, bias), block, tile)
    assert packed.shape == (2, 2, tile.stage_bytes(block))
    at = 16 * 80
    rows = packed[1, 1, :at].view(torch.float16).view(16, 40)
    assert torch.equal(rows[:8, :24], first.flatten(1)[16:])
    assert not rows[8:].any()
    assert not rows[:, 24:].any()
    ends = packed[1, 0, at : at + 16 * 48].view(torch.float16).view(16, 24)
    assert torch.equal(ends[:8, :16], last.flatten(1)[16:, :16])
    assert not ends[8:].any()
    pairs = packed[0, 0, at + 16 * 48 : at + 16 * 48 + 8 * 48].view(torch.float16).view(8, 12, 2)
    assert torch.equal(pairs[3, :9, 1], taps[7].flatten())
    assert not pairs[:, 9:].any()
    added = packed[0, 1, -16 * 8 :].view(torch.float32).view(2, 16)
    assert torch.equal(added[1, :8], bias[16:].float())
    assert not added[0].any()


def compiler() -> None:
    """Skips where NVRTC is not there."""
    bindings = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        bindings.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("target", SHARED, ids=["H100", "A100"])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_first_setting_compiles_without_spills(name, target) -> None:
    compiler()
    problem = inverted_subgraph(BLOCKS[name])
    executable = ENGINE.build(problem, ENGINE.space(problem, target)[0], target)
    assert re.findall(r"(\d+) bytes spill stores", executable.log) == ["0"]
    assert executable.dependent == (target is GPU)


@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED, ids=["H100", "A100"])
@pytest.mark.parametrize("name", BLOCKS)
def test_every_setting_compiles_without_spills(name, target) -> None:
    compiler()
    problem = inverted_subgraph(replace(BLOCKS[name], dtype="bf16"))
    for knobs in ENGINE.space(problem, target):
        executable = ENGINE.build(problem, knobs, target)
        assert re.findall(r"(\d+) bytes spill stores", executable.log) == ["0"], str(knobs)
