"""Tables for the terminal: the layers, the whole net, and the paths of the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from convoy.plan.describe import shapes
from convoy.report.summary import CandidateRow, LayerSummary, Summary
from convoy.untrusted import escape_controls

WIDTH = 140
"""Columns of a table where the output is no terminal."""


def console() -> Console:
    """Standard output; as wide as the terminal, or as a table needs."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=WIDTH)


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> None:
    """A plain table; columns whose index is in `numbers` are set to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*[Text(escape_controls(cell)) for cell in row])
    console().print(table)


def print_summary(summary: Summary, files: Mapping[str, Path]) -> None:
    """The layers, the whole net and where the files lie."""
    heads = ("layer", "engine", "layout", "us", "PyTorch us", "speed-up", "runner-up", "floor us")
    print_table(heads, [_layer_row(layer) for layer in summary.layers], numbers=(3, 4, 5, 7))
    for line in headlines(summary):
        console().print(escape_controls(line), markup=False)
    for name, path in files.items():
        console().print(escape_controls(f"{name + ':':11}{path}"), markup=False, soft_wrap=True)


def headlines(summary: Summary) -> list[str]:
    """The result in a few lines."""
    before, after = summary.baseline, summary.optimized
    choice = summary.selection
    timed = "   ".join(f"{t.name} {t.median_ms:.3f} ms +- {t.spread_ms:.3f}" for t in (before, after))
    errors = f"{summary.rel_l2_error:.2e} (stock model {summary.baseline_rel_l2_error:.2e})"
    predicted, bound = choice.total_us / 1e3, choice.bound_us / 1e3
    lines = [
        f"{summary.model}, {shapes(summary.inputs)}, on {summary.target['name']}",
        f"{timed}   speed-up {summary.speedup:.2f}x",
        f"error against float64: {errors}, largest {summary.max_abs_error:.2e}",
        f"chosen by {choice.solver}: predicted {predicted:.3f} ms, no choice can be under {bound:.3f} ms",
    ]
    lines += [f"  {s.strategy:28} {s.total_us / 1e3:9.3f} ms" for s in choice.strategies]
    tuning = summary.tuning
    lines.append(
        f"tuned in {tuning.seconds:.1f} s: {tuning.measured} candidates measured, {tuning.from_database} from the database"
    )
    return lines + [f"note: {note}" for note in summary.notes]


def speedup(layer: LayerSummary) -> str:
    """How many times faster a layer is than PyTorch's own way; empty for steps that PyTorch does not take."""
    return f"{layer.baseline_us / layer.median_us:.2f}x" if layer.baseline_us and layer.median_us else ""


def runner_up(layer: LayerSummary) -> CandidateRow | None:
    """The fastest candidate of another engine."""
    others = [c for c in layer.candidates if c.status == "ok" and c.engine != layer.engine]
    return min(others, key=lambda c: c.median_us, default=None)


def _layer_row(layer: LayerSummary) -> tuple[str, ...]:
    second = runner_up(layer)
    return (
        layer.name if len(layer.name) <= 44 else layer.name[:41] + "...",
        layer.engine + (f" [{layer.knobs}]" if layer.knobs else ""),
        layer.layout,
        f"{layer.median_us:.1f}",
        f"{layer.baseline_us:.1f}" if layer.baseline_us else "",
        speedup(layer),
        f"{second.engine} {second.median_us:.1f}" if second else "",
        "" if layer.floor_us is None else f"{layer.floor_us:.1f}",
    )
