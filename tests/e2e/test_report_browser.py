"""The report in headless Chromium: no errors, no requests, hostile strings stay text, tables sort, phones need no scrolling."""

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
def test_the_report_in_a_browser(tmp_path: Path, width: int, scheme: str) -> None:
    from playwright.sync_api import sync_playwright

    from convoy.report import write_html
    from tests.unit.report.example import summary

    page_file = tmp_path / "report.html"
    write_html(summary(), page_file)
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
        assert page.title().startswith("Convoy: <script>")
        times = "#layers tbody td:nth-child(4)"
        page.focus("#layers th:nth-child(4) button")
        page.keyboard.press("Enter")
        assert page.locator(times).all_inner_texts() == ["10.0", "20.0", "30.0"]
        page.keyboard.press("Enter")
        assert page.locator(times).all_inner_texts() == ["30.0", "20.0", "10.0"]
        assert page.locator("svg").count() == 2
        assert page.locator("svg circle.point").count() == 3
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        browser.close()
    assert messages == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
