"""Run files as a page: of a comparison, of options, of a study, of scaling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from convoy.compare import compare_page
from convoy.compare.options import options_page
from convoy.compare.runs.runfile import Run
from convoy.compare.scaling import scaling_lines
from convoy.compare.study import study_criteria, study_lines
from convoy.errors import InputError
from convoy.report.sheet import Card, Section, Sheet, table_of

TITLES: Final = {
    "compare": "Frameworks side by side",
    "options": "Options of PyTorch",
    "study": "Convolution algorithms",
    "scaling": "Training on several GPUs",
}


def sheet_of(runs: Sequence[Run], names: Sequence[str] = ()) -> Sheet:
    """One page for some runs, in their order.

    Args:
        runs: one or more.
        names: their files, as many; several runs without names are numbered.

    Raises:
        InputError: a row's detail is not as its kind of run has it.
    """
    if len(runs) == 1:
        return _sheet(runs[0], "")
    parts = tuple(
        _sheet(run, name)
        for run, name in zip(runs, names or [f"run {n}" for n in range(1, len(runs) + 1)], strict=True)
    )
    return Sheet(f"{len(runs)} runs", parts=parts)


def _sheet(run: Run, name: str) -> Sheet:
    """The page of one run, with its name in the title if it has one."""
    try:
        cards, sections = _KINDS[run.kind](run)
    except InputError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError) as error:
        expected = "rows whose `detail` is as docs/how-to/compare.md has it"
        raise InputError("run", f"{type(error).__name__}: {error}", expected) from error
    subjects = ", ".join(dict.fromkeys(row.subject for row in run.rows if run.kind != "study"))
    kind = TITLES[run.kind].replace(scaling_lines.GPUS, _counted(run))
    title = ": ".join(filter(None, (name, kind, subjects)))
    notes = tuple(dict.fromkeys(run.manifest.get("notes", [])))
    about = [Section("What you should know", notes)] if notes else []
    device = str(run.manifest.get("target", {}).get("name", ""))
    return Sheet(title, f"on {device}" if device else "", tuple(cards[:8]), (*about, *sections), (foot(run, name),))


def _study(run: Run) -> tuple[list[Card], list[Section]]:
    nets = [row for row in run.rows if row.mode == "inference"]
    layers = [row for row in run.rows if row.mode != "inference"]
    sections: list[Section] = []
    if nets:
        table = table_of(study_lines.STRATEGY_HEADS, study_lines.strategy_table(nets), study_lines.STRATEGY_NUMBERS)
        bars = study_lines.strategy_bars(nets)
        notes = tuple(study_lines.strategy_notes(nets))
        sections.append(Section("Strategies against exact selection", notes, (table, bars)))
    if layers:
        charts = study_lines.charts(layers)
        drawn = tuple(svg for _, svg in charts)
        lines = tuple(dict.fromkeys(words for words, _ in charts))
        sections.append(Section("Where the winner changes", lines, pictures=drawn))
    sections += study_criteria.section(run.manifest)
    if layers:
        sections.append(Section("Every layer", tables=(study_lines.layer_table(layers),)))
        every = study_lines.every_table(layers)
        said = (f"{len(every.rows)} lines, on the page alone",)
        sections.append(Section("Every algorithm on every layer", tables=(every,), terminal=said))
    return [], sections


def _counted(run: Run) -> str:
    """What the numbers of a scaling run count."""
    return scaling_lines.counted(str(run.manifest.get("target", {}).get("device", "")))


_KINDS: Final[dict[str, Callable[[Run], tuple[list[Card], list[Section]]]]] = {
    "compare": compare_page.sections_of,
    "options": options_page.sections_of,
    "study": _study,
    "scaling": lambda run: scaling_lines.section_of(run.rows, _counted(run)),
}


def foot(run: Run, name: str = "") -> tuple[tuple[str, str], ...]:
    """The manifest, entry by entry, with the name of the run's file if it has one."""
    manifest = run.manifest
    target: Mapping[str, Any] = manifest.get("target", {})
    clocks: Mapping[str, Any] = manifest.get("clocks", {})
    device = f"{target.get('name', '?')} ({target.get('arch', '?')}, {target.get('units', '?')} units)"
    found = [
        ("run", f"{run.kind}, {manifest.get('date', '?')}"),
        ("device", f"{device}, target {target.get('digest', '?')}"),
        ("clocks", _pairs(clocks) or "the system does not tell"),
        ("versions", _pairs(manifest.get("versions", {}))),
        ("system", _pairs(manifest.get("system", {}))),
        ("commit", str(manifest.get("commit", "")) or "a release"),
        ("protocol", str(manifest.get("protocol", ""))),
        ("request", _pairs(manifest.get("request", {}))),
    ]
    return (("file", name), *found) if name else tuple(found)


def _pairs(words: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in words.items() if value not in ("", None))
