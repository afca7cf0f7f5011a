"""WeightMask: counts, text, digest; and what a problem does with one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from convoy.errors import InputError
from convoy.problem import ConvProblem, WeightMask, parse_problem

MASK = WeightMask((2, 3, 1, 2), bytes([0b10110000, 0b00010000]))
PROBLEM = ConvProblem(1, 3, 5, 6, 2, 1, 2)


def test_counts() -> None:
    assert (MASK.positions, MASK.nonzeros, MASK.sparsity) == (12, 4, pytest.approx(2 / 3))


def test_texts_round_trip_and_digests_tell_masks_apart() -> None:
    rng = random.Random(3)
    seen: dict[str, WeightMask] = {}
    for _ in range(200):
        k, c, r, s = (rng.randint(1, 4) for _ in range(4))
        positions = k * c * r * s
        spare = -positions % 8
        value = rng.getrandbits(positions) << spare
        mask = WeightMask((k, c, r, s), value.to_bytes((positions + 7) // 8, "big"))
        assert WeightMask.parse(mask.text) == mask
        assert mask.nonzeros == value.bit_count()
        assert seen.setdefault(mask.digest, mask) == mask


def test_equal_bits_of_another_shape_are_another_mask() -> None:
    assert WeightMask((3, 2, 1, 2), MASK.bits).digest != MASK.digest


@pytest.mark.parametrize(
    "text",
    [
        "",
        "mask:2x3x1x2",
        "mask:2x3x1x2:",
        "mask:2x3x1x2:sBA",
        "mask:2x3x1x2:sB==A",
        "mask:2x3x1x2:sBAA",
        "mask:2x3x1:sBA=",
        "mask:0x3x1x2:",
        "mask:2x3x1x2:sBE=",
        "mask:2x3x1x2:sBA=\n",
        "mask:٢x3x1x2:sBA=",
        "mask:999999999x999999999x1x1:sBA=",
    ],
)
def test_hostile_texts_are_refused(text: str) -> None:
    assert WeightMask.parse("mask:2x3x1x2:sBA=") == MASK
    with pytest.raises(InputError):
        WeightMask.parse(text)


def test_a_problem_takes_its_masks_digest_and_goes_to_another_process_with_its_text() -> None:
    masked = PROBLEM.with_mask(MASK)
    assert masked.weight_mask == MASK.digest
    assert masked.key == f"{PROBLEM.key}:mask={MASK.digest}"
    assert masked != PROBLEM
    known = parse_problem(masked.key)
    assert known == masked
    assert isinstance(known, ConvProblem)
    assert known.mask is None
    there = parse_problem(masked.key, MASK.text)
    assert isinstance(there, ConvProblem)
    assert (there, there.mask) == (masked, MASK)
    assert replace(masked, n=4).mask == MASK
    assert masked.with_mask(None) == PROBLEM


def test_a_mask_of_another_shape_or_digest_is_refused() -> None:
    with pytest.raises(InputError, match="shape"):
        replace(PROBLEM, k=3).with_mask(MASK)
    with pytest.raises(InputError, match="weight_mask"):
        parse_problem(f"{PROBLEM.key}:mask={'0' * 16}", MASK.text)
