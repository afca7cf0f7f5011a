"""One self-contained HTML page: no network, strings escaped, a strict content-security policy."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from convoy.plan.describe import shapes, sum_text, time_text, total_text
from convoy.report.break_even import break_even_chart
from convoy.report.charts import times_chart
from convoy.report.roofline import roofline
from convoy.report.summary import Summary
from convoy.report.tables import candidate_text, headlines, runner_up, speedup, table_notes
from convoy.report.timeline import timeline_chart

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
        "times": times_chart(summary),
        "roofline": roofline([asdict(layer) for layer in summary.layers], summary.peaks, summary.dtype),
        "break_even": break_even_chart(summary),
        "timeline": timeline_chart(summary.timeline),
    }
    return page("report.html", values)


def page(template: str, values: Mapping[str, Any]) -> str:
    """A template with the page's style and script, and the policy that lets in no others."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = (_TEMPLATES / "report.js").read_text(encoding="utf-8")
    style = (_TEMPLATES / "report.css").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return environment.get_template(template).render(values, script=script, style=style, policy=policy)


def digest(text: str) -> str:
    """A script's or a style's hash, as a content-security policy wants it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
