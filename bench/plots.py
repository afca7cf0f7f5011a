"""Draws docs/figures/*.svg from bench/results/*.csv: whole nets provider by provider, and layers over their floor.

Run it to draw; with `--check` it exits 1 where a figure is not what the files say. The pictures are plain SVG, the same bytes
for the same figures, with their own background in light and dark. Run `bench/tables.py` afterwards: it links them.

One device of a question is the one that README.md shows (the GPU with most cases) and has the short file name; the others'
files end in the device's name.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ablation_tables import STAGES
from record import Recorder
from tables import Row, gain_of, geometric_mean, preferred_first, rows_of, settings

from convoy.problem import ConvProblem, LinearProblem, parse_problem

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
WIDTH = 880
MARGIN = 16

PEERS = {
    "torch.eager": "#8c959f",
    "torch.eager.nhwc": "#57606a",
    "torch.ddp": "#57606a",
    "torch.defaults": "#8c959f",
    "torch.best": "#57606a",
    "torch.alone": "#8c959f",
    "torch.step": "#2f9e8f",
    "torch.without": "#b04f9b",
    "torch.loader": "#7a5fc7",
    "torch.graph": "#8c959f",
    "torch.graph.nhwc": "#57606a",
    "inductor.default": "#2f9e8f",
    "inductor.reduce-overhead": "#2f9e8f",
    "inductor.max-autotune": "#1b7f5c",
    "onnxruntime": "#7a5fc7",
    "openvino": "#b04f9b",
    "tensorflow": "#c58a00",
    "jax": "#3b7dd8",
    "cudnn.best": "#8c959f",
    "cusparse": "#3b7dd8",
    "mkl.sparse": "#3b7dd8",
    "cublas": "#7a5fc7",
}
"""Every peer by its one name, and its colour; each is told from its neighbours in light, in dark and in grey."""

OURS = "#e8590c"
"""Convoy's colour."""

STYLE = (
    "text{font-family:-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;font-size:12px;fill:#1f2328}"
    ".title{font-size:15px;font-weight:600}.small{font-size:11px;fill:#57606a}.strong{font-weight:600}"
    ".page{fill:#ffffff}.grid{stroke:#d0d7de;stroke-width:1}.spread{stroke:#1f2328;stroke-width:1}"
    ".link{stroke:#8c959f;stroke-width:0.7;opacity:0.6}"
    "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9da7b3}.page{fill:#0d1117}"
    ".grid{stroke:#30363d}.spread{stroke:#e6edf3}}"
)

BYTES_PER_US = {"H100": 3.1e6, "H200": 4.4e6}
"""What memory delivers: a large copy on an H100 SXM reached 3.1 of its 3.35 TB/s; the same share of an H200's 4.8."""

FLOPS_PER_US = {"half": 8.0e8, "as_torch": 4.0e8, "strict": 8.0e8 / 3}
"""What Hopper's tensor cores deliver: 800 TFLOP/s in half types, 400 in TF32; strict fp32 takes three half products."""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    style = f' class="{kind}"' if kind else ""
    where = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{style}{where}>{escape(words)}</text>'


