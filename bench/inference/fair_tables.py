"""Tables of whole nets that compare like with like: replay with replay, call with call, latency with latency."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from bench.shared.fair import KINDS, FairCase, by_commit, by_older_code, fair_cases, means
from bench.shared.rows import Row, Setting
from bench.shared.timed_code import is_stale

STALE = " (stale: the code has changed since)"


def fair_table(rows: Sequence[Row], title: str) -> str:
    """A table for each commit of the newest code; then of older code, each with the cases that no table before has.

    Empty where no row has these figures. Commits without a table of their own are named.
    """
    timed = [row for row in rows if row["metric"] in KINDS]
    fair = [row for row in timed if row["metric"] != "latency_ms"]
    if not fair:
        return ""
    commits = {row["commit"] for row in fair}
    fair = [row for row in timed if row["commit"] in commits]
    parts = [*by_commit(fair), *by_older_code(fair)]
    tables = [_table(own, title) for own in parts]
    left = sorted({row["commit"] for row in timed} - {own[0]["commit"] for own in parts})
    if left:
        tables.append(f"Rows of other commits are in the file and not in these tables: {', '.join(left)}.")
    return "\n\n".join(tables)


def _table(own: Sequence[Row], title: str) -> str:
    """A row a case: Convoy's replay, call and latency, each beside its best peer; the means; failures."""
    by_kind = {metric: cases for metric in KINDS if (cases := fair_cases(own, metric))}
    origin = f"{own[0]['device']}, commit {own[0]['commit']}" + (STALE if is_stale(own[0]) else "")
    lines = [
        f"{title}, {origin}; milliseconds, median: Convoy / the best peer and its name.",
        "",
        "| net | dtype | batch | " + " | ".join(f"{KINDS[metric]} | gain" for metric in by_kind) + " |",
        "|---|---|---|" + "---|" * (2 * len(by_kind)),
    ]
    cases = list(dict.fromkeys(case for found in by_kind.values() for case in found))
    for case in cases:
        cells: list[str] = []
        for kind in by_kind.values():
            found = kind.get(case)
            if found is None:
                cells += ["", ""]
                continue
            pair = f"{float(found.ours['p50']):.3f} / {float(found.best['p50']):.3f} {found.best['provider']}"
            cells += [pair, found.words]
        lines.append("| " + " | ".join([*case, *cells]) + " |")
    return "\n".join((*lines, "", *_means(by_kind), *_failures(own)))


def _means(by_kind: Mapping[str, Mapping[Setting, FairCase]]) -> list[str]:
    lines: list[str] = []
    for metric, cases in by_kind.items():
        word = KINDS[metric]
        parts = [
            f"{name} **{mean:.2f}x** over {count} nets, least {least:.2f}x"
            for name, (mean, least, count) in means(cases).items()
        ]
        if parts:
            lines.append(f"Geometric mean over the best peer, {word} with {word}: {'; '.join(parts)}.")
    return lines


def _failures(rows: Sequence[Row]) -> list[str]:
    """Providers without a right figure, each with its reason."""
    found = [row for row in rows if row["ok"] != "true" or math.isnan(float(row["p50"]))]
    named = dict.fromkeys(
        f"{row['provider']} on {row['subject']} {row['dtype']} batch {row['batch']}: {row['note'][:120]}"
        for row in found
    )
    return ["", "Without a figure:", "", *(f"- {line}" for line in named)] if named else []
