"""Run files from elsewhere: details and manifests of wrong types, and files of many rows, are refused in time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from convoy.compare.runs.run_page import sheet_of
from convoy.compare.runs.runfile import from_dict, read
from convoy.errors import InputError
from convoy.report.sheet import render_sheet

MANIFEST: dict[str, Any] = {"date": "", "target": {}, "versions": {}, "protocol": "", "commit": "", "request": {}}
SPAN = {"name": "conv", "engine": "aten", "stream": 0, "start_us": 0.0, "duration_us": 5.0, "critical": True}
LAYER = {"name": "conv", "engine": "aten", "median_us": 5.0, "flops": 1000, "bytes_min": 100}
FIGURE = {"metric": "latency_ms", "unit": "ms", "p50": 2.0, "p20": 1.0, "p80": 3.0}


def run(kind: str = "compare", detail: object = None, rows: object = None, **manifest: object) -> dict[str, Any]:
    row = {"subject": "net", "provider": "convoy", "figures": [FIGURE], "detail": detail or {}}
    return {"kind": kind, "schema": 1, "manifest": {**MANIFEST, **manifest}, "rows": rows or [row]}


@pytest.mark.parametrize(
    ("kind", "detail"),
    [
        ("compare", {"timeline": [{**SPAN, "stream": "<script>alert(1)</script>"}]}),
        ("compare", {"timeline": [{**SPAN, "stream": 64}]}),
        ("compare", {"timeline": [{**SPAN, "start_us": "0"}]}),
        ("compare", {"timeline": [{**SPAN, "more": 1}]}),
        ("compare", {"timeline": [{"name": "conv"}]}),
        ("compare", {"timeline": {}}),
        ("compare", {"layers": [{**LAYER, "flops": 10**400}]}),
        ("compare", {"layers": [{**LAYER, "median_us": -1}]}),
        ("compare", {"layers": [1]}),
        ("compare", {"peaks": {"flops_fp32": "many"}}),
        ("compare", {"kinds": {"conv": None}}),
        ("compare", {"kinds": [1]}),
        ("compare", {"samples": {"latency_ms": 5}}),
        ("compare", {"samples": {"latency_ms": [1.0] * 20_001}}),
        ("options", {"gain": "much"}),
        ("options", {"role": ["best"]}),
        ("study", {"predicted": "all"}),
        ("scaling", {"noisy": 5}),
    ],
)
def test_details_of_wrong_types_are_refused_and_named(kind: str, detail: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=rf"rows\[0\].detail.{next(iter(detail))}"):
        from_dict(run(kind, detail))


@pytest.mark.parametrize(
    "manifest",
    [
        {"target": []}, {"target": {"name": 1}}, {"versions": {"torch": 2}}, {"versions": []}, {"clocks": {"a": []}},
        {"system": "Linux"}, {"request": 1}, {"notes": "busy"}, {"notes": [1]}, {"date": 1}, {"commit": None},
        {"criteria": {"layers": "5"}}, {"criteria": {"layers": 5, "rules": [1], "check": None, "note": ""}},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_manifests_of_wrong_types_are_refused_and_named(manifest: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"manifest.{next(iter(manifest))}"):
        from_dict(run(**manifest))


def test_what_a_page_shows_is_taken_and_escaped() -> None:
    detail = {
        "timeline": [{**SPAN, "name": "<i>"}],
        "layers": [LAYER],
        "peaks": {"flops_fp32": 1e12, "bytes_per_s": 1e10},
    }
    page = render_sheet(sheet_of([from_dict(run(detail=detail, notes=["<script>"], own={"name": []}))]))
    assert "&lt;i&gt;" in page
    assert "<i>" not in page
    assert page.count("<script") == 1


def test_a_row_that_stands_twice_among_many_is_found(tmp_path: Path) -> None:
    rows = [{"subject": f"net{index}", "provider": "a"} for index in range(30_000)]
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run(rows=[*rows, rows[7]])))
    with pytest.raises(InputError, match=r"net7 .*each row once"):
        read(path)


def test_numbers_that_nothing_can_be_computed_with_are_refused() -> None:
    for value in (10**400, 1e31, float("inf"), float("nan"), True, "1"):
        with pytest.raises(InputError, match=r"figures\[0\].p50"):
            from_dict(run(rows=[{"subject": "net", "provider": "a", "figures": [{**FIGURE, "p50": value}]}]))
    zero = from_dict(
        run(rows=[{"subject": "net", "provider": "a", "figures": [{**FIGURE, "p50": 0, "p20": 0, "p80": 0}]}])
    )
    with pytest.raises(InputError, match=r"docs/how-to/compare\.md"):
        sheet_of([zero])


@pytest.mark.parametrize("rules", [["  " * i + f"a{i} <= 1:" for i in range(100)], ["no rule"], ["else:"]])
def test_criteria_that_are_no_rules_are_refused(rules: list[str]) -> None:
    with pytest.raises(InputError, match="no rule of criteria"):
        sheet_of([from_dict(run("study", criteria={"layers": 5, "rules": rules, "check": None, "note": ""}))])


def test_a_curve_of_too_many_points_is_refused() -> None:
    rows = [
        {
            "subject": "sweep:c",
            "provider": f"a{i}",
            "mode": "fprop",
            "axes": {"c": i},
            "figures": [{**FIGURE, "metric": "time_us"}],
        }
        for i in range(1000)
    ]
    with pytest.raises(InputError, match="points a curve"):
        sheet_of([from_dict(run("study", rows=rows))])
