"""The report: strings escaped, a strict policy that fits its script and style, a schema that is documented."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from convoy.report import write_json
from convoy.report.html import digest, render
from convoy.report.summary import LayerSummary, Summary
from convoy.report.tables import headlines, runner_up, speedup
from convoy.report.timeline import LEAST_WIDTH, LEFT, timeline_chart
from tests.unit.report.example import HOSTILE, TIMELINE, summary

DOCS = Path(__file__).parents[3] / "docs"


def test_strings_are_escaped_and_only_our_script_may_run() -> None:
    page = render(summary(TIMELINE))
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


def test_the_roofline_needs_ceilings() -> None:
    found = summary()
    assert render(found).count('<circle class="point"') == 2 * len(found.layers)  # once for a page, once for a phone
    unknown = dataclasses.replace(
        found, peaks={}, layers=tuple(dataclasses.replace(layer, floor_us=None) for layer in found.layers)
    )
    page = render(unknown)
    assert "Roofline" not in page
    assert "None" not in page


def test_the_foot_says_what_was_measured_of_the_device() -> None:
    found = summary()
    page = render(found)
    assert "(avx2, 2 threads)" in page
    assert "Measured peak rates: copies 20 GB/s, 100 GFLOP/s in fp32." in page
    gpu = dataclasses.replace(found, target={**found.target, "device": "cuda", "units": 132}, peaks={})
    assert "132 multiprocessors" in render(gpu)
    assert "peak rates:" not in render(gpu)


def test_a_changed_script_would_not_match_the_policy() -> None:
    assert digest("alert(1)") != digest("alert(2)")


def test_words() -> None:
    found = summary()
    assert speedup(found.layers[0]) == "2.00x"
    second = runner_up(found.layers[0])
    assert second is not None
    assert second.engine == "aten"
    assert "speed-up 2.00x" in " ".join(headlines(found))


def drawn(svg: str) -> tuple[list[str], list[dict[str, str]]]:
    """A chart's words, and its bars: their attributes, and as `words` what they say."""
    root = ET.fromstring(svg)
    texts = [found.text or "" for found in root.iter("text")]
    return texts, [{**bar.attrib, "words": bar.findtext("title") or ""} for bar in root.iter("rect")]


def test_a_timeline_has_a_row_for_each_stream_and_a_bar_for_each_step() -> None:
    texts, bars = drawn(timeline_chart(TIMELINE))
    assert texts == ["stream 0", "stream 2", "0", "0.060 ms"]
    assert [bar["class"] for bar in bars] == ["critical", "critical", "side"]  # row by row
    first, third, second = bars
    assert first["y"] == third["y"] != second["y"]
    assert first["words"] == f"conv0{HOSTILE}: onednn, 30.0 us from 0.0 us"
    assert second["words"] == "conv1: aten, 10.0 us from 30.0 us"
    scale = float(first["width"]) / 30
    assert float(first["x"]) == LEFT
    for bar, span in ((third, TIMELINE[2]), (second, TIMELINE[1])):
        assert float(bar["x"]) == pytest.approx(LEFT + span.start_us * scale, abs=0.1)
        assert float(bar["width"]) == pytest.approx(span.duration_us * scale, abs=0.1)


def test_the_shortest_steps_can_be_seen() -> None:
    _, bars = drawn(timeline_chart((*TIMELINE, dataclasses.replace(TIMELINE[1], duration_us=1e-6))))
    assert min(float(bar["width"]) for bar in bars) == LEAST_WIDTH


def test_the_page_shows_the_timeline_where_there_is_one() -> None:
    page = render(summary(TIMELINE))
    assert timeline_chart(TIMELINE) in page
    words = page.partition("<h2>Timeline</h2>")[2].partition("<svg")[0]
    assert "0.058 ms" in words
    assert "0.068 ms" in words
    assert "<h2>Timeline</h2>" not in render(summary())
    assert timeline_chart(()) == ""


def test_the_json_holds_the_timeline(tmp_path: Path) -> None:
    write_json(summary(TIMELINE), tmp_path / "s.json")
    data = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    assert data["timeline"] == [dataclasses.asdict(span) for span in TIMELINE]


def test_every_field_of_the_json_is_documented(tmp_path: Path) -> None:
    write_json(summary(), tmp_path / "s.json")
    data = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    text = (DOCS / "reference" / "json.md").read_text(encoding="utf-8")
    names = {f.name for f in (*dataclasses.fields(Summary), *dataclasses.fields(LayerSummary))}
    assert data.keys() == {f.name for f in dataclasses.fields(Summary)}
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []
