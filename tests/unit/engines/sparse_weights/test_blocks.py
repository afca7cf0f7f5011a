"""pruned.blocks without a GPU: its lists, what is refused and proposed, what NVRTC makes of it."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from convoy.engines.sparse_weights import block_sparse
from convoy.engines.sparse_weights.block_sparse import ENGINE, BlockSparseTile
from convoy.engines.sparse_weights.weight_blocks import NO_BLOCK, Lists, lengths, live_share
from convoy.errors import InputError
from convoy.problem import ConvProblem, Epilogue, Knobs, parse_problem
from convoy.target import Target
from tests.unit.engines.pruned_cases import mask_of
from tests.unit.engines.spills import assert_no_spills

H100 = Target("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132, 80 << 30, 50 << 20)
CPU = Target("cpu", "a CPU", "avx2", 2, 8 << 30, 1 << 20)
HALF = {"x_dtype": "fp16", "weight_dtype": "fp16", "y_dtype": "fp16", "numerics": "half"}
PLAIN = ConvProblem(32, 256, 14, 14, 256, 3, 3, 1, 1, layout="nhwc", **HALF)


def blocky(problem, rows=64, share=0.1):
    """The problem with blocks of so many filters by a tap's eight channels, of which a share is there."""
    k, c, r, s = problem.weight_spec.shape
    kept = np.random.default_rng(7).random((-(-k // rows), -(-c // 8), r, s)) < share
    nonzero = kept.repeat(rows, axis=0)[:k].repeat(8, axis=1)[:, :c]
    return problem.with_mask(mask_of(nonzero))


BLOCKY = blocky(PLAIN)


@pytest.fixture(autouse=True)
def _bindings_are_there(monkeypatch):
    monkeypatch.setattr(block_sparse, "absence", lambda: "")


@pytest.mark.parametrize("filters", [64, 128])
def test_lists_name_every_value_once_and_the_longest_is_first(filters):
    problem = blocky(ConvProblem(1, 40, 9, 9, 136, 3, 2, layout="nhwc", dilation_w=3, **HALF), rows=24, share=0.2)
    lists = Lists(problem, filters)
    weight = torch.from_numpy(block_sparse.positions(problem.mask)).half()
    weight *= torch.arange(1, 1 + weight.numel()).view(weight.shape) % 1021
    chunks = lists.pack(weight).view(torch.float16).view(-1, filters, 8, 8)
    dense = torch.zeros(-(-136 // filters) * filters, 40, 3, 2, dtype=torch.float16)
    counts = []
    for first, last, filter0, _ in lists.tiles.tolist():
        counts.append(last - first)
        for iteration, block in np.ndindex(last - first, 8):
            word = int(lists.blocks[first + iteration, block])
            if word == NO_BLOCK:
                continue
            tap, channel = (word >> 23, (word >> 15 & 255) // 3), word & 32767
            for row in range(filters):
                dense[filter0 + row, channel : channel + 8, *tap] += chunks[first + iteration, row, block ^ (row & 7)]
    assert torch.equal(dense[:136], weight)
    assert counts == sorted(counts, reverse=True) == list(lengths(problem.mask, filters))


def test_a_weight_of_zeros_alone_packs_to_nothing():
    problem = blocky(PLAIN, share=0.0)
    lists = Lists(problem, 64)
    packed = lists.pack(torch.zeros(problem.weight_spec.shape, dtype=torch.float16))
    assert packed.shape == (0, 64 * 128)
    assert lists.blocks.shape == (0, 8)
    assert all(first == last for first, last, *_ in lists.tiles.tolist())


def test_shares_are_those_of_tiles():
    assert live_share(blocky(PLAIN, share=0.0).mask, 64) == 0
    assert live_share(blocky(PLAIN, share=2).mask, 64) == 1
    high, low = (live_share(blocky(PLAIN, rows=rows).mask, 64) for rows in (64, 1))
    assert 0.05 < high < 0.15
    assert low > 0.99


@pytest.mark.parametrize(
    ("problem", "target", "words"),
    [
        (BLOCKY, CPU, "compute capability 9.0"),
        (BLOCKY, replace(H100, arch="sm_80"), "compute capability 9.0"),
        (PLAIN, H100, "without a mask"),
        (parse_problem(BLOCKY.key), H100, "digest alone"),
        (BLOCKY.with_layout("nchw"), H100, "layout nhwc"),
        (replace(BLOCKY, n=0), H100, "batch"),
        (replace(BLOCKY, acc_dtype="fp16"), H100, "fp32"),
        (blocky(ConvProblem(1, 64, 8, 8, 64, 3, 3, layout="nhwc")), H100, "fp16 or bf16"),
        (blocky(replace(PLAIN, groups=2)), H100, "groups = 1"),
        (blocky(replace(PLAIN, c=60)), H100, "multiples of 8"),
        (blocky(replace(PLAIN, pad_h=130, dilation_h=128)), H100, "at most 255 pixels"),
        (replace(BLOCKY, n=1 << 16), H100, "2^31"),
        (blocky(PLAIN, rows=1), H100, "100% of such blocks"),
    ],
)
def test_refusals_say_why(problem, target, words):
    support = ENGINE.accepts(problem, target)
    assert not support
    assert words in support.reason


def test_without_the_packages_it_says_so(monkeypatch):
    monkeypatch.setattr(block_sparse, "absence", lambda: "needs cuda-core")
    assert ENGINE.accepts(BLOCKY, H100).reason == "needs cuda-core"


@pytest.mark.parametrize(
    "problem", [BLOCKY, blocky(replace(PLAIN, n=1, h=7, w=7)), blocky(replace(PLAIN, k=8), share=0.0)]
)
def test_spaces_are_finite_distinct_and_ordered_by_their_guess(problem):
    assert ENGINE.accepts(problem, H100)
    space = list(ENGINE.space(problem, H100))
    assert 0 < len(space) <= 16
    assert len(set(space)) == len(space)
    guesses = [ENGINE.estimate_us(problem, knobs, H100) for knobs in space]
    assert guesses == sorted(guesses)
    assert all(0 < guess < math.inf for guess in guesses)
    for knobs in space:
        assert BlockSparseTile.of(knobs).knobs == knobs
        assert BlockSparseTile.of(knobs).shared_bytes <= block_sparse.SHARED_BYTES


def test_more_zeros_are_expected_to_take_less():
    few, many = (block_sparse.tile_configs(blocky(PLAIN, share=share), 132)[0] for share in (0.5, 0.1))
    assert block_sparse.estimate_us(blocky(PLAIN, share=0.1), many, 132) < 0.6 * block_sparse.estimate_us(
        blocky(PLAIN, share=0.5), few, 132
    )


@pytest.mark.parametrize("change", [{"rows": 96}, {"pixels": 24}, {"pixels": 272}, {"consumers": 3}, {"stages": 2}])
def test_knobs_that_make_no_kernel_are_refused(change):
    good = {"rows": 64, "pixels": 64, "stages": 4, "consumers": 2}
    assert BlockSparseTile.of(Knobs.of(**good)).filters == 128
    with pytest.raises(InputError, match="knobs"):
        BlockSparseTile.of(Knobs.of(**(good | change)))


def test_the_first_guess_compiles_without_spills_or_serialised_products():
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(str(error))
    problem = replace(BLOCKY, epilogue=Epilogue(bias=True, residual=True, activation="relu"))
    executable = ENGINE.build(problem, ENGINE.space(problem, H100)[0], H100)
    assert_no_spills(executable.log)
    assert "C75" not in executable.log
    with pytest.raises(InputError, match="weight"):
        executable.pack((torch.ones(problem.weight_spec.shape, dtype=torch.float16),))
