"""How far is the cost model of `cuda.bottleneck` from measured times? Prints the tables of docs/kernels/chains.md.

Reads the rows that `bench/chains/chains.py` wrote, of single settings (their notes begin with "quick"). `--fit` looks for better
constants of `bottleneck_cost.py` by least squares of the logarithms, from those that are there, and prints them.

    python bench/chains/fit_cost.py [--fit] [FILE]
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from convoy.engines.hopper.chains import bottleneck_cost
from convoy.engines.hopper.chains.bottleneck_tile_config import Bottleneck, BottleneckTile
from convoy.problem import Knobs

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.chains.blocks import FLOPS_NS, RESNET50, Block
from bench.layers.layer_floor import BYTES_PER_US
from bench.shared.command_line import run_main

RESULTS = Path(__file__).parents[1] / "results" / "chains-nvidia-h200.csv"
UNITS = 132
FITTED = (
    "_PIXELS_NS", "_PIXELS_BYTES_NS", "_WEIGHTS_NS", "_CHUNK_NS", "_OUT_BLOCK_NS", "_WIDE_AHEAD_NS", "_MEETING_NS",
    "_START_NS", "_CLUSTER",
)  # fmt: skip


@dataclass(frozen=True)
class Timed:
    """A measured setting."""

    block: Bottleneck
    tile: BottleneckTile
    us: float

    @property
    def estimate_us(self) -> float:
        """The cost model's."""
        return bottleneck_cost.estimate_us(self.block, self.tile, UNITS)

    @property
    def error(self) -> float:
        """The logarithm of estimate over time."""
        return math.log(self.estimate_us / self.us)


@dataclass(frozen=True)
class Results:
    """What was measured of a block on a device."""

    block: Block
    device: str
    settings: Sequence[Timed]
    fused_us: float | None
    layers_us: float | None

    @property
    def floors_us(self) -> tuple[float, float]:
        """By layers, and as one kernel, at the device's rates."""
        bytes_ns = next(rate for name, rate in BYTES_PER_US.items() if name in self.device) / 1000
        chain = self.block.chain
        layers = sum(max(layer.bytes / bytes_ns, layer.product_ns) for layer in chain.layers)
        return layers / 1000, max(chain.bytes / bytes_ns, self.block.sizes.flops / FLOPS_NS) / 1000


def read(path: Path) -> list[Results]:
    """The blocks of a file, in its order."""
    with path.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    found: list[Results] = []
    for name in dict.fromkeys(row["subject"] for row in rows):
        own = [row for row in rows if row["subject"] == name]
        made = (make(int(own[0]["batch"]), own[0]["dtype"]) for make in RESNET50)
        block = next(block for block in made if block.name == name)
        times = {row["provider"]: float(row["p50"]) for row in own if not row["note"].startswith("quick")}
        settings = [
            Timed(block.sizes, BottleneckTile.of(Knobs.parse(row["note"].rsplit(" us ", 1)[1])), float(row["p50"]))
            for row in own
            if row["note"].startswith("quick")
        ]
        found.append(
            Results(block, own[0]["device"], settings, times.get("convoy.cuda.bottleneck"), times.get("convoy"))
        )
    return found


def times_table(results: Sequence[Results]) -> str:
    """The fastest setting against the layers with the fastest of their own kernels, in Markdown."""
    heads = "block", "floor by layers, µs", "as one kernel", "time", "estimate", "time by layers", "gain"
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for one in results:
        layers_us, block_us = one.floors_us
        cells = [one.block.name, f"{layers_us:.1f}", f"{block_us:.1f}"]
        if one.fused_us is None:
            cells += ["no tile fits", "", f"{one.layers_us:.1f}", ""]
        else:
            best = min(one.settings, key=lambda timed: timed.us)
            gain = (one.layers_us or math.nan) / one.fused_us
            cells += [f"{one.fused_us:.1f}", f"{best.estimate_us:.1f}", f"{one.layers_us:.1f}", f"{gain:.2f}x"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def errors_table(results: Sequence[Results], first: int = 4) -> str:
    """Of each block: how far the estimates are off, and what the first settings by estimate lose against the fastest."""
    lines = ["| block | settings | mean error | largest | fastest's place | first four lose |", "|---|" + "---|" * 5]
    for one in (one for one in results if one.settings):
        ordered = sorted(one.settings, key=lambda timed: timed.estimate_us)
        best = min(ordered, key=lambda timed: timed.us)
        lost = min(timed.us for timed in ordered[:first]) / best.us - 1
        errors = [abs(math.expm1(timed.error)) for timed in ordered]
        cells = [one.block.name, str(len(errors)), f"{statistics.mean(errors):.1%}", f"{max(errors):.1%}"]
        lines.append("| " + " | ".join([*cells, str(ordered.index(best) + 1), f"{lost:.1%}"]) + " |")
    return "\n".join(lines)


def rms_error(results: Sequence[Results]) -> float:
    """The root mean square of the logarithms of estimate over time."""
    return math.sqrt(statistics.mean(timed.error**2 for one in results for timed in one.settings))


def fit(results: Sequence[Results]) -> dict[str, float]:
    """Constants with smaller errors; the model keeps its own."""
    import numpy as np
    from scipy.optimize import least_squares

    settings = [timed for one in results for timed in one.settings]
    before = {name: getattr(bottleneck_cost, name) for name in FITTED}

    def errors(logs: Sequence[float]) -> list[float]:
        for name, value in zip(FITTED, logs, strict=True):
            setattr(bottleneck_cost, name, math.exp(value))
        return [timed.error for timed in settings]

    begin = np.log(list(before.values()))
    try:
        found = least_squares(errors, begin, loss="soft_l1", f_scale=0.1, bounds=(begin - 1.5, begin + 1.5))
    finally:
        for name, value in before.items():
            setattr(bottleneck_cost, name, value)
    return {name: math.exp(value) for name, value in zip(FITTED, found.x, strict=True)}


def main() -> None:
    """Print the tables, or better constants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=RESULTS)
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    results = read(options.file)
    if options.fit:
        for name, value in fit(results).items():
            print(f"{name} = {value:.4g}")
        return
    print(f"{times_table(results)}\n\n{errors_table(results)}\n\nroot mean square: {rms_error(results):.1%}")


if __name__ == "__main__":
    run_main(main)
