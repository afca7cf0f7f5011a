"""The figure of `convoy study`: the time of each algorithm over each swept size."""

from __future__ import annotations

from collections.abc import Sequence

from bench.shared.curve_figures import Points, curves_page
from bench.shared.rows import Row
from bench.shared.svg import source


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
    return curves_page(
        f"{title}, {source(rows)}", "time of each convolution algorithm over swept sizes", panels_, names
    )
