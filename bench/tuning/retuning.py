"""Does tuning again choose the same, and how long does it take? Question `retuning`: `fraction_of_best` and seconds.

A net is tuned twice from nothing. Of every layer of the second plan the winners of both tunings are compared by the times that
they have in either, or in both: a figure is the shorter time over the longer. It is the same choice, or tied with it, where the
two differ by less than both spreads or `TIED`. Where neither tuning tried both, the layer counts as not the same, with a figure
of 0. The seconds are those of capture and search: from nothing, with the compilers' caches empty too, once more from what that
left in the database, and again with no rows but with what was compiled.

    python bench/tuning/retuning.py [--nets resnet50] [--batch 1] [--dtype fp16]
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

import convoy
from convoy.measurement import detect_target
from convoy.measurement.protocol import protocol_for
from convoy.perfdb import Database, Measurement
from convoy.pipeline.measure_net import measure
from convoy.pipeline.net import capture_net
from convoy.pipeline.select import make_plan, select
from convoy.target import Target
from convoy.zoo import input_size, load_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.shared.command_line import run_main
from bench.shared.record import Recorder

TIED = 0.03
"""Relative difference of two times that another run may turn round: medians of 11 samples of 200 us on a GPU."""

CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "XDG_CACHE_HOME": "cache"}
"""Where Triton, Inductor and Convoy keep what they compiled, and folders for them."""

MOMENTS = {
    "tuning_s": "from nothing",
    "retuning_s": "from nothing but compiled kernels",
    "start_s": "from the database",
}
"""What the seconds of three tunings are called, and where they began."""

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def best_of(rows: Sequence[Measurement]) -> Measurement | None:
    """The fastest that is right."""
    return min((row for row in rows if row.ok), key=lambda row: row.median_us, default=None)


@dataclass(frozen=True, slots=True)
class Agreement:
    """The winners of two tunings of one layer: the shorter time over the longer, whether they are the same or tied, and who.

    `pairs` has both winners' rows of each tuning that measured both.
    """

    fraction: float
    tied: bool
    winners: tuple[Measurement, Measurement]
    pairs: Sequence[tuple[Measurement, Measurement]] = ()

    @property
    def note(self) -> str:
        """For the row: what won in each, and at what times where both were measured, where they are not one config."""
        before, now = self.winners
        if before.config == now.config:
            return "tied=true same"
        tied = "tied=true" if self.tied else "tied=false"
        times = ", ".join(f"{one.median_us:.4g} and {other.median_us:.4g} us" for one, other in self.pairs)
        return f"{tied} {before.config}, then {now.config}: {times or 'neither tuning has both'}"


def agreement(first: Sequence[Measurement], second: Sequence[Measurement]) -> Agreement | None:
    """Compare what won by all times that two tunings measured of both.

    None where one of them found nothing; a fraction of 0 where neither tried both winners.
    """
    before, now = best_of(first), best_of(second)
    if before is None or now is None:
        return None
    if before.config == now.config:
        return Agreement(1.0, True, (before, now))
    pairs: list[tuple[Measurement, Measurement]] = []
    for rows in (first, second):
        right = {row.config: row for row in rows if row.ok}
        if before.config in right and now.config in right:
            pairs.append((right[before.config], right[now.config]))
    if not pairs:
        return Agreement(0.0, False, (before, now))
    times = [sum(pair[side].median_us for pair in pairs) for side in (0, 1)]
    spread = sum(a.spread_us + b.spread_us for a, b in pairs)
    tied = abs(times[0] - times[1]) <= max(TIED * min(times), spread)
    return Agreement(min(times) / max(times), tied, (before, now), pairs)


@dataclass(frozen=True, slots=True)
class Tuned:
    """A net's rows by problem key, the problems that its plan runs, and the seconds that capture and search took."""

    rows: dict[str, list[Measurement]]
    chosen: frozenset[str]
    seconds: float


def tune(net: str, batch: int, dtype: str, target: Target, database: Database) -> Tuned:
    """Tune with what a database knows."""
    model = load_model(net).eval().cuda().to(DTYPES[dtype])
    size = input_size(net)
    side = size if isinstance(size, int) else size[-1]
    x = torch.randn(batch, 3, side, side, device="cuda", dtype=DTYPES[dtype])
    settings = convoy.Settings()
    begun = time.perf_counter()
    captured = capture_net(net, model, (x,), {}, settings, target)
    found = measure(captured, settings, database, lambda *_: None)
    seconds = time.perf_counter() - begun
    plan = make_plan(captured, select(captured, found, settings), settings, [])
    return Tuned(found.rows, frozenset(step.problem for step in plan.steps), seconds)


@contextmanager
def empty_caches() -> Iterator[None]:
    """Nothing is compiled yet: for this process and those that it starts."""
    before = {name: os.environ.get(name) for name in CACHES}
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update({name: str(Path(folder) / own) for name, own in CACHES.items()})
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def tune_thrice(net: str, batch: int, dtype: str, target: Target) -> tuple[list[Tuned], list[float]]:
    """Two tunings from nothing, and their seconds with those of a third from the first one's database."""
    with Database.memory() as empty:
        first = tune(net, batch, dtype, target, empty)
        known = tune(net, batch, dtype, target, empty)
    with Database.memory() as empty:
        second = tune(net, batch, dtype, target, empty)
    return [first, second], [first.seconds, second.seconds, known.seconds]


def main() -> None:
    """Tune, compare, print, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default="resnet50")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="fp16", choices=sorted(DTYPES))
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    target = detect_target("cuda")
    protocol = protocol_for(convoy.Effort.QUICK, "cuda").id
    versions = " ".join(f"{name}={version}" for name, version in target.versions)
    recorder = Recorder(
        "retuning",
        device=target.name,
        versions=versions,
        protocol=f"{protocol}, tuned from nothing",
        folder=options.folder,
    )
    seen: set[str] = set()
    for net in options.nets.split(","):
        with empty_caches():
            (first, second), seconds = tune_thrice(net, options.batch, options.dtype, target)
        for value, (metric, source) in zip(seconds, MOMENTS.items(), strict=True):
            recorder.add(
                subject=net, batch=options.batch, dtype=options.dtype, provider="convoy", metric=metric, unit="s",
                p50=value, note=source,
            )  # fmt: skip
        tied: list[bool] = []
        for problem, rows in second.rows.items():
            layer = problem in second.chosen and problem.startswith(("conv:", "linear:")) and problem not in seen
            found = agreement(first.rows[problem], rows) if layer else None
            if found is not None:
                seen.add(problem)
                tied.append(found.tied)
                recorder.add(
                    subject=problem, batch=options.batch, dtype=options.dtype, provider="convoy",
                    metric="fraction_of_best", unit="1", p50=found.fraction, note=f"{net} {found.note}",
                )  # fmt: skip
        share = sum(tied) / len(tied) if tied else math.nan
        words = f"tuned in {seconds[0]:.0f} and {seconds[1]:.0f} s, from the database in {seconds[2]:.1f} s"
        print(f"{net} b{options.batch} {options.dtype}: {words}; same or tied in {share:.0%} of {len(tied)} layers")
    print(recorder.write())


if __name__ == "__main__":
    run_main(main)
