"""Each kind of page in headless Chromium, on a phone and at two desktop widths, light and dark.

No text leaves its box or the page, no chart's text is under 9 pixels or on another one, nothing is asked of a network.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
FIGURES = sorted((Path(__file__).parents[2] / "docs" / "figures").glob("*.svg"))
SCHEMES = {390: "dark", 1100: "light", 1400: "dark"}
"""Colours of each width."""

FAULTS = """
(phone) => {
  const found = new Set();
  const page = document.documentElement;
  if (page.scrollWidth > page.clientWidth) found.add(`the page scrolls: ${page.scrollWidth}`);
  for (const details of document.querySelectorAll("details")) details.open = true;
  if (!phone) {
    for (const box of document.querySelectorAll(".scroll"))
      if (box.scrollWidth > box.clientWidth + 1) found.add(`a table is clipped: ${box.scrollWidth}, ${box.textContent.trim()}`);
  }
  const texts = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode, owner = node.parentElement, said = node.data.trim();
    if (!said || owner.closest("style, script, title")) continue;
    if (said.includes("`")) found.add(`a raw backtick: ${said}`);
    const range = document.createRange();
    range.selectNodeContents(node);
    const text = range.getBoundingClientRect();
    if (!text.width) continue;
    const chart = owner.closest("svg");
    if (chart) {
      const matrix = owner.getScreenCTM();
      const pixels = parseFloat(getComputedStyle(owner).fontSize) * Math.abs(matrix.a);
      if (pixels < 9) found.add(`text of ${pixels.toFixed(1)} pixels: ${said}`);
      texts.push([chart, text, said]);
    }
    const clamped = owner.closest("td.name span");
    if (clamped) {
      const lines = clamped.clientHeight / parseFloat(getComputedStyle(clamped).lineHeight);
      if (lines > 2.1) found.add(`a name in ${lines} lines: ${said}`);
      if (owner.closest("td").title !== owner.closest("td").textContent) found.add(`a name without its whole: ${said}`);
      continue;  // what does not fit is left out with an ellipsis; the title has it
    }
    const around = "td, th, li, dd, dt, p, h1, h2, h3, summary, caption, .card, details";
    const box = (chart || owner.closest(around)).getBoundingClientRect();
    const across = text.left < box.left - 1 || text.right > box.right + 1;
    if (across || (chart && (text.top < box.top - 1 || text.bottom > box.bottom + 1))) found.add(`text leaves its box: ${said}`);
  }
  for (const [chart, a, said] of texts) {
    for (const [other, b, words] of texts) {
      if (chart !== other || said === words) continue;
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 1 && down > 4) found.add(`text on text: ${said}, ${words}`);
    }
  }
  return [...found].map((fault) => fault.slice(0, 160));
}
"""


def write_pages(folder: Path) -> dict[str, Path]:
    """Every kind of page, by its name."""
    from convoy.compare.runs.difference import difference
    from convoy.compare.runs.difference_page import difference_sheet
    from convoy.compare.runs.run_page import sheet_of
    from convoy.report import write_html
    from convoy.report.sheet import write_sheet
    from convoy.report.sparsity import write_sparsity_html
    from tests.unit.compare import page_examples as runs
    from tests.unit.compare.examples import compare_run, options_run
    from tests.unit.report.example import summary
    from tests.unit.report.page_examples import large_sparsity, large_summary

    old, new = runs.changed_runs()
    writers: dict[str, Callable[[Path], None]] = {
        "report": lambda path: write_html(large_summary(), path),
        "hostile": lambda path: write_html(summary(), path),
        "sparsity": lambda path: write_sparsity_html(large_sparsity(), path),
        "compare": lambda path: write_sheet(sheet_of([runs.full_compare_run()]), path),
        "options": lambda path: write_sheet(sheet_of([runs.full_options_run()]), path),
        "study": lambda path: write_sheet(sheet_of([runs.full_study_run()]), path),
        "scaling": lambda path: write_sheet(sheet_of([runs.full_scaling_run()]), path),
        "several": lambda path: write_sheet(
            sheet_of([compare_run(), options_run()], ["a/run.json", "b/run.json"]), path
        ),
        "difference": lambda path: write_sheet(difference_sheet(difference(old, new), old, new), path),
    }
    pages = {name: folder / f"{name}.html" for name in writers}
    for name, write in writers.items():
        write(pages[name])
    pages["figures"] = folder / "figures.html"
    drawn = "".join(path.read_text(encoding="utf-8") for path in FIGURES)
    pages["figures"].write_text(f"<!doctype html><meta charset=utf-8>{drawn}", encoding="utf-8")
    return pages


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], Any]]:
    """Opens a page by its name in a tab of some width; the page's errors and requests stand in `messages` of the tab."""
    if CHROMIUM is None:
        pytest.skip("needs Debian's chromium on the path")
    from playwright.sync_api import sync_playwright

    pages = write_pages(tmp_path_factory.mktemp("pages"))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        tabs: dict[int, Any] = {}

        def open_page(name: str, width: int) -> Any:
            if width not in tabs:
                context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=SCHEMES[width])
                tabs[width] = tab = context.new_page()
                tab.messages = messages = []
                tab.on("console", lambda message: messages.append(message.text))
                tab.on("pageerror", lambda error: messages.append(str(error)))
                tab.on("request", lambda sent: sent.url.startswith(("file:", "data:")) or messages.append(sent.url))
            tabs[width].goto(pages[name].as_uri())
            return tabs[width]

        yield open_page
        browser.close()


