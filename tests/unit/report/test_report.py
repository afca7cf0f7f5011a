"""The report: strings escaped, a strict policy that fits its script and style, a schema that is documented."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from example import HOSTILE, summary

from convoy.report import write_json
from convoy.report.html import digest, render
from convoy.report.summary import Layer, Summary
from convoy.report.tables import headlines, runner_up, speedup

DOCS = Path(__file__).parents[3] / "docs"


def test_strings_are_escaped_and_only_our_script_may_run() -> None:
    page = render(summary())
    assert HOSTILE not in page
    assert "&lt;script&gt;" in page
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 1
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    words = policy[1].replace("&#39;", "'")
    assert f"script-src '{digest(scripts[0])}'" in words
    assert "default-src 'none'" in words
    assert "unsafe" not in words
    assert "http" not in page.replace("http-equiv", "")


def test_a_changed_script_would_not_match_the_policy() -> None:
    assert digest("alert(1)") != digest("alert(2)")


def test_words() -> None:
    found = summary()
    assert speedup(found.layers[0]) == "2.00x"
    second = runner_up(found.layers[0])
    assert second is not None
    assert second.engine == "aten"
    assert "speed-up 2.00x" in " ".join(headlines(found))


def test_every_field_of_the_json_is_documented(tmp_path: Path) -> None:
    write_json(summary(), tmp_path / "s.json")
    data = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    text = (DOCS / "json.md").read_text(encoding="utf-8")
    names = {f.name for f in (*dataclasses.fields(Summary), *dataclasses.fields(Layer))}
    assert data.keys() == {f.name for f in dataclasses.fields(Summary)}
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []
