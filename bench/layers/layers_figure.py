"""Single layers: cuDNN's best and Convoy's best over the layer's floor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.layers.layer_floor import FLOPS_PER_US, floor, memory_rate
from bench.shared.rows import Row, geometric_mean
from bench.shared.svg import MARGIN, OURS, PEERS, WIDTH, headline, page, source, text


@dataclass(frozen=True)
class Layer:
    """One layer: the least time that the device could take, and what cuDNN's best and Convoy's best take."""

    floor_us: float
    cudnn_us: float
    convoy_us: float


def layers_of(rows: Sequence[Row], launch_us: float) -> dict[tuple[str, int], list[Layer]]:
    """The layers of each numerics and batch that both sides did right, by falling floor."""
    times: dict[tuple[str, str, str, int], dict[bool, float]] = {}
    for row in _right(rows):
        key = (row["dtype"], row["numerics"], row["subject"], int(row["batch"]))
        by_side = times.setdefault(key, {})
        ours = row["provider"].startswith("convoy")
        by_side[ours] = min(by_side.get(ours, math.inf), float(row["p50"]))
    found: dict[tuple[str, int], list[Layer]] = {}
    for (dtype, numerics, subject, batch), by_side in times.items():
        if len(by_side) == 2:
            name = dtype if numerics == "half" else f"{dtype} {numerics}"
            direction = subject.split(":")[1] if subject.startswith("conv:") else "fprop"
            name += "" if direction == "fprop" else f" {direction}"
            floor_us = max(launch_us, floor(subject, numerics, rows[0]["device"]))
            found.setdefault((name, batch), []).append(Layer(floor_us, by_side[False], by_side[True]))
    return {key: sorted(layers, key=lambda layer: -layer.floor_us) for key, layers in sorted(found.items())}


def _right(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["metric"] == "kernel_us" and row["ok"] == "true"]


def layers_figure(rows: Sequence[Row], title: str) -> str:
    """Time over the floor of every layer, cuDNN's best and Convoy's best joined by a line."""
    launch_us = min(float(row["p50"]) for row in _right(rows))
    memory = memory_rate(rows[0]["device"])
    rates = ", ".join(f"{rate / 1e6:.0f} for {name}" for name, rate in FLOPS_PER_US.items())
    parts = [
        headline(title, rows),
        text(MARGIN, 46, f"Time over the floor, layers by falling floor. Floor: bytes at {memory / 1e6:.1f} TB/s, operations "
             f"at the tensor cores' TFLOP/s ({rates}),", "small"),
        text(MARGIN, 61, f"or the shortest kernel of this run, {launch_us:.2f} us, whichever takes longest.", "small"),
    ]  # fmt: skip
    for x, shade, words in ((MARGIN, PEERS["cudnn.best"], "cuDNN best"), (MARGIN + 110, OURS, "Convoy best")):
        parts.append(f'<circle cx="{x + 5}" cy="78" r="4" fill="{shade}"/>' + text(x + 15, 82, words))
    y = 96.0
    for (name, batch), layers in layers_of(rows, launch_us).items():
        parts.append(_ratios(f"{name}, batch {batch}", layers, y))
        y += 196
    return page(y, f"{title}, {source(rows)}: time over the floor of each layer, Convoy and cuDNN", parts)


def _ratios(name: str, layers: Sequence[Layer], top: float) -> str:
    left, right, upper, lower = MARGIN + 34.0, WIDTH - MARGIN - 8.0, top + 26, top + 160
    ratios = [(layer.cudnn_us / layer.floor_us, layer.convoy_us / layer.floor_us) for layer in layers]
    least = min(1.0, *(min(pair) for pair in ratios))
    most = max(2.0, *(max(pair) for pair in ratios))

    def at(ratio: float) -> float:
        return lower - (lower - upper) * math.log(ratio / least) / math.log(most / least)

    cudnn, ours = (geometric_mean([pair[side] for pair in ratios]) for side in (0, 1))
    ahead = sum(pair[1] < pair[0] for pair in ratios)
    parts = [
        text(
            MARGIN, top + 14,
            f"{name}, {len(layers)} layers: geometric mean over the floor {cudnn:.2f} for cuDNN, {ours:.2f} for Convoy, "
            f"ahead on {ahead}", "strong",
        )
    ]  # fmt: skip
    for tick in (1, 2, 5, 10, 20, 50, 100):
        if least <= tick <= most:
            y = at(tick)
            parts.append(f'<line class="grid" x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(text(left - 5, y + 4, f"{tick}x", "small", "end"))
    step = (right - left) / len(layers)
    radius = min(4.0, max(1.5, step * 0.45))
    for index, (theirs, own) in enumerate(ratios):
        x = left + (index + 0.5) * step
        parts.append(f'<line class="link" x1="{x:.1f}" x2="{x:.1f}" y1="{at(theirs):.1f}" y2="{at(own):.1f}"/>')
        for ratio, shade in ((theirs, PEERS["cudnn.best"]), (own, OURS)):
            parts.append(f'<circle cx="{x:.1f}" cy="{at(ratio):.1f}" r="{radius:.1f}" fill="{shade}"/>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        index = round(share * (len(layers) - 1))
        anchor = "start" if share == 0 else "end" if share == 1 else "middle"
        x = left + (index + 0.5) * step
        parts.append(text(x, lower + 16, f"{layers[index].floor_us:.2g} us", "small", anchor))
    return "\n".join(parts)
