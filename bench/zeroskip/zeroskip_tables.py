"""Tables of engines that skip zeros, from the rows of zeroskip.py and of the other scripts of this folder."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.pruned.pruned_tables import table
from bench.shared.rows import Row
from bench.zeroskip.zeroskip_slopes import VGG19, VGG19_ZEROS

Times = dict[str, float]
MARKS = ("looks", "is told", "dense", "dense is told", "dense and marks")
"""What bench/zeroskip/zeroskip_marks.py times, in its notes' words."""


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """One layer on one kind of input.

    Attributes:
        layer: c, k and side, or what the problem's key says where it is none of a 3x3 layer.
        batch: images.
        dtype: of x.
        pooled: whether a pooling follows.
        kind: how zeros lie.
        zeros: percent of them.
    """

    layer: tuple[int, int, int]
    batch: int
    dtype: str
    pooled: bool
    kind: str
    zeros: float


def case_of(row: Row) -> Case | None:
    """The case of a row of kernel times; None for any other row."""
    sizes = re.match(r"conv:fprop:n\d+c(\d+)h(\d+)w\d+k(\d+)r3s3:", row["subject"])
    note = re.match(r"zeros ([\d.]+) % (random|channels)", row["note"])
    if row["metric"] != "kernel_us" or sizes is None or note is None or row["numerics"] == "as_torch":
        return None
    c, side, k = map(int, sizes.groups())
    pooled = "2x2s2x2" in row["subject"]
    return Case((c, k, side), int(row["batch"]), row["dtype"], pooled, note[2], float(note[1]))


def times_of(rows: Sequence[Row]) -> dict[Case, Times]:
    """Microseconds by provider, of each case."""
    found: dict[Case, Times] = {}
    for row in rows:
        case = case_of(row)
        if case is not None and row["ok"] == "true":
            found.setdefault(case, {})[row["provider"]] = float(row["p50"])
    return found


def quotients(found: Sequence[Times], ours: Sequence[str], peer: str) -> list[float]:
    """How many times as fast the best of ours is as a peer, where both were timed."""
    pairs = [(min(t[name] for name in ours if name in t), t[peer]) for t in found if peer in t and {*ours} & {*t}]
    return [theirs / mine for mine, theirs in pairs]


def gain_line(words: str, found: Sequence[Times], ours: Sequence[str], peer: str) -> Iterator[list[str]]:
    """A table's line, where there is anything to compare."""
    ratios = quotients(found, ours, peer)
    if ratios:
        figures = (statistics.fmean(ratios), max(ratios), min(ratios))
        yield [words, ", ".join(ours), peer, str(len(ratios)), *(f"{value:.2f}x" for value in figures)]


def gains(found: Mapping[Case, Times]) -> Iterator[list[str]]:
    """The quotients that the questions of bench/zeroskip/zeroskip.py are about."""

    def chosen(pooled: bool, batch: int, dtype: str) -> list[Times]:
        layers = zip(VGG19, VGG19_ZEROS, strict=True)  # two are alike
        cases = [Case(layer, batch, dtype, pooled, "random", zeros) for layer, zeros in layers]
        # Of the convolutions two are alike; a pooling follows one of them.
        there = [found[case] for case in (dict.fromkeys(cases) if pooled else cases) if case in found]
        # A layer of another question may be one of the net's: that says nothing of the net.
        return there if pooled or len(there) == len(cases) else []

    layers = "VGG-19, strict fp32, batch 1"
    yield from gain_line(f"{layers}: the convolutions", chosen(False, 1, "fp32"), ["convoy.dense"], "cudnn.best")
    yield from gain_line(
        f"{layers}: the convolutions, zeros skipped", chosen(False, 1, "fp32"), ["convoy.zeroskip.gather"], "cudnn.best"
    )
    for dtype, batch in (("fp32", 1), ("fp16", 1), ("fp16", 32)):
        words = f"VGG-19, {'strict fp32' if dtype == 'fp32' else dtype}, batch {batch}: convolution + pooling in one"
        for peer in ("cudnn.best+pool", "convoy.dense+pool", "convoy.dense+convoy.pool"):
            yield from gain_line(words, chosen(True, batch, dtype), ["convoy.fused"], peer)
    for case, times in sorted(found.items()):
        if case.kind == "channels" and case.zeros in (75, 95) and not case.pooled:
            c, k, side = case.layer
            words = f"{c}→{k} @{side}, strict fp32, batch {case.batch}: {case.zeros:g} % dead channels"
            yield from gain_line(words, [times], ["convoy.zeroskip.channels"], "convoy.dense")


