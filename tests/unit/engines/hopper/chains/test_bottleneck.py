"""The problems that cuda.bottleneck takes and refuses, its settings, and NVRTC's code for them; no device needed."""

from dataclasses import replace

import pytest
import torch

from convoy.engines.competition import competing_engines
from convoy.engines.hopper.chains.bottleneck import ENGINE
from convoy.engines.hopper.chains.bottleneck_cost import estimate_us, tiles
from convoy.engines.hopper.chains.bottleneck_problem import bottleneck_of, layers_of, sample, subgraph_of
from convoy.engines.hopper.chains.bottleneck_tile_config import SHARED_BYTES, Bottleneck, BottleneckTile, chunks_of
from convoy.engines.hopper.chains.bottleneck_weights import pack_weights
from convoy.engines.manifest import load_engine
from convoy.errors import InputError
from convoy.problem import Knobs, SubgraphProblem
from convoy.settings import Settings
from convoy.target import Target

pytestmark = pytest.mark.usefixtures("libraries_are_there")

GPU = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
STAGE_1 = Bottleneck(32, 56, 56, 256, 64, 256, "fp16", ("relu", "relu", "relu"), "x")
STAGE_2 = replace(STAGE_1, h=28, w=28, c=512, mid=128, k=512)


def changed(before: str, after: str) -> SubgraphProblem:
    """The sample with another text."""
    assert before in sample().text
    return replace(sample(), text=sample().text.replace(before, after))


def test_a_bottleneck_is_read_from_its_text() -> None:
    found = bottleneck_of(sample().text)
    assert not isinstance(found, str)
    assert found.block == replace(STAGE_1, n=1)
    assert (found.weights, found.biases, found.x, found.residual) == ((0, 2, 4), (1, 3, 5), 0, 0)


@pytest.mark.parametrize("residual", ["x", "other", "none"])
def test_a_bottlenecks_text_is_read_back(residual) -> None:
    block = replace(STAGE_1, residual=residual, activations=("relu", "silu", "none"), dtype="bf16")
    found = bottleneck_of(subgraph_of(block, biased=False).text)
    assert not isinstance(found, str)
    assert found.block == block
    assert found.biases == (-1, -1, -1)
    assert found.residual == (1 if residual == "other" else 0)
    layers = layers_of(subgraph_of(block).text)
    assert [layer.epilogue.residual for layer in layers] == [False, False, residual != "none"]
    assert sum(layer.flops for layer in layers) == block.flops


def test_it_competes() -> None:
    assert "cuda.bottleneck" in competing_engines(Settings())
    assert "block" in {pattern for name in competing_engines(Settings()) for pattern in load_engine(name).patterns}


@pytest.mark.parametrize(
    ("problem", "target", "reason"),
    [
        (replace(sample(), layout="nchw"), GPU, "layout nhwc"),
        (sample(), replace(GPU, arch="sm_100"), "capability 9.0 alone"),
        (changed("64", "72"), GPU, "multiples of 64"),
        (changed("fp16", "fp32"), GPU, "another subgraph"),
        (changed("return %a2", "return %a2, %a1"), GPU, "another subgraph"),
        (changed(",56,56]", ",57,57]"), GPU, "no tile fits"),
    ],
    ids=["nchw", "Blackwell", "channels", "fp32", "a result inside", "odd width"],
)
def test_refusals_have_reasons(problem, target, reason) -> None:
    found = ENGINE.supports(problem, target)
    assert not found
    assert reason in found.reason


@pytest.mark.parametrize("block", [STAGE_1, STAGE_2, replace(STAGE_1, n=1), replace(STAGE_2, n=128, dtype="bf16")])
def test_every_proposal_fits_and_its_knobs_come_back(block) -> None:
    found = tiles(block, GPU.units)
    assert found
    for tile in found:
        assert not tile.refusal(block)
        assert tile.shared_bytes(block) <= SHARED_BYTES
        assert BottleneckTile.of(Knobs.parse(str(tile.knobs))) == tile
        assert tile.rounds(block) * tile.cluster * tile.item_rows >= block.n * block.h
    assert not found[0].ahead
    times = [estimate_us(block, tile, GPU.units) for tile in found[1:]]
    assert times == sorted(times)
    assert times[0] > max(block.bytes_min / 3.1e6, block.flops / 8e8)  # not below the device's own limits


@pytest.mark.parametrize("knobs", ["consumers=4", "x_stages=1", "weight_stages=1", "cluster=3", "rows=0"])
def test_knobs_that_name_no_tile_are_refused(knobs) -> None:
    name, value = knobs.split("=")
    with pytest.raises(InputError, match="knobs"):
        BottleneckTile.of(replace(BottleneckTile(1, 2, 7, 3), **{name: int(value)}).knobs)


def test_packed_weights_are_the_weights_in_the_order_of_the_products() -> None:
    """A product of unpacked chunks is the convolutions' own, and each chunk is as large as the kernel reads."""
    mid, c, k = 128, 64, 192
    generator = torch.Generator().manual_seed(1)
    first, second, last = (
        torch.randn(shape, generator=generator) for shape in ((mid, c, 1, 1), (mid, mid, 3, 3), (k, mid, 1, 1))
    )
    chunks = pack_weights(first, second, last).view(-1, mid * 64)
    assert len(chunks) == chunks_of(Bottleneck(1, 4, 4, c, mid, k, "fp16", ("none",) * 3, "none"))

    def plain(rows):
        row = torch.arange(rows.shape[-2])
        place = torch.arange(8)[None] ^ (row % 8)[:, None]
        return rows.view(*rows.shape[:-1], 8, 8)[..., row[:, None], place, :].reshape(rows.shape)

    assert torch.equal(plain(chunks[0].view(mid, 64)), first.flatten(1))
    tap, block = 5, 1
    assert torch.equal(plain(chunks[1 + tap * 2 + block].view(mid, 64)), second[:, 64:, 1, 2])
    assert torch.equal(plain(chunks[1 + 18 + 2].view(2, 64, 64)[1]), last[128:192, 64:, 0, 0])


@pytest.mark.slow
def test_nvrtc_makes_code_without_spills_and_without_serialised_products() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    executable = ENGINE.build(sample(), ENGINE.space(sample(), GPU)[0], GPU)
    assert "spill" in executable.log
    weights = [torch.zeros(shape) for shape in ((64, 256, 1, 1), (64,), (64, 64, 3, 3), (64,), (256, 64, 1, 1), (256,))]
    packed, biases = executable.pack(weights)
    assert packed.numel() == 256 * 64 * 2 + 9 * 64 * 64
    assert biases.shape == (384,)
    assert biases.dtype == torch.float32
