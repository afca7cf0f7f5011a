"""The table of what each option of PyTorch is worth, from the rows of `convoy compare --options`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bench.shared.rows import Row

from convoy.compare.options.torch_options import arithmetic_of


def options_table(rows: Sequence[Row], title: str) -> str:
    """What each option is worth, alone and in the best setting; a note begins with the option (bench/compare/options.py)."""
    cases: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row["metric"] == "latency_ms":
            cases.setdefault((row["subject"], row["batch"], row["commit"]), []).append(row)
    blocks: list[str] = []
    for (subject, batch, commit), own in cases.items():
        best = next((row for row in own if row["provider"] == "torch.best"), None)
        defaults = next((row for row in own if row["provider"] == "torch.defaults"), None)
        if best is not None and subject.endswith(":loader"):
            blocks.append(loader_table(own, best, title))
        if best is None or defaults is None:
            continue
        before, after = float(defaults["p50"]), float(best["p50"])
        head = (
            f"{title}, {subject}, batch {batch}, {own[0]['device']}, commit {commit}: from {before:.3f} to {after:.3f} ms. "
            + _advice(best["note"], before / after, best["dtype"])
        )
        lines = [
            head,
            "",
            "| option | alone | in the best setting |",
            "|---|---|---|",
        ]
        alone = {
            _option(row): float(defaults["p50"]) / float(row["p50"]) for row in own if row["provider"] == "torch.alone"
        }
        there = {
            _option(row).removeprefix("without "): float(row["p50"]) / float(best["p50"])
            for row in own
            if row["provider"] == "torch.without"
        }
        for name in dict.fromkeys((*sorted(alone, key=lambda n: -alone[n]), *there)):
            cells = [f"{values[name]:.2f}x" if name in values else "" for values in (alone, there)]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) or "Not measured yet."


_HEADLINE = re.compile(r"(?P<factor>[\d.]+x) from options alone(?P<type>, in .*? ms\))?: (?P<options>[^;(]*)")


def _advice(note: str, gain: float, dtype: str) -> str:
    """The advice in a note, with the type, and with the factor of the two rows beside it.

    Older runs timed the defaults at their beginning, and beside the best setting once more without keeping that row: the factor
    of those rounds is told too.
    """
    found = _HEADLINE.search(note)
    if found is None:
        return note.split("; ", 2)[-1]
    used = arithmetic_of([name.strip() for name in found["options"].split(",")], dtype)
    together = "" if found["type"] else f" ({found['factor']} where both were timed in the same rounds)"
    return f"{gain:.2f}x from options alone, in {used}{together}: {note[found.start('options') :]}"


def loader_table(rows: Sequence[Row], best: Row, title: str) -> str:
    """A training step fed by data-loader workers, beside the best setting, whose batch is there."""
    net, batch, device, commit = (best[name] for name in ("subject", "batch", "device", "commit"))
    there = float(best["p50"])
    case = f"{net.removesuffix(':loader')}, batch {batch}, {device}, commit {commit}"
    head = f"{title}, {case}: the best setting, fed by a data loader"
    lines = [head, "", "| data loader | ms a step | over a batch that is there |", "|---|---|---|"]
    for row in rows:
        if row["provider"] == "torch.loader":
            words, noisy = _option(row), " (noisy)" if row["note"].endswith("noisy") else ""
            lines.append(f"| {words}{noisy} | {float(row['p50']):.3f} | {float(row['p50']) / there:.2f}x |")
    return "\n".join(lines)


def _option(row: Row) -> str:
    return row["note"].split("; ")[0]
