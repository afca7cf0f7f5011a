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


def sheet_of(runs: Sequence[Run]) -> Sheet:
    """One page for some runs, in their order."""
    cards: list[Card] = []
    sections: list[Section] = []
    for run in runs:
        try:
            found, own = _KINDS[run.kind](run)
        except InputError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError) as error:
            expected = "rows whose `detail` is as docs/how-to/compare.md has it"
            raise InputError("run", f"{type(error).__name__}: {error}", expected) from error
        cards += found
        sections += own
    subjects = dict.fromkeys(row.subject for run in runs for row in run.rows if run.kind != "study")
    kinds = dict.fromkeys(TITLES[run.kind] for run in runs)
    title = (next(iter(kinds)) if len(kinds) == 1 else "Runs") + (f": {', '.join(subjects)}" if subjects else "")
    devices = dict.fromkeys(str(run.manifest.get("target", {}).get("name", "")) for run in runs)
    warnings = [note for run in runs for note in run.manifest.get("notes", [])]
    if warnings:
        sections.insert(0, Section("What you should know", tuple(dict.fromkeys(warnings))))
    return Sheet(
        title,
        "on " + ", ".join(filter(None, devices)),
        tuple(cards[:8]),
        tuple(sections),
        tuple(foot(run) for run in runs),
    )


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


_KINDS: Final[dict[str, Callable[[Run], tuple[list[Card], list[Section]]]]] = {
    "compare": compare_page.sections_of,
    "options": options_page.sections_of,
    "study": _study,
    "scaling": lambda run: scaling_lines.section_of(run.rows),
}


def foot(run: Run) -> tuple[tuple[str, str], ...]:
    """The manifest, name by name."""
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
    return tuple(found)


def _pairs(words: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in words.items() if value not in ("", None))
