"""The page of runs in headless Chromium, at phone and desktop width: no errors, no requests, sorted by keyboard, printed."""

from __future__ import annotations

import shutil
from pathlib import Path

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


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium on the path")
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_of_runs_in_a_browser(tmp_path: Path, width: int, scheme: str) -> None:
    from playwright.sync_api import sync_playwright

    from convoy.compare.runs.run_page import sheet_of
    from convoy.report.sheet import write_sheet
    from tests.unit.compare.examples import HOSTILE, compare_run, options_run, scaling_run, study_run

    page_file = tmp_path / "page.html"
    write_sheet(sheet_of([compare_run(), options_run(), study_run(), scaling_run()]), page_file)
    messages: list[str] = []
    requests: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page = context.new_page()
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(page_file.as_uri())
        names = page.locator("table").first.locator("tbody td:first-child")
        assert names.all_inner_texts() == ["convoy", "onnxruntime", "torch", "jax", f"own {HOSTILE}"]
        page.keyboard.press("Tab")  # to the table, which scrolls by the arrow keys where it is wide
        page.keyboard.press("Tab")  # to its first heading
        page.keyboard.press("Enter")
        assert names.all_inner_texts() == sorted(names.all_inner_texts())
        assert page.locator("th[aria-sort=ascending]").inner_text().startswith("framework")
        bar = page.locator("svg.bar rect").first.bounding_box()
        assert bar is not None
        assert bar["width"] > 20
        assert page.locator("svg circle.point").count() == 3
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.emulate_media(media="print")
        assert page.evaluate("document.querySelectorAll('footer dl').length") == 4
        colour = "getComputedStyle(document.body).backgroundColor"
        page.emulate_media(media="screen")
        assert (page.evaluate(colour) == "rgb(255, 255, 255)") == (scheme == "light")
        if width == 1280:
            assert len(page.pdf()) > 10_000
        browser.close()
    assert messages == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
