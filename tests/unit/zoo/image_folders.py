"""A folder of class folders as users have them: with a damaged file, grey, RGBA and turned images, and a name in Japanese."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"circle": (230, 20, 20), "square": (20, 230, 20), "triangle": (20, 20, 230)}
"""Of each class: a net of two layers learns them in a few steps."""

ORIENTATION = 0x0112
"""EXIF's tag; 6: the camera was turned, the image is to be rotated by 90 degrees clockwise."""


def picture(name: str, seed: int, size: tuple[int, int] = (20, 20)) -> Image.Image:
    """A noisy image in the colour of a class; size is (width, height)."""
    noise = np.random.default_rng(seed).integers(-20, 20, (size[1], size[0], 3))
    return Image.fromarray((np.array(COLOURS[name]) + noise).clip(0, 255).astype(np.uint8))


def draw_folder(folder: Path, count: int = 20) -> Path:
    """`count` images of each class, all readable."""
    for name in COLOURS:
        (folder / name).mkdir(parents=True)
        for index in range(count):
            picture(name, index).save(folder / name / f"{index:02}.png")
    return folder


def add_odd_files(folder: Path) -> tuple[Path, Path]:
    """Files that work (grey, RGBA, 16 bits, turned, Japanese name), and two that cannot be read, which are returned."""
    grey = np.random.default_rng(0).integers(0, 65536, (20, 20)).astype(np.uint16)
    Image.fromarray(grey).save(folder / "circle" / "x16.png")
    picture("circle", 1).convert("L").save(folder / "circle" / "grey.png")
    picture("square", 1).convert("RGBA").save(folder / "square" / "rgba.png")
    picture("square", 2).save(folder / "square" / "四角.png")
    turned = Image.Exif()
    turned[ORIENTATION] = 6
    picture("triangle", 1, (20, 30)).save(folder / "triangle" / "turned.jpg", exif=turned)
    damaged, text = folder / "circle" / "damaged.png", folder / "triangle" / "text.jpg"
    damaged.write_bytes((folder / "circle" / "00.png").read_bytes()[:150])
    text.write_text("no image", encoding="utf-8")
    return damaged, text
