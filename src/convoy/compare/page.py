"""Run files as a sheet: what a person reads of a comparison, of options, of a study, of scaling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import quantiles
from typing import Any, Final

from convoy.compare import scaling_lines, study_criteria, study_lines
from convoy.compare.kinds import KINDS
from convoy.compare.runfile import Figure, Row, Run
from convoy.errors import InputError
from convoy.plan.timeline import Span
from convoy.report.roofline import roofline
from convoy.report.sheet import Card, Cell, Part, Section, Sheet, Table, table_of
from convoy.report.timeline import timeline_chart

TITLES: Final = {
    "compare": "Frameworks side by side",
    "options": "What options are worth",
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
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            expected = "rows whose `detail` is as docs/compare.md has it"
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


def questions(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that answer one question together, in the order of the file."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(row.question, []).append(row)
    return list(found.values())


def by_time(rows: Sequence[Row], metric: str = "latency_ms") -> list[Row]:
    """The fastest first; rows without that figure last, in their order."""

    def key(row: Row) -> tuple[bool, float]:
        found = row.figure(metric)
        return found is None, found.p50 if found is not None else 0.0

    return sorted(rows, key=key)


# --- frameworks -----------------------------------------------------------------------------------------------------------


def _compare(run: Run) -> tuple[list[Card], list[Section]]:
    cards: list[Card] = []
    sections: list[Section] = []
    for rows in questions(run.rows):
        ranked = [row for row in by_time(rows) if row.ok]
        if ranked:
            cards.append(_fastest(ranked))
        ordered = by_time(rows)
        words = tuple(_in_words(row) for row in ordered)
        table = frameworks_table(ordered)
        sections.append(Section(rows[0].label(), _compare_lines(ordered), (table,), terminal=words))
        drawn = (_kinds(ranked), _roofline(ranked), _timeline(ranked))
        sections += [section for section in drawn if section is not None]
    return cards, sections


def _fastest(ranked: Sequence[Row]) -> Card:
    first = ranked[0]
    latency = first.figure("latency_ms")
    assert latency is not None
    words = f"{first.label()}: {first.provider} is the fastest"
    others = [row.figure("latency_ms") for row in ranked[1:]]
    if others and others[0] is not None:
        words += f", {others[0].p50 / latency.p50:.2f}x ahead of {ranked[1].provider}"
    return Card(f"{latency.p50:.3g} ms", words, good=first.provider == "convoy")


FRAMEWORK_HEADS: Final = (
    "framework", "latency ms", "+-", "20 %", "80 %", "95 %", "latency", "over best", "images/s", "memory MiB", "start s",
    "compile s", "energy J", "error", "setting, or why not",
)  # fmt: skip
FRAMEWORK_PAGE: Final = ("20 %", "80 %", "95 %", "latency", "setting, or why not")
"""Columns of the page alone."""


def frameworks_table(rows: Sequence[Row]) -> Table:
    """A line for each framework; those that failed say how."""
    latencies = [f for row in rows if (f := row.figure("latency_ms")) is not None]
    best = min((f.p50 for f in latencies), default=1.0)
    most = max((f.p80 for f in latencies), default=1.0)
    lines = [_framework(row, best, most) for row in rows]
    # Without a counter of energy, or samples for the far end, a column is nothing but width.
    empty = {
        at
        for at, head in enumerate(FRAMEWORK_HEADS)
        if head in ("energy J", "95 %") and not any(own[at].text for own in lines)
    }
    kept = [at for at in range(len(FRAMEWORK_HEADS)) if at not in empty]
    heads = tuple(FRAMEWORK_HEADS[at] for at in kept)
    words = {"framework", "latency", "setting, or why not"}
    return Table(
        heads,
        tuple(tuple(own[at] for at in kept) for own in lines),
        numbers=tuple(at for at, head in enumerate(heads) if head not in words),
        page_only=tuple(at for at, head in enumerate(heads) if head in FRAMEWORK_PAGE),
    )


def _framework(row: Row, best: float, most: float) -> tuple[Cell, ...]:
    latency = row.figure("latency_ms")
    if latency is None:
        blank = (Cell(""),) * 12
        return (Cell(row.provider), Cell(row.status, mark="bad"), *blank, Cell(row.reason, mark="soft"))
    colour = 1 if row.provider == "convoy" else 0
    said = f"{row.provider}: {latency.p50:.3f} ms, from {latency.p20:.3f} to {latency.p80:.3f}"
    ratio = latency.p50 / best
    return (
        Cell(row.provider),
        Cell(f"{latency.p50:.3f}", latency.p50, "good" if ratio == 1 else ""),
        Cell(f"{latency.spread:.3f}" + (" noisy" if row.noisy else ""), latency.spread, "bad" if row.noisy else "soft"),
        *_percentiles(latency),
        _far_end(row),
        Cell(
            "",
            latency.p50,
            bar=(Part(latency.p50 / most, colour, said),),
            spread=(latency.p20 / most, latency.p80 / most),
        ),
        Cell(f"{ratio:.2f}x", ratio),
        _cell(row, "images_per_s", ".1f"),
        _cell(row, "peak_memory_bytes", ".0f", 2.0**20),
        _cell(row, "startup_s", ".1f"),
        _cell(row, "compile_s", ".1f"),
        _cell(row, "energy_j", ".3f"),
        _cell(row, "rel_l2_error", ".0e"),
        Cell(row.setting, mark="soft"),
    )


def _percentiles(figure: Figure) -> tuple[Cell, ...]:
    """The 20th and the 80th percentile."""
    return tuple(Cell(f"{side:.3f}", side, "soft") for side in (figure.p20, figure.p80))


def _far_end(row: Row) -> Cell:
    """The 95th percentile of the latencies, where the row has its samples."""
    samples: Sequence[float] = row.detail.get("samples", {}).get("latency_ms", ())
    if len(samples) < 2:
        return Cell("")
    value = quantiles(samples, n=20, method="inclusive")[-1]
    return Cell(f"{value:.3f}", value, "soft")


def _cell(row: Row, metric: str, form: str, scale: float = 1.0) -> Cell:
    found = row.figure(metric)
    return Cell(f"{found.p50 / scale:{form}}", found.p50) if found is not None else Cell("")


def _in_words(row: Row) -> str:
    """How a framework was set, or why it was not measured."""
    return f"{row.provider}: {row.setting}" if row.ok else f"{row.provider}: {row.status}: {row.reason}"


def _compare_lines(rows: Sequence[Row]) -> tuple[str, ...]:
    lines = [f"{row.provider}: {note}" for row in rows for note in row.notes]
    alone = [row.provider for row in rows if row.ok and row.detail.get("timed") == "alone"]
    if alone and len([row for row in rows if row.ok]) > 1:
        lines.append(f"timed alone and not in turn with the others: {', '.join(alone)}")
    return tuple(lines)


def _kinds(rows: Sequence[Row]) -> Section | None:
    """Time by layer kind, where frameworks tell it."""
    known = [row for row in rows if row.detail.get("kinds")]
    if not known:
        return None
    sums = {row.provider: sum(row.detail["kinds"].values()) for row in known}
    most = max(sums.values()) or 1.0
    lines: list[tuple[Cell, ...]] = []
    for row in known:
        times: Mapping[str, float] = row.detail["kinds"]
        parts = [
            Part(times[kind] / most, i, f"{kind} {times[kind]:.3f} ms") for i, kind in enumerate(KINDS) if kind in times
        ]
        text = ", ".join(f"{kind} {times[kind]:.2f}" for kind in KINDS if kind in times)
        lines.append((Cell(row.provider), Cell("", sums[row.provider], bar=tuple(parts)), Cell(text)))
    table = Table(("framework", "time by layer kind", "ms"), tuple(lines), page_only=(1,))
    about = (
        "As each framework's own profiler tells it, which costs time itself; Convoy's layers were measured one by one."
    )
    return Section(f"Time by layer kind: {known[0].label()}", (about,), (table,), legend=KINDS)


def _roofline(rows: Sequence[Row]) -> Section | None:
    for row in rows:
        if row.detail.get("layers") and row.detail.get("peaks"):
            drawn = roofline(row.detail["layers"], row.detail["peaks"], row.dtype)
            if drawn:
                return Section(f"Roofline: {row.label()}, {row.provider}", pictures=(drawn,))
    return None


def _timeline(rows: Sequence[Row]) -> Section | None:
    """When each step of Convoy's ran, on which stream."""
    for row in rows:
        spans = [Span(**span) for span in row.detail.get("timeline", ())]
        if spans:
            about = "Convoy's steps as they ran, launched one by one; the critical path in its own colour."
            return Section(
                f"Timeline: {row.label()}, {row.provider}", about=(about,), pictures=(timeline_chart(spans),)
            )
    return None


