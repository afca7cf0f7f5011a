"""A sheet on the terminal and as a page: what is a picture alone stands on the page only."""

from __future__ import annotations

import pytest

from convoy.report.sheet import Cell, Section, Sheet, Table, print_sheet, render_sheet, table_of

SHEET = Sheet(
    "Title",
    sections=(
        Section("Roofline alone", pictures=("<svg></svg>",)),
        Section("Timeline with words", pictures=("<svg></svg>",), about=("what the picture shows <b>",)),
        Section("Empty"),
        Section("Wide table", tables=(Table(("head",), ((Cell("too wide"),),), "caption", page_only=(0,)),)),
        Section("Lines", ("a line",), pictures=("<svg></svg>",)),
        Section("Figures", tables=(table_of(("head",), (("field",),)),)),
        Section("Terminal", terminal=("for the terminal",)),
    ),
)


def test_the_terminal_has_no_headings_over_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    print_sheet(SHEET)
    said = capsys.readouterr().out
    for absent in ("Roofline alone", "Timeline with words", "what the picture shows", "Empty", "Wide table", "caption"):
        assert absent not in said
    for shown in ("Lines", "a line", "Figures", "field", "Terminal", "for the terminal"):
        assert shown in said


def test_the_page_has_all_sections_and_the_words_on_their_pictures() -> None:
    text = render_sheet(SHEET)
    for section in SHEET.sections:
        assert f"<h2>{section.title}</h2>" in text
    assert '<p class="about">what the picture shows &lt;b&gt;</p>' in text
