"""The commands and programs in README.md, docs/ and examples/ do what the pages say."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import convoy
from convoy.cli.app import app
from convoy.engines.manifest import MANIFEST, RETIRED

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def typed_commands() -> list[Any]:
    """Every indented or fenced line that begins with `convoy`, without its comment, by page."""
    found = []
    for page in PAGES:
        lines = re.findall(r"^(?:    |\$ )?(convoy [a-z-].*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        found += [pytest.param(line, id=f"{page.name}: {line}") for line in lines]
    return found


def parse(words: list[str]) -> Any:
    """The context that the command line makes of some words, up to the point where the command would run."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    return command.make_context("convoy", list(words))


@pytest.mark.parametrize("line", typed_commands())
def test_a_command_on_a_page_is_one_that_the_command_line_takes(line: str) -> None:
    assert parse(shlex.split(line, comments=True)[1:]).command


def test_the_reader_of_the_readme_is_shown_commands_and_a_wrong_one_would_be_seen() -> None:
    assert len([p for p in typed_commands() if p.id.startswith("README")]) >= 3
    with pytest.raises(Exception, match="--speed"):
        parse(["optimize", "alexnet", "--speed"])


def test_make_has_the_targets_that_the_pages_name() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {t for page in PAGES for t in re.findall(r"(?:^    |`)make ([\w-]+)", page.read_text(), re.MULTILINE)}
    assert {"demo", "test", "venv"} <= named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_that_are_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[\w-]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_public_name_is_on_the_reference_page() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    described = {name.rpartition(".")[2] for name in re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)}
    described |= set(re.findall(r"^      heading: convoy\.(\w+)$", page, re.MULTILINE))
    described |= {name for names in re.findall(r"members: \[(.*?)\]", page) for name in names.split(", ")}
    assert set(convoy.__all__) - {"__version__"} <= described


def test_pages_that_the_sources_name_are_there() -> None:
    named = {
        (path.relative_to(ROOT).as_posix(), page)
        for folder in ("src", "bench", "tests")
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in {".py", ".c", ".h", ".cu", ".cuh"}
        for page in re.findall(r"docs/[\w/-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 20
    assert [(path, page) for path, page in named if not (ROOT / page).exists()] == []


def test_every_environment_variable_is_on_the_page_of_process_state() -> None:
    page = (ROOT / "docs" / "concepts" / "process-state.md").read_text(encoding="utf-8")
    read = r"environ(?:ment)?(?:\.get\(|\[)\s*\"([A-Z_]+)\""
    named = {name for path in (ROOT / "src").rglob("*.py") for name in re.findall(read, path.read_text("utf-8"))}
    assert "CONVOY_DB" in named
    assert sorted(name for name in named if f"`{name}`" not in page) == []


def test_every_engine_is_on_a_page_and_the_retired_ones_with_their_reasons() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "kernels").glob("*.md")))
    overview = (ROOT / "docs" / "concepts" / "engines.md").read_text(encoding="utf-8")
    assert [engine for engine in MANIFEST if f"`{engine}`" not in pages + overview] == []
    rows = re.findall(
        r"^\| `([\w.]+)` \| (.+) \|$", overview.split("| retired | reason |")[1].split("\n\n")[0], re.MULTILINE
    )
    assert {engine: reason.replace("`", "") for engine, reason in rows} == RETIRED


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder; the database in it spares the second program the measurements of the first."""
    return tmp_path_factory.mktemp("reader")


UNMEASURED = """import functools
import convoy
convoy.optimize = functools.partial(convoy.optimize, settings=convoy.Settings(effort="none"))
"""
"""What is put before a program: the demo measures, as `tests/e2e` do, and here it would take minutes."""

ARGUMENTS = {"demo.py": ("10",)}
"""Words behind an example that runs as it is: seconds, of which the demo takes 60 by itself."""


def as_script(path: Path) -> str:
    """A program that runs a script as Python does."""
    return f"import runpy\nrunpy.run_path({str(path)!r}, run_name='__main__')\n"


def run(home: Path, *words: str) -> str:
    """Run Python as a reader would; what it prints."""
    environment = {**os.environ, "CONVOY_DB": str(home / "perf.db")}
    done = subprocess.run(
        [sys.executable, *words], cwd=home, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.xdist_group("reader")
@pytest.mark.timeout(600)
def test_the_readmes_python_runs(home: Path) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    # Where torchvision's wheel is for another build of torch, its own import fails; the model zoo knows how to import it.
    imported = "from convoy.zoo.torchvision_import import import_torchvision\nimport_torchvision()\n"
    program = (
        UNMEASURED
        + imported
        + block
        + "assert y.shape == (1, 1000)\nassert (y - model(x)).abs().max() < 1e-3 * y.abs().max()\n"
    )
    assert "chosen by exact" in run(home, "-c", program)


@pytest.mark.slow
@pytest.mark.xdist_group("reader")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(example: Path, home: Path) -> None:
    started = (
        (str(example), *ARGUMENTS[example.name])
        if example.name in ARGUMENTS
        else ("-c", UNMEASURED + as_script(example))
    )
    said = run(home, *started)
    assert EXPECTED[example.name] in said
    for file in FILES.get(example.name, ()):
        WRITTEN[Path(file).suffix]((home / file).read_text(encoding="utf-8"))


EXPECTED = {
    "quickstart.py": "the same bits after loading: True",
    "demo.py": "speed-up",
    "draw_shapes.py": "64 images each of circle, square, triangle in shapes",
}
"""What each example must say; one without an entry fails its test."""

FILES = {
    "demo.py": ("convoy-demo/alexnet.plan.json", "convoy-demo/report.html", "convoy-demo/alexnet.json"),
}
"""What each example must write."""

WRITTEN = {".json": json.loads, ".html": lambda text: text.index("</html>")}
"""How to see that a file is whole; each raises where it is not. Sizes say nothing: the plan of a net that is kept as it was is
small, and on a busy machine that is the right answer."""
