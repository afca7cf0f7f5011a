"""Patterns: their words, which weights go together, and the exact counts of N:M."""

from __future__ import annotations

import pytest
import torch

from convoy.errors import InputError
from convoy.prune.patterns import (
    Pattern,
    group_ids,
    group_scores,
    misfit,
    nm_mask,
    parse_pattern,
    parse_sparsity,
)


def weight(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("text", ["unstructured", "channel", "2:4", "1:4", "4:8", "block:1x8", "block:16x1"])
def test_words_round_trip(text: str) -> None:
    assert str(parse_pattern(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "random",
        "4:4",
        "0:4",
        "5:4",
        "2:",
        "block",
        "block:0x8",
        "block:1x",
        "block:1x8x2",
        "2:4 ",
        "٢:4",
        "Channel",
    ],
)
def test_unknown_words_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="pattern: got"):
        parse_pattern(text)


@pytest.mark.parametrize("sparsity", [None, 0.0, 1.0, -0.1, 1.5, float("nan"), float("inf")])
def test_a_share_of_zeros_lies_between_0_and_1(sparsity: float | None) -> None:
    with pytest.raises(InputError, match="sparsity: got"):
        parse_sparsity(Pattern("unstructured"), sparsity)


def test_n_of_m_says_its_sparsity_itself() -> None:
    two_of_four = parse_pattern("2:4")
    assert parse_sparsity(two_of_four, None) == parse_sparsity(two_of_four, 0.5) == 0.5
    assert parse_sparsity(parse_pattern("1:4"), None) == 0.75
    with pytest.raises(InputError, match=r"0.5 with pattern 2:4. Leave it out"):
        parse_sparsity(two_of_four, 0.9)


@pytest.mark.parametrize(("text", "shape"), [("2:4", (5, 8, 3, 3)), ("1:4", (3, 4, 1, 2)), ("3:8", (2, 16, 1, 1))])
def test_of_every_m_input_channels_the_n_largest_stay(text: str, shape: tuple[int, ...]) -> None:
    pattern, w = parse_pattern(text), weight(*shape)
    mask = nm_mask(pattern, w)
    for k in range(shape[0]):
        for c in range(0, shape[1], pattern.second):
            for r in range(shape[2]):
                for s in range(shape[3]):
                    window, kept = w[k, c : c + pattern.second, r, s].abs(), mask[k, c : c + pattern.second, r, s]
                    assert int(kept.sum()) == pattern.first
                    assert float(window[kept].min()) > float(window[~kept].max())


def test_of_equals_the_first_stay() -> None:
    assert nm_mask(parse_pattern("2:4"), torch.ones(1, 8, 1, 1)).flatten().tolist() == [True, True, False, False] * 2


@pytest.mark.parametrize("channels", [3, 1, 6])
def test_channels_that_are_no_multiple_of_m_do_not_fit(channels: int) -> None:
    reason = misfit(parse_pattern("2:4"), weight(8, channels, 3, 3))
    assert reason == f"its {channels} input channels a group are no multiple of 4"
    assert not misfit(parse_pattern("2:4"), weight(8, 12, 3, 3))
    assert not misfit(parse_pattern("block:7x5"), weight(8, channels, 3, 3))


def test_blocks_of_the_matrix_k_by_crs() -> None:
    ids = group_ids(parse_pattern("block:2x4"), weight(4, 2, 2, 2), 1).view(4, 8)
    assert ids.tolist() == [[0] * 4 + [1] * 4] * 2 + [[2] * 4 + [3] * 4] * 2


def test_blocks_at_the_edges_are_smaller() -> None:
    ids = group_ids(parse_pattern("block:2x4"), weight(3, 1, 2, 3), 1)
    _, sizes = group_scores(weight(3, 1, 2, 3), ids)
    assert sizes.tolist() == [8, 4, 4, 2]


def test_blocks_begin_anew_with_each_group_of_the_convolution() -> None:
    ids = group_ids(parse_pattern("block:4x2"), weight(6, 2, 1, 1), 2).view(6, 2)
    assert ids[:3].unique().tolist() == [0]
    assert ids[3:].unique().tolist() == [1]


def test_ids_have_no_gaps() -> None:
    for text in ("unstructured", "channel", "block:3x5", "block:1x8", "block:64x64"):
        ids = group_ids(parse_pattern(text), weight(8, 3, 3, 3), 4)
        assert ids.unique().tolist() == list(range(int(ids.max()) + 1))
        assert ids.shape == (8, 3, 3, 3)


def test_scores_are_means_so_that_small_blocks_compete() -> None:
    w = torch.tensor([[3.0, 3.0, 3.0, 3.0, 4.0]]).view(1, 5, 1, 1)
    scores, sizes = group_scores(w, group_ids(parse_pattern("block:1x4"), w, 1))
    assert scores.tolist() == [3.0, 4.0]
    assert sizes.tolist() == [4, 1]
