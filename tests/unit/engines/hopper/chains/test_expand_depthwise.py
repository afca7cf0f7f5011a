"""The problems that cuda.expand_depthwise takes and refuses, its settings, and NVRTC's code for them; no device needed."""

from dataclasses import replace

import pytest
import torch

from convoy.engines.competition import competing_engines
from convoy.engines.hopper.chains import inverted_residual
from convoy.engines.hopper.chains.expand_depthwise import ENGINE
from convoy.engines.hopper.chains.inverted_residual_block import InvertedResidual
from convoy.engines.hopper.chains.inverted_residual_cost import estimate_inverted_us, inverted_tiles
from convoy.engines.hopper.chains.inverted_residual_problem import (
    expand_depthwise_of,
    expand_depthwise_sample,
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
from tests.unit.engines.hopper.chains.test_inverted_residual import compiler
from tests.unit.engines.spills import assert_no_spills

pytestmark = pytest.mark.usefixtures("libraries_are_there")

GPU = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
A100 = replace(GPU, arch="sm_80", units=108)
SHARED = {GPU: 227 << 10, A100: 99 << 10}
SILU = ("silu", "silu")
BLOCKS = {
    f"{c}-{6 * c} {taps}x{taps}/{stride}@{side}": InvertedResidual(
        32, side, side, c, 6 * c, 6 * c, taps, stride, "fp16", SILU, residual=False, projects=False
    )
    for side, c, taps, stride in (
        (112, 16, 3, 2), (56, 24, 3, 1), (56, 24, 5, 2), (28, 40, 5, 1), (28, 40, 3, 2), (14, 80, 5, 1), (14, 112, 5, 2),
        (7, 192, 3, 1),
    )
}  # fmt: skip
"""Of EfficientNet-B0."""

THIRD = BLOCKS["24-144 3x3/1@56"]


def changed(before: str, after: str) -> SubgraphProblem:
    """The sample with another text."""
    assert before in expand_depthwise_sample().text
    return replace(expand_depthwise_sample(), text=expand_depthwise_sample().text.replace(before, after))


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("biased", [True, False])
def test_a_text_is_read_back(name, biased) -> None:
    block = replace(BLOCKS[name], dtype="bf16")
    found = expand_depthwise_of(inverted_subgraph(block, biased=biased).text)
    assert not isinstance(found, str)
    assert found.block == block
    assert (found.weights, found.biases) == (((0, 2), (1, 3)) if biased else ((0, 1), (-1, -1)))
    layers = layers_of_inverted(inverted_subgraph(block).text)
    assert [layer.groups for layer in layers] == [1, block.mid]
    assert sum(layer.flops for layer in layers) == block.flops


def test_it_competes() -> None:
    assert "cuda.expand_depthwise" in competing_engines(Settings())
    assert ENGINE.supports(expand_depthwise_sample(), GPU)
    assert ENGINE.supports(expand_depthwise_sample(), A100)


def test_each_of_the_two_engines_takes_its_own_blocks_alone() -> None:
    assert not ENGINE.supports(inverted_sample(), GPU)
    assert not inverted_residual.ENGINE.supports(expand_depthwise_sample(), GPU)


@pytest.mark.parametrize(
    ("problem", "target", "reason"),
    [
        (replace(expand_depthwise_sample(), layout="nchw"), GPU, "layout nhwc"),
        (expand_depthwise_sample(), replace(GPU, arch="sm_75"), "capability 8.0 or newer"),
        (changed("144", "140"), GPU, "multiples of 8, got 24 and 140"),
        (changed("fp16", "fp32"), GPU, "another subgraph"),
        (changed("return %a1", "return %a1, %a0"), GPU, "another subgraph"),
        (changed("(1, 1), (1, 1), (1, 1), 144)", "(1, 1), (2, 2), (2, 2), 144)"), GPU, "another subgraph"),
    ],
    ids=["nchw", "Turing", "channels", "fp32", "a result inside", "dilation"],
)
def test_refusals_have_reasons(problem, target, reason) -> None:
    found = ENGINE.supports(problem, target)
    assert not found
    assert reason in found.reason


@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("target", SHARED, ids=["H100", "A100"])
@pytest.mark.parametrize("name", BLOCKS)
def test_every_proposal_fits_and_its_knobs_come_back(name, target, batch) -> None:
    block, hopper = replace(BLOCKS[name], n=batch), target is GPU
    found = inverted_tiles(block, target.units, SHARED[target], hopper=hopper)
    assert 4 < len(found) == len(set(found)) <= 16
    for tile in found:
        assert not tile.refusal(block, SHARED[target])
        assert tile.shared_bytes(block) <= SHARED[target]
        assert InvertedTile.of(Knobs.parse(str(tile.knobs))) == tile
        assert (tile.cluster, tile.block_n) == (1, 0)
        assert (tile.share - 1) * tile.own_slices(block) < tile.slices(block) <= tile.share * tile.own_slices(block)
        pixels = tile.grid(block) // tile.share * tile.tile_rows * tile.tile_columns
        assert pixels >= block.n * block.p * block.q
    times = [estimate_inverted_us(block, tile, target.units, hopper=hopper) for tile in found]
    assert times == sorted(times)
    assert times[0] > max(block.bytes_min / 3.1e6, block.flops / 8e8)  # not below the device's own limits


def test_small_images_are_shared_by_blocks_that_fill_the_device() -> None:
    block = replace(BLOCKS["192-1152 3x3/1@7"], n=1)
    tile = inverted_tiles(block, GPU.units, SHARED[GPU])[0]
    assert tile.share > 1
    assert tile.grid(block) > GPU.units / 2
    alone = replace(tile, share=1)
    assert estimate_inverted_us(block, alone, GPU.units) > 2 * estimate_inverted_us(block, tile, GPU.units)


def test_an_estimate_has_no_last_layer_but_the_stores() -> None:
    """The same tile with a last layer takes longer; y that is larger takes longer than its bytes alone."""
    tile = InvertedTile(2, 4, 7, 1, 48, 1, 2, 2, 0)
    whole = replace(THIRD, k=24, projects=True)
    us = estimate_inverted_us(THIRD, tile, GPU.units)
    assert estimate_inverted_us(whole, replace(tile, block_n=24), GPU.units) > us > THIRD.bytes_min / 3.0e6
    relu = replace(THIRD, activations=("relu", "relu"))
    assert estimate_inverted_us(relu, tile, GPU.units) < us


@pytest.mark.parametrize("knobs", ["share=0", "octets=1", "slice_k=24", "windows=3", "stages=7", "expand_n=3"])
def test_knobs_that_name_no_tile_are_refused(knobs) -> None:
    name, value = knobs.split("=")
    right = InvertedTile(2, 2, 1, 1, 32, 1, 2, 1, 0, share=2)
    assert InvertedTile.of(right.knobs) == right
    with pytest.raises(InputError, match="knobs"):
        InvertedTile.of(replace(right, **{name: int(value)}).knobs)


def test_a_tile_of_the_other_kernel_is_refused() -> None:
    knobs = InvertedTile(2, 2, 1, 1, 48, 1, 2, 1, 24).knobs
    with pytest.raises(InputError, match="filters of a layer that is not there"):
        ENGINE.build(expand_depthwise_sample(), knobs, GPU)
    knobs = InvertedTile(2, 2, 1, 1, 48, 1, 2, 1, 0, share=2).knobs
    with pytest.raises(InputError, match="has no filters"):
        inverted_residual.ENGINE.build(inverted_sample(), knobs, GPU)


def test_more_shares_than_slices_are_refused() -> None:
    knobs = InvertedTile(2, 2, 1, 1, 48, 1, 2, 1, 0, share=4).knobs
    with pytest.raises(InputError, match="blocks without a slice"):
        ENGINE.build(expand_depthwise_sample(), knobs, GPU)


def test_packed_channels_have_the_order_of_the_stores() -> None:
    """Of 16 channels, the first four of a lane are 0, 1, 8 and 9 of the window; behind channel 24 there are zeros."""
    block, tile = replace(THIRD, mid=24, k=24), InvertedTile(2, 2, 1, 1, 16, 1, 2, 1, 0)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(shape, generator=generator).half() for shape in ((24, 24, 1, 1), (24, 1, 3, 3))]
    bias = torch.randn(24, generator=generator).half()
    packed = pack_slices(weights, (None, bias), block, tile)
    assert packed.shape == (1, 2, tile.stage_bytes(block))
    order = [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]
    at = 16 * 80
    rows = packed[0, :, :at].view(torch.float16).view(2, 16, 40)
    assert torch.equal(rows[0, :, :24], weights[0].flatten(1)[:16][order])
    assert [bool(row.any()) for row in rows[1]] == [channel < 8 for channel in order]
    pairs = packed[0, 0, at : at + 8 * 48].view(torch.float16).view(8, 12, 2)
    assert torch.equal(pairs[4, :9, 1], weights[1][3].flatten())
    added = packed[0, 0, -16 * 8 :].view(torch.float32).view(2, 16)
    assert torch.equal(added[1], bias[:16][order].float())
    assert not added[0].any()


@pytest.mark.parametrize("target", SHARED, ids=["H100", "A100"])
def test_the_first_setting_compiles_without_spills(target) -> None:
    compiler()
    executable = ENGINE.build(expand_depthwise_sample(), ENGINE.space(expand_depthwise_sample(), target)[0], target)
    assert_no_spills(executable.log)
    assert executable.dependent == (target is GPU)


@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED, ids=["H100", "A100"])
@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("name", BLOCKS)
def test_every_setting_compiles_without_spills(name, batch, target) -> None:
    compiler()
    problem = inverted_subgraph(replace(BLOCKS[name], n=batch, dtype="bf16" if batch == 1 else "fp16"))
    for knobs in ENGINE.space(problem, target):
        assert_no_spills(ENGINE.build(problem, knobs, target).log)
