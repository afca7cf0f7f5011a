"""Draw circles, squares and triangles into a folder of class folders, as data for `convoy train`.

python examples/draw_shapes.py shapes/
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path

from PIL import Image, ImageDraw

CLASSES = ("circle", "square", "triangle")
CORNERS = {"circle": 60, "square": 4, "triangle": 3}
"""Corners of the polygon that is drawn for each class."""


def drawn(name: str, pixels: int, numbers: random.Random) -> Image.Image:
    """One shape of a random colour, size, angle and place on a ground of another colour.

    Args:
        name: one of `CLASSES`.
        pixels: side of the square image.
        numbers: where the random numbers come from.
    """
    ground = tuple(numbers.randrange(0, 110) for _ in range(3))
    colour = tuple(numbers.randrange(146, 256) for _ in range(3))
    image = Image.new("RGB", (pixels, pixels), ground)
    radius = pixels * numbers.uniform(0.22, 0.36)
    x, y = (numbers.uniform(radius, pixels - radius) for _ in range(2))
    turn, corners = numbers.uniform(0, math.tau), CORNERS[name]
    angles = [turn + math.tau * index / corners for index in range(corners)]
    ImageDraw.Draw(image).polygon([(x + radius * math.cos(a), y + radius * math.sin(a)) for a in angles], fill=colour)
    return image


def draw(folder: Path, count: int = 64, pixels: int = 96, seed: int = 0) -> None:
    """Write `count` images of each class as PNG files: `folder/circle/000.png` and so on.

    Args:
        folder: made where it is not there; files of the same names are replaced.
        count: images of each class.
        pixels: side of an image.
        seed: the same seed gives the same images.
    """
    numbers = random.Random(seed)
    for name in CLASSES:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            drawn(name, pixels, numbers).save(folder / name / f"{index:03}.png")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Draw circles, squares and triangles as a folder of class folders.")
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("shapes"), help="made where it is not there (shapes)"
    )
    parser.add_argument("--count", type=int, default=64, help="images of each class (64)")
    parser.add_argument("--pixels", type=int, default=96, help="side of an image (96)")
    given = parser.parse_args()
    draw(given.folder, given.count, given.pixels)
    print(f"{given.count} images each of {', '.join(CLASSES)} in {given.folder}")


if __name__ == "__main__":
    main()
