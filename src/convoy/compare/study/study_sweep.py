"""The layers of a study: one size swept while the others stay, or the layers of a file. Sizes and names, nothing is measured."""

from __future__ import annotations

import csv
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from convoy.errors import InputError, unknown_name
from convoy.problem import ConvProblem, WeightMask

BASE: Final = ConvProblem(1, 128, 28, 28, 128, 3, 3, 1, 1)
"""Base of the sweeps: a layer of the middle of a ResNet, which every algorithm supports."""

SWEEPS: Final[dict[str, tuple[int, ...]]] = {
    "batch": (1, 2, 4, 8, 16, 32, 64),
    "channels": (8, 16, 32, 64, 128, 256, 512),
    "filters": (8, 16, 32, 64, 128, 256, 512),
    "size": (7, 14, 28, 56, 112),
    "kernel": (1, 3, 5, 7, 11),
    "stride": (1, 2, 4),
    "sparsity": (0, 50, 75, 90, 95),
}
"""Sizes that may be swept, and their values. `sparsity` is the percentage of zeros among the weights."""

SEED: Final = 0
"""Of the zeros' places: the same in every run, so that a second one finds its rows."""

CPU_BATCHES: Final = (1, 2, 4, 8, 16)
"""A CPU's time grows with the batch from the start; more images only take longer."""

LAYOUTS: Final = ("nchw", "nhwc")

COLUMNS: Final = (
    "n", "c", "h", "w", "k", "r", "s", "pad_h", "pad_w", "stride_h", "stride_w", "dilation_h", "dilation_w", "groups",
)  # fmt: skip
"""Columns that a file of layers must have, those of ConvProblem; others, such as `count`, are left alone."""

LARGEST_FILE: Final = 1 << 20
MOST_LAYERS: Final = 2000


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One layer of a study.

    Attributes:
        subject: its curve (`sweep:batch`), or the layer's name in its file (`alexnet:3`).
        axes: the swept size and its value; empty for a file's layer.
        problem: the layer in nchw; it is measured in every memory format.
    """

    subject: str
    axes: Mapping[str, int | float | str]
    problem: ConvProblem

    def problems(self) -> tuple[ConvProblem, ...]:
        """The layer in every memory format; one with a weight mask as a dense one too, for engines that do not look at zeros."""
        forms = (self.problem, self.problem.with_mask(None)) if self.problem.weight_mask else (self.problem,)
        return tuple(form.with_layout(layout) for form in forms for layout in LAYOUTS)


def sweep_points(names: Sequence[str], base: ConvProblem, device: str) -> list[SweepPoint]:
    """The points of some sweeps; impossible ones (a filter larger than the image) are left out.

    Args:
        names: of `SWEEPS`.
        base: the sizes that stay fixed.
        device: `cpu` or `cuda`.

    Raises:
        InputError: a name that is none, or twice.
    """
    for name in names:
        if name not in SWEEPS:
            raise unknown_name("--sweep", name, SWEEPS)
        if list(names).count(name) > 1:
            raise InputError("--sweep", name, "each name at most once")
    points: list[SweepPoint] = []
    for name in names:
        values = CPU_BATCHES if name == "batch" and device == "cpu" else SWEEPS[name]
        for value in values:
            try:
                points.append(SweepPoint(f"sweep:{name}", {name: value}, swept(base, name, value)))
            except InputError:
                continue
    return points


def swept(base: ConvProblem, name: str, value: int) -> ConvProblem:
    """The base with one size changed. A filter keeps the output's size by its padding, as in nets."""
    if name == "kernel":
        return replace(base, r=value, s=value, pad_h=value // 2, pad_w=value // 2)
    if name == "sparsity":
        return base.with_mask(random_mask(base.weight_spec.shape, value)) if value else base
    fields = {
        "batch": ("n",),
        "channels": ("c",),
        "filters": ("k",),
        "size": ("h", "w"),
        "stride": ("stride_h", "stride_w"),
    }
    return replace(base, **dict.fromkeys(fields[name], value))


def random_mask(shape: Sequence[int], percent: int) -> WeightMask:
    """A mask with so many percent of zeros, anywhere."""
    positions = math.prod(shape)
    kept = random.Random(SEED).sample(range(positions), positions - positions * percent // 100)
    bits = bytearray(-(-positions // 8))
    for position in kept:
        bits[position // 8] |= 0x80 >> position % 8
    k, c, r, s = shape
    return WeightMask((k, c, r, s), bytes(bits))


_PAIR = re.compile(r"([a-z_]{1,10})=(\d{1,6})")


def parse_base(text: str, base: ConvProblem = BASE) -> ConvProblem:
    """The base with sizes such as `c=64,h=56,w=56` changed; raises InputError for other text and for sizes that do not fit."""
    changes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _PAIR.fullmatch(part)
        if match is None or match[1] not in COLUMNS:
            raise InputError("--base", part, "sizes such as c=64,h=56,w=56; names are " + ", ".join(COLUMNS))
        changes[match[1]] = int(match[2])
    try:
        return replace(base, **changes)
    except InputError as error:
        raise InputError(
            "--base", text, f"sizes of a convolution; {error.argument}: {error.expected}", error.todo
        ) from None


def read_layers(path: Path, like: ConvProblem = BASE) -> list[SweepPoint]:
    """The layers of a CSV file with the columns of ConvProblem, as those of bench/layers; `count` and others are left alone.

    Args:
        path: the file.
        like: where dtype, numerics and direction come from.

    Raises:
        InputError: the file cannot be read, lacks a column, or a line holds no layer; the line is named.
    """
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise InputError("--layers", str(path), f"a file of at most {LARGEST_FILE >> 10} KiB")
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise InputError("--layers", str(path), "a CSV file with the columns " + ", ".join(COLUMNS))
            points = [
                SweepPoint(f"{path.stem}:{number}", {}, _layer(line, like, f"{path}:{number}"))
                for number, line in enumerate(reader, start=2)
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError("--layers", str(path), "a CSV file of layers", f"It says: {error}.") from None
    if not 0 < len(points) <= MOST_LAYERS:
        raise InputError("--layers", str(path), f"a file of 1 to {MOST_LAYERS} layers")
    return points


def _layer(line: Mapping[str, str | None], like: ConvProblem, where: str) -> ConvProblem:
    sizes: dict[str, int] = {}
    for name in COLUMNS:
        text = line[name] or ""
        if not re.fullmatch(r"\d{1,9}", text):
            raise InputError(f"{where}, {name}", text, "an integer")
        sizes[name] = int(text)
    try:
        return replace(like, **sizes)
    except InputError as error:
        raise InputError(where, dict(line), "a layer", f"It says: {error}") from None