KINDS = ["report", "sparsity", "compare", "options", "study", "scaling", "several", "difference"]


@pytest.mark.browser
@pytest.mark.parametrize("width", SCHEMES)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_clipped_and_charts_are_legible(opened: Callable[[str, int], Any], kind: str, width: int) -> None:
    tab = opened(kind, width)
    light = tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert light == (SCHEMES[width] == "light")
    assert tab.evaluate(FAULTS, width < 1000) == []
    assert tab.messages == []


@pytest.mark.browser
def test_no_text_of_the_documentations_figures_is_clipped(opened: Callable[[str, int], Any]) -> None:
    tab = opened("figures", 1100)
    assert tab.locator("svg").count() == len(FIGURES) > 5
    assert tab.evaluate(FAULTS, True) == []


@pytest.mark.browser
def test_the_report_sorts_and_labels_its_dots(opened: Callable[[str, int], Any]) -> None:
    tab = opened("hostile", 1100)
    assert tab.title().startswith("Convoy: <script>")
    times = "#layers tbody td:nth-child(4)"
    tab.focus("#layers th:nth-child(4) button")
    tab.keyboard.press("Enter")
    assert tab.locator(times).all_inner_texts() == ["10.0", "20.0", "30.0"]
    tab.keyboard.press("Enter")
    assert tab.locator(times).all_inner_texts() == ["30.0", "20.0", "10.0"]
    assert tab.locator("svg.wide circle.point").count() == 3
    assert tab.locator("svg.wide text.number").all_text_contents() == ["1", "2", "3"]
    assert [line.partition("<")[0] for line in tab.locator("ol.key li b").all_inner_texts()] == [
        "conv0",
        "conv2",
        "conv1",
    ]


@pytest.mark.browser
def test_a_table_of_runs_sorts_by_the_keyboard_with_the_lines_under_its_rows(opened: Callable[[str, int], Any]) -> None:
    from tests.unit.compare.examples import HOSTILE

    tab = opened("several", 1100)
    body = tab.locator("table").first.locator("tbody")
    names = body.locator("tr:not(.under) td:first-child")
    assert names.all_inner_texts() == ["convoy", "onnxruntime", "torch", "jax", f"own {HOSTILE}"]
    tab.focus("a[href='#run-2']")
    tab.keyboard.press("Tab")  # to the table, which scrolls by the arrow keys where it is wide
    tab.keyboard.press("Tab")  # to its first heading
    tab.keyboard.press("Enter")
    assert names.all_inner_texts() == sorted(names.all_inner_texts())
    assert tab.locator("th[aria-sort=ascending]").inner_text().startswith("framework")
    lines = body.locator("tr").all_inner_texts()
    at = next(index for index, line in enumerate(lines) if line.startswith("jax"))
    assert lines[at + 1].startswith("jax not installed")
    bar = tab.locator("svg.bar rect").first.bounding_box()
    assert bar is not None
    assert bar["width"] > 20
    tab.emulate_media(media="print")
    assert len(tab.pdf()) > 10_000
    tab.emulate_media(media="screen")