def falls(rows: Sequence[Row]) -> Iterator[list[str]]:
    """How an engine's time goes with zeros: a line a layer, kind of zeros and engine."""
    found: dict[tuple[str, ...], Times] = {}
    for row in rows:
        if row["metric"] in ("correlation", "slope_us", "dense_cost", "share_of_dense"):
            sizes = re.match(r"conv:fprop:n(\d+)c(\d+)h(\d+)w\d+k(\d+)r(\d+)s(\d+):", row["subject"])
            assert sizes is not None
            n, c, side, k, r, s = sizes.groups()
            key = (f"{c}→{k} {r}x{s} @{side}, batch {n}", row["note"].split()[3], row["provider"])
            found.setdefault(key, {})[row["metric"]] = float(row["p50"])
    for key, figures in found.items():
        cells = [f"{figures['correlation']:.2f}", f"{figures['slope_us']:.3f}"]
        cells += [f"{figures[m]:.2f}x" if m in figures else "" for m in ("dense_cost", "share_of_dense")]
        yield [*key, *cells]


def replica(rows: Sequence[Row]) -> Iterator[list[str]]:
    """The paper's workload: means over its sixteen planes of both times, and of ECR's gain over the library."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if "equal planes" in row["note"] and row["metric"] in ("kernel_us", "region_us"):
            key = f"{row['subject']} {row['note'].split('equal planes')[0]}"
            found.setdefault((row["metric"], row["provider"]), {})[key] = float(row["p50"])
    for (metric, provider), times in found.items():
        ratios = [
            found[metric, "cudnn.best"][key] / us
            for key, us in times.items()
            if key in found.get((metric, "cudnn.best"), {})
        ]
        words = "kernel time" if metric == "kernel_us" else "with allocation and copies, as the paper times it"
        gain = [f"{statistics.fmean(ratios):.2f}x", f"{max(ratios):.2f}x"] if ratios else ["", ""]
        yield [words, provider, str(len(times)), f"{statistics.fmean(times.values()):.1f}", *gain]


def nets(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Whole nets: latency by provider, the gain of the engines that skip, accuracy."""
    found: dict[tuple[str, str], dict[tuple[str, str], Row]] = {}
    for row in rows:
        if row["metric"] in ("latency_ms", "accuracy"):
            found.setdefault((row["subject"], row["batch"]), {})[row["metric"], row["provider"]] = row
    for (name, batch), figures in found.items():
        ms = {provider: float(row["p50"]) for (metric, provider), row in figures.items() if metric == "latency_ms"}
        right = {provider: f"{float(row['p50']):.2%}" for (m, provider), row in figures.items() if m == "accuracy"}
        stock = next(provider for provider in ms if provider.startswith("torch"))
        dense, every = ms["convoy.dense"], ms["convoy"]
        cells = [f"{value:.4f}" for value in (ms[stock], dense, every)]
        note = figures["latency_ms", "convoy"]["note"]
        yield [name, batch, *cells, f"{dense / every:.2f}x", f"{right[stock]} / {right['convoy']}", note]


def marks(rows: Sequence[Row]) -> Iterator[list[str]]:
    """What the producer's marks are worth."""
    found: dict[tuple[str, str], Times] = {}
    for row in rows:
        note = re.match(r"zeros (\d+) % marks (.*)", row["note"])
        sizes = re.match(r"conv:fprop:n\d+c(\d+)h(\d+)w\d+k(\d+)", row["subject"])
        if note and sizes:
            layer = f"{sizes[1]}→{sizes[3]} @{sizes[2]}"
            found.setdefault((layer, f"{note[1]} %"), {})[note[2]] = float(row["p50"])
    for key, us in found.items():
        yield [*key, *(f"{us[what]:.1f}" for what in MARKS)]


def zeroskip_table(rows: Sequence[Row], title: str) -> str:
    """All that there is of a device."""
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    lines = [f"{title}, {rows[0]['device']}, commit {commits}, {rows[0]['versions']}"]
    heads = ["what", "by", "over", "layers", "mean", "best", "least"]
    parts: list[tuple[Sequence[str], list[list[str]]]] = [(heads, list(gains(times_of(rows))))]
    heads = ["layer", "zeros", "engine", "correlation", "µs a percent", "no zeros, over dense", "75 %, over dense"]
    parts.append((heads, list(falls(rows))))
    heads = ["layer", "dead channels", "looks, µs", "is told, µs", "dense, µs", "is told, µs", "marks its result, µs"]
    parts.append((heads, list(marks(rows))))
    heads = ["the paper's workload", "by", "planes", "mean, µs", "over cuDNN: mean", "best"]
    parts.append((heads, list(replica(rows))))
    heads = [
        "net",
        "batch",
        "PyTorch, ms",
        "dense, ms",
        "with skipping, ms",
        "gain",
        "accuracy",
        "its layers read, and are done by",
    ]
    parts.append((heads, list(nets(rows))))
    for heads, cells in parts:
        if cells:
            lines += ["", *table(heads, cells)]
    for row in rows:
        if row["metric"] == "wrong_share":
            lines += [
                "",
                f"Chosen wrongly, {row['subject'].removeprefix('choices on ')}, batch {row['batch']}: {row['note']}.",
            ]
    return "\n".join(lines)
