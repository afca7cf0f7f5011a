"""bottleneck.cu on the emulated device: exact on integers, as `test_emulated_igemm` runs the single layers."""

import ctypes
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from convoy.engines.hopper.chains.bottleneck_tile_config import Bottleneck, BottleneckTile
from convoy.engines.hopper.chains.bottleneck_weights import pack_biases, pack_weights
from convoy.engines.hopper.nvrtc_kernel import structure
from tests.unit.engines.emulated_cuda import address, emulated_map, hopper_libraries

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

RUN = """
extern "C" int run(const TensorMap* x, const unsigned char* weights, const float* bias, const TensorMap* residual,
                   const TensorMap* y, const Sizes* sizes, int grid, int shared_bytes) {
  return launch(grid, 128 * (CONSUMERS + 1), CLUSTER, shared_bytes,
                [=] { bottleneck(*x, weights, bias, *residual, *y, *sizes); });
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return hopper_libraries(tmp_path_factory.mktemp("bottleneck"))


def exact(block, x, residual, weights, biases):
    """The block in float64, each result rounded to the dtype as the layers' own kernels round it."""
    value = x
    for index, (weight, bias, word) in enumerate(zip(weights, biases, block.activations, strict=True)):
        made = F.conv2d(value.double(), weight.double(), bias.double(), padding=weight.shape[2] // 2)
        made = made + residual.double() if index == 2 and block.residual != "none" else made
        made = made.relu() if word == "relu" else made
        value = made.to(x.dtype)
    return value


def run(library, block, tile, clusters, changes=()):
    """Launch on `clusters` clusters; the result, the exact one, and the faults seen."""
    assert not tile.refusal(block)
    generator = torch.Generator().manual_seed(7)
    dtype = DTYPES[block.dtype]

    def integers(shape, low, high, kept=1.0):
        drawn = torch.randint(low, high, shape, generator=generator)
        return (drawn * (torch.rand(shape, generator=generator) < kept)).to(dtype)

    x = integers((block.n, block.c, block.h, block.w), -2, 3).contiguous(memory_format=torch.channels_last)
    shapes = ((block.mid, block.c, 1, 1), (block.mid, block.mid, 3, 3), (block.k, block.mid, 1, 1))
    # Few weights that are not zero: every value inside stays an integer that a half value holds
    weights = [integers(shape, -1, 2, kept) for shape, kept in zip(shapes, (0.1, 0.02, 0.1), strict=True)]
    biases = [integers((shape[0],), -2, 3) for shape in shapes]
    residual = x if block.residual == "x" else integers((block.n, block.k, block.h, block.w), -2, 3)
    residual = residual.contiguous(memory_format=torch.channels_last)
    y = torch.full((block.n, block.k, block.h, block.w), float("nan"), dtype=dtype)
    y = y.contiguous(memory_format=torch.channels_last)
    kernel = library("bottleneck", tile.parameters(block), RUN, block.dtype, changes)
    packed, bias = pack_weights(*weights), pack_biases(biases, [len(b) for b in biases], x)
    sizes = structure("Sizes", tile.sizes(block))
    pixels, results = emulated_map(x, tile.pixel_map(block)), emulated_map(y, tile.result_map(block, block.k))
    added = emulated_map(residual, tile.residual_map(block))
    faults = kernel.run(
        ctypes.byref(pixels), address(packed), address(bias), ctypes.byref(added), ctypes.byref(results), ctypes.byref(sizes),
        min(clusters, tile.rounds(block)) * tile.cluster, tile.shared_bytes(block),
    )  # fmt: skip
    return y, exact(block, x, residual, weights, biases), faults


RELU = ("relu", "relu", "relu")
SMALL = Bottleneck(1, 6, 8, 64, 64, 64, "fp16", RELU, "x")
CASES = {
    "two warpgroups, two items": (SMALL, BottleneckTile(1, 2, 2, 2), 1),
    "rows together, more channels inside, ring of weights": (
        replace(SMALL, h=5, w=4, mid=128, k=192, residual="other"),
        BottleneckTile(2, 2, 1, 3, weight_stages=3, ahead=True),
        2,
    ),
    "pair, bf16, no residual, an odd item": (
        replace(
            SMALL, n=3, h=4, w=4, c=128, k=128, dtype="bf16", residual="none", activations=("relu", "none", "none")
        ),
        BottleneckTile(2, 1, 2, 3, weight_stages=4, cluster=2),
        1,
    ),
    "pair that keeps its weights": (
        replace(SMALL, h=4, w=4, k=128, residual="other"),
        BottleneckTile(2, 1, 1, 2, cluster=2, ahead=True),
        1,
    ),
}


SLOW = ("two warpgroups, two items", "pair that keeps its weights")
"""Each build of the kernel takes some seconds; the others cover rings, clusters and rows together."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CASES])
def test_exact_on_integers(library, name):
    block, tile, clusters = CASES[name]
    y, expected, faults = run(library, block, tile, clusters)
    assert faults == 0
    assert torch.equal(y, expected)


def test_padding_is_zeros_and_not_activated_biases(library):
    """The 3x3's padding lies on the first result; planted: rows outside the image keep what the bias makes of them."""
    block, tile, clusters = CASES["rows together, more channels inside, ring of weights"]
    y, expected, _ = run(library, block, tile, clusters, [("line >= 0 && line < height", "true")])
    wrong = (y != expected).any(dim=1)[0]
    assert wrong[0].any()
    assert wrong[-1].any()
    assert not wrong[1:-1].any()
