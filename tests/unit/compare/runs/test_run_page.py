"""Runs as a sheet: what is fastest stands first, failures say why, hostile names stay text, the terminal shows the same."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from convoy.cli.app import app
from convoy.compare.runs.rows import Figure
from convoy.compare.runs.run_page import sheet_of
from convoy.compare.runs.runfile import Run, write
from convoy.errors import InputError
from convoy.report.roofline import roofline
from convoy.report.sheet import Cell, Part, print_sheet, render_sheet
from tests.unit.compare.examples import HOSTILE, compare_run, options_run, scaling_run, study_run
from tests.unit.compare.page_examples import full_scaling_run

ALL = [compare_run(), options_run(), study_run(), scaling_run()]


def test_frameworks_by_rising_latency_failures_last_with_their_reason() -> None:
    (table,) = sheet_of([compare_run()]).sections[1].tables
    assert [row[0].text for row in table.rows] == ["convoy", "onnxruntime", "torch", "jax", f"own {HOSTILE}"]
    over = table.heads.index("over best")
    assert [row[over].text for row in table.rows] == ["1.00x", "1.33x", "2.00x", "", ""]
    assert table.rows[1][2].text == "4.000 noisy"
    assert table.rows[3][1].text == "absent"
    assert "pip install" in table.rows[3][-1].text


def test_tables_of_the_page_have_percentiles_and_the_terminal_has_not() -> None:
    (table,) = sheet_of([compare_run()]).sections[1].tables
    at = table.heads.index("20 %")
    assert table.heads[at : at + 2] == ("20 %", "80 %")
    assert not {"99 %", "call ms", "replay ms"} & set(table.heads)  # these rows have no such figures
    assert [cell.text for cell in table.rows[0][at : at + 2]] == ["14.500", "15.500"]
    assert {at, at + 1} <= set(table.page_only)
    assert {len(row) for row in table.rows} == {len(table.heads)}
    run = compare_run()
    more = (Figure.once("latency_p99_ms", "ms", 19.0), Figure.once("replay_ms", "ms", 7.0))
    run = replace(run, rows=(replace(run.rows[0], figures=(*run.rows[0].figures, *more)), *run.rows[1:]))
    (table,) = sheet_of([run]).sections[1].tables
    assert [row[table.heads.index("99 %")].text for row in table.rows] == ["", "", "19.000", "", ""]
    assert [row[table.heads.index("replay ms")].text for row in table.rows] == ["", "", "7.000", "", ""]
    assert "call ms" not in table.heads
    for table in next(s for s in sheet_of([options_run()]).sections if s.title.startswith("Options")).tables:
        assert table.heads[3:5] == ("20 %", "80 %")
        assert {len(row) for row in table.rows} == {len(table.heads)}


def test_criteria_are_on_the_page_with_how_good_they_are() -> None:
    assert "Criteria" not in [section.title for section in sheet_of([study_run()]).sections]
    about = {
        "layers": 42,
        "rules": ["gemm_n <= 80:", "  gemm (0 %) [30 layers]", "else:", "  fft (2 %) [12 layers]"],
        "check": {"layers": 9, "within_5": 0.9, "within_10": 1.0, "mean": 0.98},
        "note": "",
    }
    run = replace(study_run(), manifest={**study_run().manifest, "criteria": about})
    section = next(section for section in sheet_of([run]).sections if section.title == "Criteria")
    assert "42 layers" in section.lines[0]
    assert "within 5 % of the best on 90.0% of 9 layers" in section.lines[1]
    assert [[cell.text for cell in row] for row in section.tables[0].rows] == [
        ["gemm_n <= 80", "gemm (0 %)", "30"], ["gemm_n > 80", "fft (2 %)", "12"],
    ]  # fmt: skip
    unknown = {**about, "check": None, "note": "too few swept layers to check them"}
    run = replace(run, manifest={"criteria": unknown})
    assert "criteria: too few swept layers to check them" in render_sheet(sheet_of([run]))
    with pytest.raises(InputError):
        sheet_of([replace(run, manifest={"criteria": {**about, "rules": ["nonsense"]}})])


def test_every_algorithm_of_a_study_is_on_the_page_alone(capsys: pytest.CaptureFixture[str]) -> None:
    sheet = sheet_of([study_run()])
    section = next(section for section in sheet.sections if section.title.startswith("Every algorithm"))
    assert len(section.tables[0].rows) == len(study_run().rows)
    print_sheet(sheet)
    assert "6 lines, on the page alone" in capsys.readouterr().out


def test_several_runs_are_named_by_their_files(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["old/compare.json", "new/options.json", "study.json", "scaling.json"]
    sheet = sheet_of(ALL, names)
    assert sheet.title == "4 runs"
    for name, part in zip(names, sheet.parts, strict=True):
        assert part.title.startswith(f"{name}: ")
        assert len(part.manifests) == 1
    assert [part.title for part in sheet_of(ALL[:2]).parts] == [
        "run 1: Frameworks side by side: resnet50",
        "run 2: Options of PyTorch: alexnet",
    ]
    page = render_sheet(sheet).replace("<wbr>", "")
    assert page.count('<a href="#run-') == page.count('<article id="run-') == 4
    assert '<h2 class="run">old/compare.json: Frameworks side by side: resnet50</h2>' in page
    print_sheet(sheet)
    assert "== new/options.json: Options of PyTorch: alexnet ==" in capsys.readouterr().out
    (alone,) = [sheet_of(ALL[:1], names[:1])]
    assert alone.title == "Frameworks side by side: resnet50"
    assert not alone.parts


def test_a_scaling_run_on_a_cpu_counts_processes() -> None:
    run = full_scaling_run()
    cpu = replace(run, manifest={**run.manifest, "target": {"name": "a CPU", "device": "cpu"}})
    for found, unit, other in ((run, "GPUs", "processes"), (cpu, "processes", "GPUs")):
        sheet = sheet_of([found])
        said = render_sheet(sheet).partition("<main>")[2].partition('<div class="manifest">')[0]
        assert sheet.title == f"Training on several {unit}: resnet50"
        assert f"images per second over {unit}" in said
        assert other not in said


def test_long_texts_stand_under_their_row() -> None:
    (table,) = sheet_of([compare_run()]).sections[1].tables
    assert table.heads[table.under or 0] == "setting, or why not"
    assert table.under not in table.beside
    text = render_sheet(sheet_of([compare_run()]))
    assert text.count('<tr class="under">') == 5
    assert '<p class="about">latency: median of one call' in text
    assert "replay:" not in text, "a column that is not there"
    assert "<caption><div> Under each row: setting, or why not.</div></caption>" in text


def test_what_is_read_first() -> None:
    sheet, options, *_ = sheet_of(ALL).parts
    assert [card.figure for card in (*sheet.cards, *options.cards)] == ["15 ms", "2.00x"]
    assert "1.33x ahead of onnxruntime" in sheet.cards[0].words
    titles = [section.title for section in sheet.sections]
    assert titles[0] == "What you should know"
    assert any(title.startswith("Roofline") for title in titles)
    assert any(title.startswith("Time by layer kind") for title in titles)
    (timeline,) = next(section for section in sheet.sections if section.title.startswith("Timeline")).pictures
    assert timeline.count("<rect") == 2 * 3  # once for a page, once for a phone
    assert timeline.count('class="critical"') == 2
    assert HOSTILE not in timeline
    lines = next(s for s in options.sections if s.title.startswith("Options")).lines
    assert lines == ("2.0x from options alone: compile",)
    notes = next(s for s in sheet.sections if s.title.startswith("resnet50 batch 1 fp32 inference")).lines
    assert "convoy: a note" in notes
    assert "timed alone and not in turn with the others: torch" in notes


def test_the_page_escapes_and_lets_nothing_in() -> None:
    text = render_sheet(sheet_of(ALL))
    assert HOSTILE not in text
    assert "&lt;script&gt;alert" in text
    assert re.search(r"default-src &#39;none&#39;; script-src &#39;sha256-", text)
    assert "style=" not in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert text.count("<table") == text.count("</table>") > 5


def test_every_kind_has_a_page_and_an_empty_run_too() -> None:
    for run in ALL:
        assert sheet_of([run]).sections
        assert "How it was measured" in render_sheet(sheet_of([Run(run.kind, {}, ())]))


@pytest.mark.parametrize(
    "detail",
    [
        {"kinds": 3},
        {"kinds": {"conv": "x"}},
        {"layers": [{}], "peaks": {"bytes_per_s": 1.0}},
        {"timeline": [{"name": 1}]},
    ],
)
def test_a_detail_that_is_none_is_an_error_that_says_so(detail: dict[str, Any]) -> None:
    row = replace(compare_run().rows[0], detail=detail)
    with pytest.raises(InputError, match=r"docs/how-to/compare\.md"):
        sheet_of([Run("compare", {}, (row,))])


def test_the_terminal_shows_tables_without_bars_and_without_control_sequences(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_sheet(sheet_of(ALL))
    said = capsys.readouterr().out
    assert "pip install" in said
    assert "2.0x from options alone" in said
    assert "<svg" not in said
    assert "\x1b" not in said


def test_a_bar_never_leaves_its_field() -> None:
    cell = Cell("", 1.0, bar=(Part(0.7, 0, "a"), Part(0.7, 1, "b<")), spread=(0.5, 1.7))
    widths = [float(word) for word in re.findall(r'width="([\d.]+)%"', cell.picture)]
    assert sum(widths) == pytest.approx(100)
    assert 'x2="100.00%"' in cell.picture
    assert "b&lt;" in cell.picture


def test_no_roofline_without_layers_or_ceilings() -> None:
    layer = {"name": "a", "engine": "e", "median_us": 1.0, "flops": 10, "bytes_min": 10}
    assert roofline([], {"bytes_per_s": 1.0, "flops_fp32": 1.0}, "fp32") == ""
    assert roofline([layer], {}, "fp32") == ""
    assert roofline([layer], {"bytes_per_s": 1e9, "flops_fp32": 1e10}, "fp16").count("<circle") == 1


def test_the_command_writes_one_page_for_several_runs(tmp_path: Path) -> None:
    paths = []
    for run in ALL:
        paths.append(tmp_path / f"{run.kind}.json")
        write(run, paths[-1])
    done = CliRunner().invoke(app, ["report", *map(str, paths), "-o", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "page.html").read_text()
    for path in paths:
        assert f"<dt>file</dt><dd>{path}</dd>" in page
        assert f"== {path}: " in " ".join(done.output.split())
