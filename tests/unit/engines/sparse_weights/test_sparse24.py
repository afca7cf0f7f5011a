"""pruned.sparse24 without a GPU: what is packed, what is refused and proposed, what NVRTC makes of it."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from convoy.engines.hopper import hopper_support_checks, igemm
from convoy.engines.hopper.igemm_swap_ab_limits import SHARED_BYTES
from convoy.engines.hopper.igemm_swap_ab_tile_search import estimate_us, forms
from convoy.engines.hopper.nvrtc_source import header_text, wgmma_sparse_function
from convoy.engines.sparse_weights.sparse24 import ENGINE
from convoy.engines.sparse_weights.sparse24_packing import CHANNELS, ROW_BYTES, Packing, crowded
from convoy.engines.sparse_weights.sparse24_tile import Sparse24Tile
from convoy.errors import InputError
from convoy.problem import ConvProblem, Epilogue, Knobs, parse_problem
from convoy.prune.patterns import nm_mask, parse_pattern
from convoy.target import Target
from tests.unit.engines.pruned_cases import mask_of
from tests.unit.engines.spills import assert_no_spills

H100 = Target("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132, 80 << 30, 50 << 20)
CPU = Target("cpu", "a CPU", "avx2", 2, 8 << 30, 1 << 20)
HALF = {"x_dtype": "fp16", "weight_dtype": "fp16", "y_dtype": "fp16", "numerics": "half"}
PLAIN = ConvProblem(32, 256, 14, 14, 256, 3, 3, 1, 1, layout="nhwc", **HALF)


def sparse(problem):
    """The problem with the mask that magnitude pruning makes."""
    weight = torch.rand(problem.weight_spec.shape, generator=torch.Generator().manual_seed(1))
    return problem.with_mask(mask_of(nm_mask(parse_pattern("2:4"), weight).numpy()))


SPARSE = sparse(PLAIN)


@pytest.fixture(autouse=True)
def _bindings_are_there(monkeypatch):
    """These tests do not ask whether cuda-bindings are installed here."""
    monkeypatch.setattr(hopper_support_checks, "absence", lambda: "")


def decoded(chunks, filters, k, c, taps, dtype):
    """The weight [k, c, taps] by the manual's words: for each value its swizzled place, for each four its word and nibble."""
    blocks = -(-c // CHANNELS)
    dense = torch.zeros(chunks.shape[0] * filters, blocks * CHANNELS, taps, dtype=dtype)
    for tile, tap, block in np.ndindex(chunks.shape[0], taps, blocks):
        chunk = chunks[tile, tap * blocks + block]
        values = chunk[: filters * 64].view(dtype)
        words = chunk[filters * 64 :].numpy().view("<u4")
        for row, four in np.ndindex(filters, 16):
            thread = row // 16 * 32 + row % 8 * 4 + four // 4  # of 128 for each 64 filters
            places = int(words[thread]) >> (16 * (row % 16 // 8) + 4 * (four % 4)) & 15
            assert places & 3 < places >> 2, "the manual wants places ascending"
            for i, place in enumerate((places & 3, places >> 2)):
                at = row * 64 + (four * 2 + i) * 2
                at ^= (at >> 7 & 3) << 4
                dense[tile * filters + row, block * CHANNELS + four * 4 + place, tap] += values[at // 2]
    return dense[:k, :c]


@pytest.mark.parametrize(
    ("shape", "filters", "cluster"), [((8, 8, 1, 1), 64, 1), ((72, 72, 1, 2), 64, 2), ((136, 16, 2, 1), 128, 1)]
)
def test_packed_weights_decode_to_what_they_were(shape, filters, cluster):
    rng = np.random.default_rng(5)
    order = rng.random((shape[0], -(-shape[1] // 4), 4, *shape[2:])).argsort(axis=2).argsort(axis=2)
    weight = np.where(order < rng.integers(0, 3, (1, order.shape[1], 1, 1, 1)), rng.integers(1, 99, order.shape), 0)
    weight = torch.from_numpy(weight.reshape(shape[0], -1, *shape[2:])[:, : shape[1]]).half()
    packing = Packing(weight.numpy() != 0, filters, cluster)
    assert packing.tiles % cluster == 0
    chunks = packing.pack(weight)
    assert chunks.shape == (packing.tiles, packing.iterations, filters * ROW_BYTES)
    found = decoded(chunks, filters, shape[0], shape[1], shape[2] * shape[3], torch.float16)
    assert torch.equal(found.view(weight.shape), weight)
    # New values under the same mask have the same metadata.
    again = packing.pack(weight * 3)
    assert torch.equal(again[..., filters * 64 :], chunks[..., filters * 64 :])
    assert not torch.equal(again, chunks)


def test_crowded_fours_are_counted():
    mask = np.zeros((2, 8, 1, 1), bool)
    mask[0, :2] = mask[1, 5:7] = True
    assert crowded(mask) == 0
    mask[0, 3] = mask[1, 4] = True
    assert crowded(mask) == 2


def crowd(problem):
    nonzero = np.ones(problem.weight_spec.shape, bool)
    nonzero[:, ::2] = False
    nonzero[3, 1:4, 0, 0] = True
    return problem.with_mask(mask_of(nonzero))


@pytest.mark.parametrize(
    ("problem", "target", "words"),
    [
        (SPARSE, CPU, "compute capability 9.0"),
        (SPARSE, replace(H100, arch="sm_80"), "compute capability 9.0"),
        (SPARSE, replace(H100, arch="sm_100"), "compute capability 9.0"),
        (PLAIN, H100, "without a mask"),
        (parse_problem(SPARSE.key), H100, "digest alone"),
        (SPARSE.with_layout("nchw"), H100, "layout nhwc"),
        (replace(SPARSE, n=0), H100, "batch"),
        (sparse(ConvProblem(1, 64, 8, 8, 64, 3, 3, layout="nhwc")), H100, "fp16 or bf16"),
        (sparse(replace(PLAIN, groups=2)), H100, "groups = 1"),
        (sparse(replace(PLAIN, c=60)), H100, "multiples of 8"),
        (sparse(replace(PLAIN, pad_h=150)), H100, "padding and filter under 128"),
        (replace(SPARSE, n=1 << 16), H100, "2^31"),
        (crowd(PLAIN), H100, "in 1 groups of four"),
    ],
)
def test_refusals_say_why(problem, target, words):
    support = ENGINE.accepts(problem, target)
    assert not support
    assert words in support.reason


def test_without_the_packages_it_says_so(monkeypatch):
    monkeypatch.setattr(hopper_support_checks, "absence", lambda: "needs cuda-core")
    assert ENGINE.accepts(SPARSE, H100).reason == "needs cuda-core"


@pytest.mark.parametrize(
    "change", [{}, {"n": 1, "h": 7, "w": 7}, {"k": 8}, {"n": 8, "c": 512, "k": 512, "h": 7, "w": 7}]
)
def test_spaces_are_finite_distinct_and_ordered_by_their_guess(change):
    problem = sparse(replace(PLAIN, **change))
    assert ENGINE.accepts(problem, H100)
    space = list(ENGINE.space(problem, H100))
    assert 0 < len(space) <= ENGINE.quick_settings // 2, "all of it is tried at effort quick"
    assert len(set(space)) == len(space)
    guesses = [ENGINE.estimate_us(problem, knobs, H100) for knobs in space]
    assert guesses == sorted(guesses)
    assert all(0 < guess < math.inf for guess in guesses)
    for knobs in space:
        form = Sparse24Tile.of(knobs)
        assert form.knobs == knobs
        assert form.shared_bytes <= SHARED_BYTES[form.blocks]
        assert form.stage_bytes % 1024 == 0
        assert form.cluster == 1 or form.split == 1
        steps, each = form.steps(problem), form.each(problem)
        assert (form.split - 1) * each < steps <= form.split * each, "every block of a split has work"


SMALL = sparse(ConvProblem(8, 512, 7, 7, 512, 3, 3, 1, 1, layout="nhwc", **HALF))


def test_a_layer_of_few_pixels_and_many_channels_is_split():
    found = [Sparse24Tile.of(knobs) for knobs in ENGINE.space(SMALL, H100)]
    assert found[0].split > 1
    assert {form.split for form in found} >= {1, 2, 4}
    assert {form.blocks for form in found} == {1, 2}
    assert {form.depth for form in found} >= {1, 3}  # a halo's taps one by one, or a row of them


def test_a_split_and_more_under_way_change_the_guess_as_they_should():
    def guess(**change):
        return estimate_us(SMALL, replace(Sparse24Tile(64, 56, 5, 2, 1), **change), 132)

    assert guess(split=4) < guess(split=2) < guess()
    assert guess(stages=4) > guess() > guess(stages=8), "too few stages wait for their bytes"
    assert guess(depth=2) < guess(), "as many stages of twice the bytes"
    # A large tile of a layer that fills the device as it is gains nothing.
    wide = Sparse24Tile(64, 96, 5, 2, 1)
    assert estimate_us(SPARSE, wide, 132) < estimate_us(SPARSE, replace(wide, split=2), 132)


def test_clusters_of_three_lie_in_pairs_unless_two_blocks_fit_beside_each_other():
    form = Sparse24Tile(64, 40, 5, 2, 1, split=3)
    assert form.units(SMALL) == 40
    assert form.resident(132) < 40 <= replace(form, blocks=2).resident(132)
    assert estimate_us(SMALL, form, 132) > 1.2 * estimate_us(SMALL, replace(form, blocks=2), 132)


def test_what_the_model_says_is_under_way_is_what_the_kernel_does():
    source = header_text("igemm/igemm_swap_ab_layout.cuh")
    assert "PENDING = PARTS * TILE_N >= 384 ? 1 : STAGES >= 6 ? 3 : STAGES >= 4 ? 2 : 1," in source
    small = Sparse24Tile(64, 96, 6, 1, 1)
    assert [replace(small, stages=stages).pending for stages in (3, 4, 5, 6, 12)] == [1, 2, 2, 3, 3]
    assert Sparse24Tile(128, 192, 4, 1, 1).pending == 1


def test_a_large_layer_is_expected_to_gain_on_dense_weights():
    dense = igemm.forms(PLAIN, 132)[0]
    assert estimate_us(SPARSE, forms(SPARSE, 132, Sparse24Tile)[0], 132) < 0.8 * igemm.estimate_us(PLAIN, dense, 132)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 96}, {"pixels": 20}, {"pixels": 264}, {"cluster": 3}, {"stages": 1}, {"depth": 3}, {"blocks": 3},
        {"split": 2}, {"cluster": 1, "split": 9}, {"blocks": 2, "consumers": 3}, {"blocks": 2, "pixels": 128},
        {"stages": 8, "pixels": 192}, {"stages": 13, "pixels": 8}, {"staged": 3}, {"halo": 16}, {"halo": -16},
        {"halo": 16, "cluster": 1, "depth": 1}, {"halo": 16, "cluster": 1, "depth": 2, "staged": 1},
        {"halo": 24, "cluster": 1, "depth": 1, "staged": 1},
        {"halo": 64, "cluster": 1, "depth": 1, "staged": 1, "stages": 12, "consumers": 3},
    ],
)  # fmt: skip
def test_knobs_that_make_no_kernel_are_refused(change):
    good = {"rows": 64, "pixels": 64, "stages": 4, "consumers": 2, "cluster": 4, "depth": 2, "split": 1, "blocks": 1}
    good |= {"staged": 0, "halo": 0}
    assert Sparse24Tile.of(Knobs.of(**good)).filters == 128
    with pytest.raises(InputError, match="knobs"):
        Sparse24Tile.of(Knobs.of(**(good | change)))


def test_a_halo_is_for_3x3_layers_of_stride_one_alone():
    form = Sparse24Tile(64, 64, 12, 1, 1, staged=1, halo=16)
    assert Sparse24Tile.of(form.knobs) == form
    assert form.fits(PLAIN)
    for change in ({"stride_h": 2}, {"r": 1, "pad_h": 0}, {"dilation_w": 2}, {"pad_w": 0}, {"w": 16}):
        problem = sparse(replace(PLAIN, **change))
        assert not form.fits(problem)
        with pytest.raises(InputError, match="halo"):
            ENGINE.build(problem, form.knobs, H100)
    assert form.tiles(replace(PLAIN, n=3)) == (12, 4), "four rows of fourteen, and two"


def test_all_taps_of_a_halo_follow_each_other():
    weight = torch.ones(8, 136, 3, 1, dtype=torch.float16)
    weight[:, ::2] = 0
    weight *= torch.arange(1, 4).reshape(1, 1, 3, 1)
    for taps_first, expected in ((False, [1, 1, 1, 2, 2, 2, 3, 3, 3]), (True, [1, 2, 3, 1, 2, 3, 1, 2, 3])):
        chunks = Packing(weight.numpy() != 0, 64, 1, taps_first=taps_first).pack(weight)
        assert [float(chunk[: 64 * 64].view(torch.float16).max()) for chunk in chunks[0]] == expected


def test_a_3x3_layer_is_offered_with_a_halo_and_results_both_ways():
    for problem in (SPARSE, SMALL):
        found = [Sparse24Tile.of(knobs) for knobs in ENGINE.space(problem, H100)]
        assert {form.halo > 0 for form in found} == {True, False}
        assert {form.staged for form in found} >= {0, 2}
        assert {form.depth for form in found if form.halo} == {1, 3}
        assert all(form.fits(problem) for form in found)


def test_products_name_every_register():
    made = wgmma_sparse_function(16, "bf16")
    assert "m64n16k32.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, %10, %11, 1, 1, 1, 0, 0;" in made


def nvrtc_or_skip():
    bindings = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        bindings.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("epilogue", [Epilogue(), Epilogue(bias=True, residual=True, activation="relu")])
@pytest.mark.parametrize("layer", [SPARSE, SMALL])
def test_the_first_guess_compiles_without_spills_or_serialised_products(layer, epilogue):
    nvrtc_or_skip()
    problem = replace(layer, epilogue=epilogue)
    executable = ENGINE.build(problem, ENGINE.space(problem, H100)[0], H100)
    threads = 128 * (executable.form.consumers + 1)
    registers = int(re.search(r"Used (\d+) registers", executable.log)[1])
    assert threads * registers * executable.form.blocks <= 65536, "the blocks have room beside each other"
    assert_no_spills(executable.log)
    assert "0 bytes stack frame" in executable.log
    assert "serialized" not in executable.log
    weight = torch.ones(problem.weight_spec.shape, dtype=torch.float16)
    with pytest.raises(InputError, match="weight"):
        executable.pack((weight,))
