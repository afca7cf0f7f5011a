"""docs/adding-an-engine.md, followed word by word."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import convoy
from convoy.engines.manifest import load_engine
from convoy.measurement.accuracy import judge, make_data
from convoy.measurement.device.detect import detect_target
from tests.unit.engines.conv_cases import SHAPES, variants

PAGE = Path(__file__).parents[3] / "docs" / "adding-an-engine.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
ENTRY = "shifted=my_engine:Shifted"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder on sys.path that holds the page's engine as my_engine.py."""
    path = tmp_path_factory.mktemp("newcomer")
    (path / "my_engine.py").write_text(BLOCKS[0])
    sys.path.insert(0, str(path))
    importlib.invalidate_caches()
    yield path
    sys.path.remove(str(path))
    sys.modules.pop("my_engine", None)
    load_engine.cache_clear()


def test_the_page_holds_an_engine_and_its_uses():
    assert len(BLOCKS) == 3
    assert "ENGINE = Shifted()" in BLOCKS[0]


@pytest.mark.parametrize("index", [1, 2])
def test_the_pages_snippets_run(folder, index, monkeypatch):
    monkeypatch.setenv("CONVOY_DB", str(folder / "perf.db"))
    names = {}
    exec(compile(BLOCKS[index], f"{PAGE.name}, block {index}", "exec"), names)  # the page's own code
    if index == 1:
        assert torch.allclose(names["y"], torch.conv2d(names["x"], names["weight"], padding=1), atol=1e-4)


def test_the_pages_engine_keeps_the_promise(folder):
    engine, target = load_engine("shifted", (ENTRY,)), detect_target("cpu")
    problems = [p for shape in SHAPES.values() for p in variants(shape) if engine.supports(p, target)]
    assert len(problems) > 200
    for problem in problems:
        executable = engine.build(problem, engine.space(problem, target)[0], target)
        assert executable.workspace_bytes == engine.workspace_bytes(problem, convoy.engines()[0].config().knobs)
        for kind in ("integer", "normal"):
            verdict = judge(executable, engine.family, problem, make_data(problem, 1, kind), kind)
            assert verdict.ok, f"{problem} on {kind} data: {verdict.reason}"


def test_the_command_line_finds_it_by_the_environment(folder):
    (command,) = re.findall(r"\$ (convoy engines --problem \S+)", PAGE.read_text())
    environment = {**os.environ, "CONVOY_ENGINES": ENTRY, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", "convoy", *command.split()[1:]],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = [line for line in done.stdout.splitlines() if "shifted" in line]
    assert "yes" in line
