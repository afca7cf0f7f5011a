"""The figure of `convoy scale`: efficiency over numbers of GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from bench.shared.curve_figures import Points, curves_page
from bench.shared.rows import Row
from bench.shared.svg import source


def scaling_figure(rows: Sequence[Row], title: str) -> str:
    """Efficiency over GPUs, a panel a net."""
    nets: dict[str, dict[str, Points]] = {}
    for row in rows:
        if row["metric"] == "efficiency":
            net, gpus, scaling = row["subject"].split(" ")
            panel = nets.setdefault(f"{net}, {scaling} scaling, {row['dtype']}, batch {row['batch']}: efficiency", {})
            panel.setdefault(row["provider"], []).append((float(gpus.removeprefix("x")), float(row["p50"])))
    names = list(dict.fromkeys(name for curves in nets.values() for name in curves))
    return curves_page(f"{title}, {source(rows)}", "efficiency over GPUs", nets, names, log_y=False)
