"""Index expressions: equal to the arithmetic that they stand for at every point, simplified where a view changes nothing."""

import itertools
import math
import random

import pytest

from convoy.engines.fusion.index_math import Var, joined, number, taken_apart, variable


def points(sizes):
    """Values of variables named a, b, ..."""
    names = "abcdef"[: len(sizes)]
    return (dict(zip(names, point, strict=True)) for point in itertools.product(*map(range, sizes)))


def variables(sizes):
    """The variables."""
    return tuple(variable(Var(name, size)) for name, size in zip("abcdef", sizes, strict=False))


def views(draw, elements, rank):
    """Random sides with a product."""
    sides = []
    for _ in range(rank - 1):
        sides.append(draw.choice([d for d in range(1, elements + 1) if elements % d == 0]))
        elements //= sides[-1]
    return [*sides, elements]


@pytest.mark.parametrize("seed", range(40))
def test_views_and_transpositions_are_what_they_say(seed):
    draw = random.Random(seed)
    sizes = [draw.choice([1, 2, 3, 4, 5, 8]) for _ in range(3)]
    index = variables(sizes)
    shape = sizes
    wanted = {tuple(point.values()): tuple(point.values()) for point in points(sizes)}
    for _ in range(draw.randint(1, 4)):
        if draw.random() < 0.5:
            order = draw.sample(range(len(shape)), len(shape))
            index, shape = tuple(index[d] for d in order), [shape[d] for d in order]
            wanted = {point: tuple(at[d] for d in order) for point, at in wanted.items()}
        else:
            new = views(draw, math.prod(shape), draw.randint(1, 4))
            index, old, shape = taken_apart(joined(index, shape), new), shape, new
            wanted = {point: moved(at, old, new) for point, at in wanted.items()}
    for point in points(sizes):
        found = [place.value(point) for place in index]
        assert found == list(wanted[tuple(point.values())])
        assert all(place.low <= value <= place.high for place, value in zip(index, found, strict=True))


def moved(at, old, new):
    """Coordinates under other sides, by counting."""
    place = 0
    for coordinate, size in zip(at, old, strict=True):
        place = place * size + coordinate
    found = []
    for size in reversed(new):
        found.append(place % size)
        place //= size
    return tuple(reversed(found))


def test_a_position_taken_apart_and_joined_is_itself():
    position = variable(Var("i", 2 * 7 * 5 * 12))
    for sizes in ((2, 7, 5, 12), (14, 60), (2, 35, 3, 4)):
        assert joined(taken_apart(position, sizes), sizes) == position


def test_vectors_are_seen_through_views():
    vector = variable(Var("i", 100)) * 8 + variable(Var("lane", 8))
    rows, columns = taken_apart(vector, (25, 32))
    assert "lane" not in rows.names()
    assert columns.factor("lane") == 1
    odd, _ = taken_apart(vector, (80, 10))
    assert odd.factor("lane") is None


def test_bounds_and_parts():
    a, b = variables((4, 6))
    total = a * 6 + b + -2
    assert (total.low, total.high, total.factor("a"), total.factor("c")) == (-2, 21, 6, 0)
    assert total.substituted({"a": number(1)}).value({"b": 3}) == 7
    assert (a.sole_variable(), total.sole_variable(), number(0).sole_variable()) == (Var("a", 4), None, None)
    assert variable(Var("one", 1)) == number(0)