# --- options --------------------------------------------------------------------------------------------------------------


def _options(run: Run) -> tuple[list[Card], list[Section]]:
    cards: list[Card] = []
    sections: list[Section] = []
    for rows in questions(run.rows):
        summary = next((row for row in rows if row.detail.get("role") == "best" and row.ok), None)
        if summary is not None:
            cards.append(Card(f"{summary.detail['gain']:.2f}x", f"{rows[0].label()}: from options alone", good=True))
        advice = (str(summary.detail["advice"]),) if summary is not None else ()
        tables = tuple(
            options_table(rows, role, words) for role, words in ROLES.items() if any(_role(r, role) for r in rows)
        )
        failed = tuple(f"defaults: {row.status}: {row.reason}" for row in rows if _role(row, "defaults") and not row.ok)
        sections.append(Section(f"Options of PyTorch: {rows[0].label()}", (*failed, *advice), tables))
    return cards, sections


ROLES: Final = {
    "alone": "Each option alone, against the defaults",
    "forward": "Step by step from the defaults to the best setting",
    "without": "The best setting without one of its options",
    "default": "What the defaults already do, taken away",
    "loader": "Data-loader workers: the best training step fed by so many",
}
"""What a row of an options run is, and its table's caption."""

OPTION_HEADS: Final = (
    "option", "latency ms", "+-", "20 %", "80 %", "latency", "over defaults", "worth", "error", "status, setting",
)  # fmt: skip