def page(height: float, title: str, parts: Sequence[str]) -> str:
    """A whole file; the title is also what figures are described by to those who cannot see them."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" role="img"><title>{escape(title)}</title><style>{STYLE}</style>'
        f'<rect class="page" width="{WIDTH}" height="{height:.0f}" rx="6"/>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def source(rows: Sequence[Row]) -> str:
    """Device and commits of some rows."""
    commits = list(dict.fromkeys(row["commit"] for row in rows))
    return f"{rows[0]['device']}, commit {', '.join(commits)}"


def colour(provider: str) -> str:
    """A provider's colour.

    Raises:
        ValueError: a provider without a name in `PEERS`.
    """
    if provider == "convoy" or provider.startswith("convoy."):
        return OURS
    if provider not in PEERS:
        raise ValueError(f"provider {provider!r}: expected convoy, convoy.ENGINE_ID or one of {', '.join(PEERS)}")
    return PEERS[provider]


@dataclass(frozen=True)
class Panel:
    """Nets of one dtype and batch: their rows by provider, in the order of the file."""

    title: str
    nets: dict[str, dict[str, Row]]

    @property
    def height(self) -> float:
        """Pixels that it takes."""
        return 34 + sum(len(by_provider) * 12 + 10 for by_provider in self.nets.values())


def panels(rows: Sequence[Row]) -> list[Panel]:
    """A panel for each dtype, numerics and batch."""
    found: dict[tuple[str, int], dict[str, dict[str, Row]]] = {}
    for (subject, dtype, batch), by_provider in settings(rows).items():
        timed = [item for item in by_provider.items() if not math.isnan(float(item[1]["p50"]))]
        shown = [item for item in timed if item[0] not in STAGES]  # which have a table of their own
        ordered = dict(sorted(shown, key=lambda item: item[0] == "convoy"))
        found.setdefault((dtype, int(batch)), {})[subject] = ordered
    return [Panel(_panel_title(*key, nets), nets) for key, nets in sorted(found.items())]


def _panel_title(dtype: str, batch: int, nets: dict[str, dict[str, Row]]) -> str:
    gains = [gain for by_provider in nets.values() if (gain := gain_of(by_provider)) is not None]
    mean = f": Convoy {geometric_mean(gains):.2f}x the best other" if gains else ""
    return f"{dtype}, batch {batch}{mean}"


def latency_figure(rows: Sequence[Row], title: str) -> str:
    """Bars of every provider, net by net, as long as their share of the net's slowest; the label says milliseconds."""
    every = panels(rows)
    columns = 1 if len(every) == 1 else 2
    width = (WIDTH - MARGIN * (columns + 1)) / columns
    drawn = dict.fromkeys(name for panel in every for by_provider in panel.nets.values() for name in by_provider)
    providers = sorted(drawn, key=lambda name: name == "convoy")
    parts = [text(MARGIN, 28, f"{title}, {source(rows)}", "title")]
    parts.append(
        text(MARGIN, 46, "Latency, median; the shorter the better. Bars are drawn to each net's slowest.", "small")
    )
    parts.append(_legend(providers, 66))
    tops = [84.0] * columns
    for panel in every:
        column = tops.index(min(tops))
        parts.append(_bars(panel, MARGIN + column * (width + MARGIN), tops[column], width))
        tops[column] += panel.height + MARGIN
    return page(max(tops), f"{title}, {source(rows)}: latency of each provider, net by net", parts)


