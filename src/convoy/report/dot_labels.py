"""Numbers beside dots: which dots share one, and where it stands so that it covers no dot and no other number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

Point = tuple[float, float]

NEAR: Final = 0.03
"""Decades in each direction within which dots count as one."""

DOT: Final = 6
"""Pixels from a dot's middle to where a number may begin."""

HALF: Final = 6
"""Half the height of a number, in pixels."""

MIDDLE: Final = 4
"""Pixels from the middle of a number down to its baseline."""

CHARACTER: Final = 8
"""Pixels of a digit."""

_ANGLES: Final = tuple(
    math.radians(angle) for angle in (-45, 45, 0, 180, -90, 90, -135, 135, -22, 22, 158, -158, -68, 68, -112, 112)
)
_DISTANCES: Final = (13, 18, 25, 34, 46, 60, 80, 105, 135)


def numbered(points: Sequence[Point]) -> list[list[int]]:
    """Indices of the points, grouped: a point joins the first group whose first point is near in both directions."""
    groups: list[list[int]] = []
    for index, (x, y) in enumerate(points):
        for group in groups:
            left, low = points[group[0]]
            if abs(x - left) < NEAR and abs(y - low) < NEAR:
                group.append(index)
                break
        else:
            groups.append([index])
    return groups


def lead(dot: Point, spot: Point) -> tuple[Point, Point] | None:
    """Both ends of the line from a dot to its number; None where the number stands beside its dot."""
    distance = math.dist(dot, spot)
    if distance <= _DISTANCES[1]:
        return None
    step = ((spot[0] - dot[0]) / distance, (spot[1] - dot[1]) / distance)
    stop = distance - HALF - 2
    return (dot[0] + step[0] * DOT, dot[1] + step[1] * DOT), (dot[0] + step[0] * stop, dot[1] + step[1] * stop)


def place(
    numbers: Mapping[str, Point], dots: Sequence[Point], box: tuple[float, float, float, float]
) -> dict[str, Point]:
    """The middle of each number: the nearest free spot around its dot.

    Args:
        numbers: each with its dot's middle.
        dots: all dots, which no number may cover.
        box: left, top, right and bottom side of the area.
    """
    taken: list[tuple[float, float, float]] = []
    found: dict[str, Point] = {}
    for number, (x, y) in numbers.items():
        wide = CHARACTER * len(number) / 2
        spots = [(x + d * math.cos(a), y + d * math.sin(a)) for d in _DISTANCES for a in _ANGLES]
        free = (spot for spot in spots if _is_free(spot, wide, taken, dots, box))
        left, top = next(free, spots[0])
        taken.append((left, top, wide))
        found[number] = (left, top)
    return found


def _is_free(
    spot: Point,
    wide: float,
    taken: Sequence[tuple[float, float, float]],
    dots: Sequence[Point],
    box: tuple[float, float, float, float],
) -> bool:
    x, y = spot
    if not (box[0] <= x - wide and x + wide <= box[2] and box[1] <= y - HALF and y + HALF <= box[3]):
        return False
    if any(abs(x - left) < wide + other and abs(y - top) < 2 * HALF for left, top, other in taken):
        return False
    return not any(abs(x - left) < wide + DOT and abs(y - top) < HALF + DOT for left, top in dots)