def options_table(rows: Sequence[Row], role: str, caption: str) -> Table:
    """A line for each setting of one role, with the defaults and the best for comparison."""
    own = [row for row in rows if _role(row, role)]
    if role in ("alone", "forward"):
        own = [row for row in rows if _role(row, "defaults")] + own
    if role in ("without", "default"):
        own = [row for row in rows if _role(row, "best")] + own
    most = max((f.p80 for row in own if (f := row.figure("latency_ms")) is not None), default=1.0)
    lines = [_option(row, most) for row in own]
    hidden = (
        (3, 4, 5) if any(not row.ok for row in own) else (3, 4, 5, 9)
    )  # on a terminal a long setting hides the figures
    return Table(OPTION_HEADS, tuple(lines), caption, numbers=(1, 2, 3, 4, 6, 7, 8), page_only=hidden)


def _role(row: Row, role: str) -> bool:
    return row.detail.get("role") == role


def _option(row: Row, most: float) -> tuple[Cell, ...]:
    latency = row.figure("latency_ms")
    name = str(row.detail.get("option", row.provider))
    if latency is None:
        return (Cell(name), Cell(row.status, mark="bad"), *(Cell(""),) * 7, Cell(row.reason, mark="soft"))
    gain, worth = row.detail.get("gain"), row.detail.get("worth")
    kept = bool(row.detail.get("kept"))
    said = f"{name}: {latency.p50:.3f} ms"
    return (
        Cell(name),
        Cell(f"{latency.p50:.3f}", latency.p50),
        Cell(f"{latency.spread:.3f}" + (" noisy" if row.noisy else ""), latency.spread, "bad" if row.noisy else "soft"),
        *_percentiles(latency),
        Cell("", latency.p50, bar=(Part(latency.p50 / most, 2 if kept else 7, said),),
             spread=(latency.p20 / most, latency.p80 / most)),
        Cell(f"{gain:.2f}x", gain) if gain else Cell(""),
        Cell(f"{worth:.2f}x", worth, "good" if kept else "") if worth else Cell(""),
        _cell(row, "rel_l2_error", ".0e"),
        Cell(row.setting, mark="soft"),
    )  # fmt: skip


# --- study and scaling ----------------------------------------------------------------------------------------------------


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
    "compare": _compare,
    "options": _options,
    "study": _study,
    "scaling": lambda run: scaling_lines.section_of(run.rows),
}


# --- the foot -------------------------------------------------------------------------------------------------------------


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
