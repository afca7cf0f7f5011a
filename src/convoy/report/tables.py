"""Tables for the terminal: the layers, the whole net, and the paths of the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from convoy.plan.describe import CUT, PREDICTED, shapes, speedup_text, sum_text, time_text, total_text
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
    heads = ("layer", "engine", "layout", "us", "PyTorch us", "speed-up", "runner-up", "direct floor us")
    print_table(heads, [_layer_row(layer) for layer in summary.layers], numbers=(3, 4, 5, 7))
    for line in (*table_notes(summary), *headlines(summary)):
        console().print(escape_controls(line), markup=False)
    for name, path in files.items():
        console().print(escape_controls(f"{name + ':':11}{path}"), markup=False, soft_wrap=True)


def headlines(summary: Summary) -> list[str]:
    """The result in a few lines."""
    before, after = summary.baseline, summary.optimized
    choice = summary.selection
    timed = "   ".join(f"{t.name} {t.median_ms:.3f} ms +- {t.spread_ms:.3f}" for t in (before, after))
    errors = f"{summary.rel_l2_error:.2e} (stock model {summary.baseline_rel_l2_error:.2e})"
    lines = [
        f"{summary.model}, {shapes(summary.inputs)}, on {summary.target['name']}",
        f"{timed}   speed-up {summary.speedup:.2f}x",
        f"error against float64: {errors}, largest {summary.max_abs_error:.2e}",
        f"chosen by {choice.solver}: {sum_text(choice.total_us, choice.bound_us, predicted=choice.predicted)}",
    ]
    lines += [f"  {s.strategy:28} {total_text(s.total_us, predicted=s.predicted):>13}" for s in choice.strategies]
    tuning = summary.tuning
    lines.append(
        f"tuned in {tuning.seconds:.1f} s: {tuning.measured} candidates measured, {tuning.from_database} from the database"
    )
    return lines + [f"note: {note}" for note in summary.notes]


def speedup(layer: LayerSummary) -> str:
    """How many times faster a layer is than PyTorch's own way; empty if PyTorch has no such step, or a time is predicted."""
    predicted = layer.predicted or layer.baseline_predicted
    return speedup_text(layer.median_us, layer.baseline_us, predicted=predicted)


def runner_up(layer: LayerSummary) -> CandidateRow | None:
    """The fastest candidate of another engine."""
    others = [c for c in layer.candidates if c.status == "ok" and c.engine != layer.engine]
    return min(others, key=lambda c: c.median_us, default=None)


FLOOR_NOTE: Final = (
    "direct floor: the time of a direct, dense algorithm at this device's measured peak rates. Winograd and FFT need fewer "
    "operations and may be faster, and so may engines that skip zeros."
)
SLOWER_NOTE: Final = (
    "A step may be slower than its runner-up or than PyTorch's: the sum over the whole net is minimised, with the copies "
    "between memory formats, fused layers, memory, launches and streams."
)
PREDICTED_NOTE: Final = (
    f"{PREDICTED} marks times that were predicted, not measured; speed-ups are left out where one of their times is."
)


def table_notes(summary: Summary) -> list[str]:
    """What the columns of the layers' table mean, a line each, as far as the table needs it."""
    layers = summary.layers
    lines = [FLOOR_NOTE] if any(layer.floor_us for layer in layers) else []
    lines += [SLOWER_NOTE] if any(map(_looks_slow, layers)) else []
    marked = any(layer.predicted or layer.baseline_predicted for layer in layers)
    return lines + ([PREDICTED_NOTE] if marked else [])


def _looks_slow(layer: LayerSummary) -> bool:
    """Whether another candidate of the layer, or PyTorch, took less time than the chosen one."""
    second = runner_up(layer)
    others = [layer.baseline_us] if layer.baseline_us else []
    others += [second.median_us] if second else []
    return any(other < layer.median_us for other in others)


def candidate_text(candidate: CandidateRow | None) -> str:
    """A candidate's engine and time, for one field of a table; empty without one."""
    if candidate is None:
        return ""
    return f"{candidate.engine} {time_text(candidate.median_us, predicted=candidate.predicted)}"


def _layer_row(layer: LayerSummary) -> tuple[str, ...]:
    return (
        layer.name if len(layer.name) <= 44 else layer.name[: 44 - len(CUT)] + CUT,
        layer.engine + (f" [{layer.knobs}]" if layer.knobs else ""),
        layer.layout,
        time_text(layer.median_us, predicted=layer.predicted),
        time_text(layer.baseline_us, predicted=layer.baseline_predicted) if layer.baseline_us else "",
        speedup(layer),
        candidate_text(runner_up(layer)),
        "" if layer.floor_us is None else f"{layer.floor_us:.1f}",
    )
