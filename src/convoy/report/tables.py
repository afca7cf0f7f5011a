"""Tables for the terminal: the layers, the whole net, and the paths of the files."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from convoy.plan.describe import CUT, PREDICTED, shapes, speedup_text, sum_text, time_text, total_text
from convoy.progress import hidden
from convoy.report.summary import CandidateRow, LayerSummary, Summary
from convoy.untrusted import escape_controls

LONG_WORD: Final = 16
"""Words longer than this may be broken behind punctuation: names of layers, engines with their knobs, keys, paths."""

_PART: Final = re.compile(r"[^\s,./:;+\-]*[,./:;+\-]*|\s+")

WIDTH = 140
"""Columns of a table where the output is no terminal."""


class _Console(Console):
    """A console that takes away the displays of progress while it prints."""

    def print(self, *objects: Any, **options: Any) -> None:
        with hidden():
            super().print(*objects, **options)


def console() -> Console:
    """Standard output, as wide as `COLUMNS` or the terminal says; elsewhere `WIDTH`."""
    return _Console(highlight=False, width=shutil.get_terminal_size((WIDTH, 24)).columns)


def print_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = (), least: Sequence[int] = ()
) -> None:
    """A plain table. Where it is too wide for whole words, columns are left out, and a line says which.

    Args:
        heads: names of the columns.
        rows: cells, as many in each row.
        numbers: indices of columns that are set to the right.
        least: indices of the columns that are left out first, in this order; then those to the right. The first one stays.
    """
    target = console()
    texts = [[escape_controls(cell) for cell in row] for row in (heads, *rows)]
    shown, widths = _fitted(texts, target.width, least)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, width in zip(shown, widths, strict=True):
        head = Text("\n".join(_wrapped(texts[0][index], width)))
        table.add_column(head, justify="right" if index in numbers else "left", width=width, no_wrap=True)
    for row in texts[1:]:
        cells = zip(shown, widths, strict=True)
        table.add_row(*[Text("\n".join(_wrapped(row[index], width))) for index, width in cells])
    target.print(table)
    missing = [heads[index] for index in range(len(heads)) if index not in shown]
    if missing:
        words = f"left out, for {target.width} columns are too few: {', '.join(missing)} (COLUMNS={WIDTH} shows more)"
        target.print(escape_controls(words), markup=False)


def _fitted(texts: Sequence[Sequence[str]], columns: int, least: Sequence[int]) -> tuple[list[int], list[int]]:
    """The columns that fit, and their widths: each at least as wide as its longest word."""
    count = len(texts[0])
    lines = [[cell for row in texts for cell in row[index].split("\n")] for index in range(count)]
    most = [max(map(cell_len, cells), default=0) for cells in lines]
    needed = [max((_needed(word) for cell in cells for word in cell.split()), default=0) for cells in lines]
    shown = list(range(count))
    order = [*least, *(index for index in reversed(range(count)) if index not in least)]
    for index in order:
        if sum(needed[i] for i in shown) + _between(len(shown)) <= columns or len(shown) == 1:
            break
        if index != 0:
            shown.remove(index)
    spare = columns - _between(len(shown)) - sum(needed[i] for i in shown)
    widths = dict.fromkeys(shown, 0)
    for left, index in enumerate(sorted(shown, key=lambda i: most[i] - needed[i]), start=-len(shown)):
        more = max(0, min(most[index] - needed[index], spare // -left))
        widths[index], spare = max(1, min(needed[index] + more, columns - _between(len(shown)))), spare - more
    return shown, list(widths.values())


def _between(count: int) -> int:
    """Characters of a table of so many columns that hold no text: a blank at both sides of a column, lines between them."""
    return 3 * count - 1


def _needed(word: str) -> int:
    """The width below which a word would be broken; a long one is broken behind punctuation."""
    return cell_len(word) if len(word) <= LONG_WORD else max(LONG_WORD, *map(cell_len, _PART.findall(word)))


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of at most that many characters, broken between words."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        line = ""
        for piece in re.findall(r"\s+|\S+", paragraph):
            for part in _PART.findall(piece) if len(piece) > LONG_WORD else (piece,):
                rest = part
                if line and cell_len(line + rest) > width:
                    lines.append(line.rstrip())
                    line, rest = "", rest.lstrip()
                while cell_len(rest) > width:  # a word that no width would do for
                    lines.append(rest[:width])
                    rest = rest[width:]
                line += rest
        lines.append(line.rstrip() if line.strip() else line)
    return lines


def print_summary(summary: Summary, files: Mapping[str, Path]) -> None:
    """The layers, the whole net and where the files lie."""
    heads = ("layer", "engine", "layout", "us", "PyTorch us", "speed-up", "runner-up", "direct floor us")
    print_table(heads, [_layer_row(layer) for layer in summary.layers], (3, 4, 5, 7), LEAST)
    for line in (*table_notes(summary), *headlines(summary)):
        console().print(escape_controls(line), markup=False)
    for name, path in files.items():
        console().print(escape_controls(f"{name + ':':11}{path}"), markup=False, soft_wrap=True)


LEAST: Final = (7, 6, 2, 4)
"""Columns of the layers' table that a narrow terminal leaves out first: floor, runner-up, layout, PyTorch's time."""


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
