"""inverted_residual.cu on the emulated device: exact on integers, near on normal data, and planted faults that are seen."""

import shutil
from dataclasses import replace

import pytest
import torch

from convoy.engines.hopper.chains.inverted_residual_block import InvertedResidual
from convoy.engines.hopper.chains.inverted_residual_tile_config import InvertedTile
from convoy.engines.hopper.chains.inverted_residual_weights import pack_last_bias, pack_slices
from tests.unit.engines.emulated_cuda import address, hopper_libraries
from tests.unit.engines.hopper.chains.inverted_cases import DTYPES, LIMITS, drawn, exact

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")

RUN = """
extern "C" int run(const Half* x, const unsigned char* weights, const uint4* bias, uint4* y, int grid, int shared_bytes) {
  return launch(grid, BLOCK_THREADS, CLUSTER, shared_bytes + 64, [=] { inverted_residual(x, weights, bias, y); });
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return hopper_libraries(tmp_path_factory.mktemp("inverted_residual"))


def run(library, block, tile, *, kind="integer", biased=True, changes=()):
    """Launch; the result between guards, and the exact one."""
    assert InvertedTile.of(tile.knobs) == tile
    assert not tile.refusal(block, 227 << 10)
    x, weights, biases = drawn(block, kind, biased)
    guard, shape = 64, (block.n, block.p, block.q, block.k)
    memory = torch.full((block.n * block.p * block.q * block.k + 2 * guard,), 99.0).to(x.dtype)
    y = memory[guard:-guard].fill_(float("nan")).view(shape).permute(0, 3, 1, 2)
    kernel = library("inverted_residual", tile.parameters(block, hopper=True), RUN, block.dtype, changes)
    packed, last = pack_slices(weights, biases[:2], block, tile), pack_last_bias(biases[2], block, x)
    faults = kernel.run(*map(address, (x, packed, last, y)), tile.grid(block), tile.shared_bytes(block))
    assert faults == 0
    assert (memory[:guard] == 99).all()
    assert (memory[-guard:] == 99).all()
    return y, exact(block, x, weights, biases)


RELU6 = ("relu6", "relu6")
SMALL = InvertedResidual(1, 6, 9, 16, 48, 16, 3, 1, "fp16", RELU6, True)
CASES = {
    "one pair of units": (SMALL, InvertedTile(2, 3, 1, 1, 16, 1, 2, 2, 16)),
    "two windows, warps share units, odd sides, a slice in part": (
        replace(SMALL, n=2, h=7, c=24, mid=72, k=24),
        InvertedTile(2, 2, 2, 2, 32, 2, 3, 2, 24, 2),
    ),
    "stride 2, odd sides, three stages, filters in parts": (
        replace(SMALL, h=11, w=17, k=40, stride=2, residual=False, activations=("relu", "none")),
        InvertedTile(1, 2, 2, 1, 32, 1, 3, 2, 24),
    ),
    "stride 2, even sides, bf16, one octet in the middle": (
        replace(SMALL, h=8, w=36, c=8, k=8, stride=2, dtype="bf16", residual=False, activations=("none", "relu")),
        InvertedTile(3, 1, 2, 1, 48, 2, 4, 1, 8),
    ),
    "5x5, bf16": (
        replace(SMALL, h=9, w=10, taps=5, c=32, k=32, dtype="bf16", activations=("relu", "relu")),
        InvertedTile(2, 3, 1, 1, 48, 1, 2, 2, 32),
    ),
    "5x5, stride 2": (
        replace(SMALL, h=9, w=13, taps=5, stride=2, residual=False),
        InvertedTile(1, 2, 2, 1, 16, 1, 2, 1, 16),
    ),
    "a cluster of two, with two slices and one": (
        replace(SMALL, n=2, h=4),
        InvertedTile(2, 2, 2, 1, 16, 1, 2, 1, 16, cluster=2),
    ),
    "a cluster of four, two windows, warps share units": (
        replace(SMALL, h=5, mid=128, k=40, residual=False),
        InvertedTile(2, 1, 1, 2, 32, 2, 3, 1, 24, 2, 4),
    ),
    "smaller than a tile": (replace(SMALL, n=3, h=2, w=1), InvertedTile(2, 4, 1, 1, 16, 1, 2, 1, 16)),
}


@pytest.mark.parametrize("name", CASES)
def test_exact_on_integers(library, name):
    y, expected = run(library, *CASES[name])
    assert torch.equal(y, expected)
    assert (expected != 0).double().mean() > 0.5


@pytest.mark.parametrize("words", [("silu", "silu"), ("hardswish", "relu6"), ("none", "hardswish")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_near_on_normal_data(library, words, dtype):
    block, tile = CASES["two windows, warps share units, odd sides, a slice in part"]
    y, expected = run(library, replace(block, activations=words, dtype=dtype), tile, kind="normal")
    assert (y.double() - expected.double()).norm() < LIMITS[dtype] * expected.double().norm()


def test_without_biases(library):
    y, expected = run(library, *CASES["one pair of units"], biased=False)
    assert torch.equal(y, expected)


def test_padding_is_zeros_and_not_activated_biases(library):
    """The depthwise filter's padding lies on the expanded values; planted: pixels outside the image are expanded too."""
    block, tile = CASES["one pair of units"]
    y, expected = run(library, block, tile, changes=[("mask = ballot(there)", "mask = ballot(i < POSITIONS)")])
    wrong = (y != expected).any(dim=1)[0]
    assert wrong[0].any()
    assert wrong[-1].any()
    assert wrong[:, 0].any()
    assert not wrong[1:-1, 1:-1].any()


@pytest.mark.parametrize(
    "change",
    [
        ("weight[COUNT - 1]", "weight[COUNT - 2]"),
        ("tap % 2 * EVEN_COLUMNS + tap / 2", "tap % 2 * EVEN_COLUMNS"),
        ("2 * (place - EVEN_COLUMNS) + 1", "2 * (place - EVEN_COLUMNS)"),
        ("lane / 4 % 2 ? 0xffff0000u : 0x0000ffffu", "0xffffffffu"),
        ("filter = tile.part * BLOCK_N", "filter = tile.part * 0"),
    ],
)
def test_a_planted_fault_is_seen(library, change):
    y, expected = run(library, *CASES["stride 2, odd sides, three stages, filters in parts"], changes=[change])
    assert not torch.equal(y, expected)


def test_a_missing_barrier_is_seen(library):
    """Planted: nobody waits for a slice's window before it is filtered."""
    block, tile = (
        replace(SMALL, w=16),
        InvertedTile(2, 1, 2, 1, 16, 1, 2, 1, 16),
    )  # the first warp expands one tile more
    y, expected = run(library, block, tile, changes=[("if constexpr (WINDOWS == 1) __syncthreads();", "")])
    assert not torch.equal(y, expected)
