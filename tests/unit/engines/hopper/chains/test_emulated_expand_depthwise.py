"""expand_depthwise.cu on the emulated device: exact on integers, near on normal data, and planted faults that are seen."""

import shutil
from dataclasses import replace

import pytest
import torch

from convoy.engines.hopper.chains.inverted_residual_block import InvertedResidual
from convoy.engines.hopper.chains.inverted_residual_tile_config import InvertedTile
from convoy.engines.hopper.chains.inverted_residual_weights import pack_slices
from tests.unit.engines.emulated_cuda import address, hopper_libraries
from tests.unit.engines.hopper.chains.inverted_cases import DTYPES, LIMITS, drawn, exact

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")

RUN = """
extern "C" int run(const Half* x, const unsigned char* weights, uint2* y, int grid, int shared_bytes) {
  return launch(grid, BLOCK_THREADS, 1, shared_bytes + 64, [=] { expand_depthwise(x, weights, y); });
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return hopper_libraries(tmp_path_factory.mktemp("expand_depthwise"))


def run(library, block, tile, *, kind="integer", biased=True, changes=()):
    """Launch; the result between guards, and the exact one."""
    assert InvertedTile.of(tile.knobs) == tile
    assert not tile.refusal(block, 227 << 10)
    x, weights, biases = drawn(block, kind, biased)
    guard, shape = 64, (block.n, block.p, block.q, block.k)
    memory = torch.full((block.n * block.p * block.q * block.k + 2 * guard,), 99.0).to(x.dtype)
    y = memory[guard:-guard].fill_(float("nan")).view(shape).permute(0, 3, 1, 2)
    kernel = library("expand_depthwise", tile.parameters(block, hopper=True), RUN, block.dtype, changes)
    packed = pack_slices(weights, biases, block, tile)
    assert kernel.run(*map(address, (x, packed, y)), tile.grid(block), tile.shared_bytes(block)) == 0
    assert (memory[:guard] == 99).all()
    assert (memory[-guard:] == 99).all()
    return y, exact(block, x, weights, biases)


SMALL = InvertedResidual(1, 6, 9, 16, 48, 48, 3, 1, "fp16", ("relu6", "relu6"), residual=False, projects=False)


def tile(octets, rows, bands, warps_k, slice_k, windows=1, expand_m=2, expand_n=1, share=1):
    """One window more than stages."""
    return InvertedTile(octets, rows, bands, warps_k, slice_k, windows, windows + 1, expand_m, 0, expand_n, 1, share)


CASES = {
    "one pair of units": (SMALL, tile(2, 3, 1, 1, 16)),
    "two windows, warps share units, odd sides, a slice in part": (
        replace(SMALL, n=2, h=7, c=24, mid=72, k=72),
        tile(2, 2, 2, 2, 32, 2, 2, 2),
    ),
    "stride 2, odd sides, half of the last 16 channels": (
        replace(SMALL, h=11, w=17, mid=40, k=40, stride=2, activations=("relu", "none")),
        tile(1, 2, 2, 1, 32),
    ),
    "stride 2, even sides, bf16, one octet in the middle": (
        replace(SMALL, h=8, w=36, c=8, stride=2, dtype="bf16", activations=("none", "relu")),
        tile(3, 1, 2, 1, 48, 2, 1),
    ),
    "5x5, bf16": (
        replace(SMALL, h=9, w=10, taps=5, c=32, dtype="bf16", activations=("relu", "relu")),
        tile(2, 3, 1, 1, 48),
    ),
    "5x5, stride 2": (replace(SMALL, h=9, w=13, taps=5, stride=2), tile(1, 2, 2, 1, 16, 1, 1)),
    "smaller than a tile": (replace(SMALL, n=3, h=2, w=1), tile(2, 4, 1, 1, 16, 1, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_exact_on_integers(library, name):
    y, expected = run(library, *CASES[name])
    assert torch.equal(y, expected)
    assert (expected != 0).double().mean() > 0.3  # ReLU leaves about half


@pytest.mark.parametrize("share", [1, 2, 3, 5])
@pytest.mark.parametrize("windows", [1, 2])
def test_blocks_that_share_a_tile_write_all_of_it(library, share, windows):
    """Five slices, the last one in part: of two shares one has three and the other two, of three the last has one."""
    block = replace(SMALL, n=2, h=5, mid=72, k=72)
    y, expected = run(library, block, tile(2, 2, 1, 1, 16, windows, share=share))
    assert torch.equal(y, expected)


@pytest.mark.parametrize("words", [("silu", "silu"), ("hardswish", "relu6"), ("none", "hardswish")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_near_on_normal_data(library, words, dtype):
    block, own = CASES["two windows, warps share units, odd sides, a slice in part"]
    y, expected = run(library, replace(block, activations=words, dtype=dtype), own, kind="normal")
    assert (y.double() - expected.double()).norm() < LIMITS[dtype] * expected.double().norm()


def test_without_biases(library):
    y, expected = run(library, *CASES["one pair of units"], biased=False)
    assert torch.equal(y, expected)


def test_padding_is_zeros_and_not_activated_biases(library):
    """The depthwise filter's padding lies on the expanded values; planted: pixels outside the image are expanded too."""
    block, own = CASES["one pair of units"]
    y, expected = run(library, block, own, changes=[("mask = ballot(there)", "mask = ballot(i < POSITIONS)")])
    wrong = (y != expected).any(dim=1)[0]
    assert wrong[0].any()
    assert wrong[-1].any()
    assert wrong[:, 0].any()
    assert not wrong[1:-1, 1:-1].any()


@pytest.mark.parametrize(
    "change",
    [
        ("weight[COUNT - 1]", "weight[COUNT - 2]"),
        ("{filtered[row][i], filtered[row][2 + i]}", "{filtered[row][2 + i], filtered[row][i]}"),
        ("channel = first + lane % 4 * 4", "channel = first + lane % 4 / 2 * 4 + lane % 2 * 8"),
        ("(tile.first + slice) * SLICE", "slice * SLICE"),
    ],
    ids=["a tap", "channels of a lane", "channels of lanes", "first slice"],
)
def test_a_planted_fault_is_seen(library, change):
    y, expected = run(library, replace(SMALL, n=2, h=5, mid=72, k=72), tile(2, 2, 1, 1, 16, share=2), changes=[change])
    assert not torch.equal(y, expected)