def _legend(providers: Sequence[str], y: float) -> str:
    parts: list[str] = []
    x = float(MARGIN)
    for name in providers:
        parts.append(f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="10" height="10" rx="2" fill="{colour(name)}"/>')
        parts.append(text(x + 15, y, name))
        x += 30 + 6.6 * len(name)
    return "".join(parts)


def _bars(panel: Panel, left: float, top: float, width: float) -> str:
    parts = [text(left, top + 16, panel.title, "strong")]
    start, room = left + 104, width - 104 - 74
    y = top + 30
    for net, by_provider in panel.nets.items():
        most = max(float(row["p80"]) for row in by_provider.values())
        parts.append(text(start - 8, y + len(by_provider) * 6 + 4, net, anchor="end"))
        for name, row in by_provider.items():
            low, middle, high = (start + room * float(row[q]) / most for q in ("p20", "p50", "p80"))
            right = row["ok"] == "true"
            fill = f'fill="{colour(name)}"' if right else f'fill="none" stroke="{colour(name)}" stroke-dasharray="3 2"'
            parts.append(
                f'<rect x="{start:.1f}" y="{y:.1f}" width="{middle - start:.1f}" height="10" rx="1.5" {fill}>'
                f"<title>{escape(name)}</title></rect>"
            )
            parts.append(f'<line class="spread" x1="{low:.1f}" x2="{high:.1f}" y1="{y + 5:.1f}" y2="{y + 5:.1f}"/>')
            label = f"{_figure(float(row['p50']))} ms" + ("" if right else ", wrong")
            kind = "small strong" if name == "convoy" else "small"
            parts.append(text(max(high, middle) + 5, y + 9, label, kind))
            y += 12
        y += 10
    return "\n".join(parts)


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


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


def floor(subject: str, numerics: str, device: str) -> float:
    """Microseconds that no implementation can go below: what must be moved, or what must be multiplied, at the device's rates."""
    problem = parse_problem(subject)
    assert isinstance(problem, ConvProblem | LinearProblem)
    return max(problem.bytes_min / memory_rate(device), problem.flops / FLOPS_PER_US[numerics])


def memory_rate(device: str) -> float:
    """Bytes a microsecond of a device.

    Raises:
        ValueError: a device whose rates are not known here.
    """
    for name, rate in BYTES_PER_US.items():
        if name in device:
            return rate
    raise ValueError(f"device {device!r}: its rates are not in bench/plots.py, which knows {', '.join(BYTES_PER_US)}")


def layers_figure(rows: Sequence[Row], title: str) -> str:
    """Time over the floor of every layer, cuDNN's best and Convoy's best joined by a line."""
    launch_us = min(float(row["p50"]) for row in _right(rows))
    memory = memory_rate(rows[0]["device"])
    rates = ", ".join(f"{rate / 1e6:.0f} for {name}" for name, rate in FLOPS_PER_US.items())
    parts = [
        text(MARGIN, 28, f"{title}, {source(rows)}", "title"),
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


# --- curves -----------------------------------------------------------------------------------------------------------------

LINES = ("#8c959f", "#3b7dd8", "#2f9e8f", "#e8590c", "#7a5fc7", "#c58a00", "#b04f9b", "#57606a")
DASHES = ("", "6 3", "2 3", "", "8 3 2 3", "", "4 2", "1 2")
PANEL_WIDTH = (WIDTH - 3 * MARGIN) / 2
PANEL_HEIGHT = 190.0

Points = list[tuple[float, float]]


def study_figure(rows: Sequence[Row], title: str) -> str:
    """Time of every algorithm over each swept size; nothing where no size was swept."""
    sweeps: dict[tuple[str, str, str], dict[str, Points]] = {}
    for row in rows:
        if row["metric"] == "kernel_us" and row["subject"].startswith("sweep:"):
            _, _, rest = row["subject"].partition(" ")
            place, _, direction = rest.partition(" ")
            axis, _, value = place.partition("=")
            algorithm = row["note"].partition(":")[0]
            curve = sweeps.setdefault((axis, direction, row["dtype"]), {})
            curve.setdefault(algorithm, []).append((float(value), float(row["p50"])))
    if not sweeps:
        return ""
    names = list(dict.fromkeys(name for curves in sweeps.values() for name in curves))
    words = {key: f"{key[0]}, {key[1]}, {key[2]}: microseconds of a launch" for key in sweeps}
    panels_ = {words[key]: curves for key, curves in sweeps.items()}
    return _curves_page(
        f"{title}, {source(rows)}", "time of each convolution algorithm over swept sizes", panels_, names
    )


def scaling_figure(rows: Sequence[Row], title: str) -> str:
    """Efficiency over GPUs, a panel a net."""
    nets: dict[str, dict[str, Points]] = {}
    for row in rows:
        if row["metric"] == "efficiency":
            net, gpus, scaling = row["subject"].split(" ")
            panel = nets.setdefault(f"{net}, {scaling} scaling, {row['dtype']}, batch {row['batch']}: efficiency", {})
            panel.setdefault(row["provider"], []).append((float(gpus.removeprefix("x")), float(row["p50"])))
    names = list(dict.fromkeys(name for curves in nets.values() for name in curves))
    return _curves_page(f"{title}, {source(rows)}", "efficiency over GPUs", nets, names, log_y=False)


def _curves_page(
    title: str, about: str, panels_: dict[str, dict[str, Points]], names: Sequence[str], *, log_y: bool = True
) -> str:
    parts = [text(MARGIN, 28, title, "title")]
    x = float(MARGIN)
    for index, name in enumerate(names):
        shade, dash = LINES[index % len(LINES)], DASHES[index % len(DASHES)]
        parts.append(
            f'<line x1="{x:.1f}" x2="{x + 22:.1f}" y1="46" y2="46" stroke="{shade}" stroke-width="2"'
            + (f' stroke-dasharray="{dash}"' if dash else "")
            + "/>"
        )
        parts.append(text(x + 27, 50, name))
        x += 42 + 6.6 * len(name)
    for index, (words, curves) in enumerate(panels_.items()):
        left = MARGIN + index % 2 * (PANEL_WIDTH + MARGIN)
        parts.append(_curves(words, curves, names, left, 66 + index // 2 * PANEL_HEIGHT, log_y=log_y))
    rows_ = -(-len(panels_) // 2)
    return page(70 + rows_ * PANEL_HEIGHT, f"{title}: {about}", parts)


def _curves(
    words: str, curves: dict[str, Points], names: Sequence[str], left: float, top: float, *, log_y: bool
) -> str:
    start, right, upper, lower = left + 44, left + PANEL_WIDTH - 8, top + 26, top + PANEL_HEIGHT - 34
    xs = sorted({x for points in curves.values() for x, _ in points})
    ys = [y for points in curves.values() for _, y in points]
    low, high = (min(ys) / 1.15, max(ys) * 1.15) if log_y else (0.0, max(1.0, *ys) * 1.05)

    def at_x(value: float) -> float:
        share = math.log(value / xs[0]) / math.log(xs[-1] / xs[0]) if len(xs) > 1 and xs[0] > 0 else 0.5
        return start + share * (right - start)

    def at_y(value: float) -> float:
        share = math.log(value / low) / math.log(high / low) if log_y else (value - low) / (high - low)
        return lower - share * (lower - upper)

    ticks = [s * 10.0**p for p in range(-3, 7) for s in (1, 2, 5)] if log_y else [0.0, 0.25, 0.5, 0.75, 1.0]
    inside = [tick for tick in ticks if low <= tick <= high]
    inside = inside if len(inside) <= 6 else [tick for tick in inside if math.log10(tick).is_integer()]
    parts = [text(left, top + 14, words, "strong")]
    for tick in inside:
        y = at_y(tick)
        parts.append(f'<line class="grid" x1="{start:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(text(start - 5, y + 4, f"{tick:g}" if log_y else f"{tick:.0%}", "small", "end"))
    parts += [text(at_x(x), lower + 16, f"{x:g}", "small", "middle") for x in xs]
    for name, points in curves.items():
        index = names.index(name)
        shade, dash = LINES[index % len(LINES)], DASHES[index % len(DASHES)]
        line = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in sorted(points))
        style = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(f'<polyline points="{line}" fill="none" stroke="{shade}" stroke-width="1.8"{style}/>')
        parts += [
            f'<circle cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="2.6" fill="{shade}">'
            f"<title>{escape(name)}: {y:.4g} at {x:g}</title></circle>"
            for x, y in sorted(points)
        ]
    return "\n".join(parts)


# --- options ----------------------------------------------------------------------------------------------------------------


OPTIONS_DRAWN = ("torch.defaults", "torch.step", "torch.best", "torch.loader")
"""Bars of an ablation; the last beside the best setting, in a subject of their own."""


def options_figure(rows: Sequence[Row], title: str) -> str:
    """Bars from the defaults, option by option, to the best setting, for each net and batch."""
    cases: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["metric"] == "latency_ms" and row["provider"] in OPTIONS_DRAWN:
            cases.setdefault((row["subject"], row["batch"]), []).append(row)
    parts = [text(MARGIN, 28, f"{title}, {source(rows)}", "title")]
    parts.append(
        text(MARGIN, 46, "From the defaults, option by option, to the best setting: milliseconds, median.", "small")
    )
    y = 62.0
    for (subject, batch), own in cases.items():
        most = max(float(row["p80"]) for row in own)
        parts.append(text(MARGIN, y + 14, f"{subject}, batch {batch}", "strong"))
        y += 22
        for row in own:
            name = row["note"].split("; ")[0].removesuffix(", kept")  # as all that are drawn are
            start, room = MARGIN + 225.0, WIDTH - 2 * MARGIN - 225 - 90
            low, middle, high = (start + room * float(row[q]) / most for q in ("p20", "p50", "p80"))
            shade = PEERS[row["provider"]]
            parts.append(text(start - 8, y + 10, name, anchor="end"))
            parts.append(
                f'<rect x="{start:.1f}" y="{y:.1f}" width="{middle - start:.1f}" height="12" rx="1.5" fill="{shade}"/>'
            )
            parts.append(f'<line class="spread" x1="{low:.1f}" x2="{high:.1f}" y1="{y + 6:.1f}" y2="{y + 6:.1f}"/>')
            parts.append(text(max(high, middle) + 5, y + 10, f"{_figure(float(row['p50']))} ms", "small"))
            y += 16
        y += 10
    return page(y + MARGIN, f"{title}, {source(rows)}: from the defaults to the best setting", parts)


Drawing = Callable[[Sequence[Row], str], str]
QUESTIONS: dict[str, tuple[str, str, Drawing]] = {
    "inference": ("inference", "Whole nets on a GPU", latency_figure),
    "cpu-inference": ("cpu-inference", "Whole nets on a CPU", latency_figure),
    "layers": ("layers-roofline", "Single layers", layers_figure),
    "compare": ("compare", "Frameworks side by side", latency_figure),
    "options": ("options", "PyTorch's options", options_figure),
    "study": ("study", "Convolution algorithms", study_figure),
    "scaling": ("scaling", "Training on several GPUs", scaling_figure),
}
"""Question → file name, title and how it is drawn."""


def render() -> dict[str, str]:
    """File name → figure, for every question and device that was measured."""
    figures: dict[str, str] = {}
    for question, (stem, title, draw) in QUESTIONS.items():
        for index, rows in enumerate(preferred_first(rows_of(question))):
            device = Recorder(question, device=rows[0]["device"]).path.stem.removeprefix(question)
            drawn = draw(rows, title)
            if drawn:
                figures[f"{stem}{device if index else ''}.svg"] = drawn
    return figures


def main() -> int:
    """Draw or check the figures; one that nothing measured stands behind is taken away."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    wanted = render()
    there = {path.name: path.read_text(encoding="utf-8") for path in FIGURES.glob("*.svg")}
    stale = sorted(name for name in {*wanted, *there} if wanted.get(name) != there.get(name))
    for name in stale:
        print(
            f"{name}: {'is not what bench/results says' if options.check else 'drawn' if name in wanted else 'removed'}"
        )
        if options.check:
            continue
        if name in wanted:
            FIGURES.mkdir(parents=True, exist_ok=True)
            (FIGURES / name).write_text(wanted[name], encoding="utf-8")
        else:
            (FIGURES / name).unlink()
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
