"""One self-contained HTML page: no network, strings escaped, a strict content-security policy."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from convoy.plan.describe import shapes, sum_text, time_text, total_text
from convoy.report.break_even import break_even_chart
from convoy.report.charts import times_figure
from convoy.report.drawing import for_widths
from convoy.report.roofline import roofline_figure
from convoy.report.summary import Summary
from convoy.report.tables import candidate_text, headlines, runner_up, speedup, table_notes
from convoy.report.timeline import timeline_chart

if TYPE_CHECKING:
    from markupsafe import Markup

_TEMPLATES: Final = Path(__file__).parent / "templates"


def write_html(summary: Summary, path: Path) -> None:
    """Write the report, whole or not at all; raises InputError where the path cannot be written."""
    from convoy.plan.file import write_text

    write_text(path, render(summary), "report")


def render(summary: Summary) -> str:
    """The page as text."""
    values: dict[str, Any] = {
        "summary": summary,
        "shapes": shapes,
        "headlines": headlines(summary),
        "speedup": speedup,
        "runner_up": runner_up,
        "candidate_text": candidate_text,
        "time_text": time_text,
        "total_text": total_text,
        "sum_text": sum_text,
        "table_notes": table_notes(summary),
        "units": _units(summary.target),
        "peak_rates": _peak_rates(summary.peaks),
        "times": times_figure(summary),
        "roofline": roofline_figure([asdict(layer) for layer in summary.layers], summary.peaks, summary.dtype),
        "break_even": for_widths(partial(break_even_chart, summary)),
        "timeline": for_widths(partial(timeline_chart, summary.timeline)),
    }
    return page("report.html", values)


def _units(target: Mapping[str, Any]) -> str:
    """How many threads a CPU's net ran on, or how many multiprocessors a GPU has."""
    count = int(target["units"])
    word = "multiprocessor" if target.get("device") == "cuda" else "thread"
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _peak_rates(peaks: Mapping[str, float]) -> str:
    """The ceilings that were measured: copies, and arithmetic in each dtype."""
    rates = [
        f"{rate / 1e9:.0f} GFLOP/s in {name.removeprefix('flops_')}"
        for name, rate in peaks.items()
        if name.startswith("flops_")
    ]
    copies = [f"copies {peaks['bytes_per_s'] / 1e9:.0f} GB/s"] if "bytes_per_s" in peaks else []
    return ", ".join([*copies, *rates])


def page(template: str, values: Mapping[str, Any], styles: Sequence[str] = ("report.css",)) -> str:
    """A template with the page's styles and script, and the policy that lets in no others."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = breakable  # pyright: ignore[reportUnknownMemberType]
    environment.filters["prose"] = prose  # pyright: ignore[reportUnknownMemberType]
    script = (_TEMPLATES / "report.js").read_text(encoding="utf-8")
    style = "".join((_TEMPLATES / name).read_text(encoding="utf-8") for name in styles)
    policy = (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return environment.get_template(template).render(values, script=script, style=style, policy=policy)


def breakable(name: str) -> Markup:
    """A layer's name or an engine's knobs as HTML that may break behind `+`, `.`, `_`, `,` and `=`."""
    from markupsafe import Markup, escape

    return Markup("<wbr>").join(escape(part) for part in re.findall(r"[^+._,=]*[+._,=]|[^+._,=]+", name))


def prose(words: str) -> Markup:
    """A sentence as HTML: what stands in backticks is set as code."""
    from markupsafe import Markup, escape

    parts = re.split(r"`([^`]+)`", words)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if index % 2 else escape(part) for index, part in enumerate(parts)
    )


def digest(text: str) -> str:
    """A script's or a style's hash, as a content-security policy wants it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
