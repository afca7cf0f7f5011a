"""The command line as a user meets it: results, one clear line for each wrong input, nothing overwritten."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.command import Command

FACTORY = """
import torch
from torch import nn

def small():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    return net.eval()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli")
    (path / "net.py").write_text(FACTORY, encoding="utf-8")
    (path / "no_image.png").write_text("not an image", encoding="utf-8")
    (path / "bad.plan.json").write_text("{}", encoding="utf-8")
    return path


def convoy(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CONVOY_DB": str(folder / "perf.db"), "COLUMNS": "140"}
    command = [sys.executable, "-m", "convoy", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=250
    )


def test_help_is_quick_to_import_and_names_every_command() -> None:
    code = (
        "import sys\nfrom convoy.cli.app import app\nimport typer.testing\n"
        "r = typer.testing.CliRunner().invoke(app, ['--help'])\nassert r.exit_code == 0, r.output\n"
        "assert 'torch' not in sys.modules\nprint(r.output)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for command in ("optimize", "run", "explain", "layers", "engines", "db", "doctor"):
        assert command in done.stdout


@pytest.fixture
def inside(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """The same command in this process: a child imports PyTorch for seconds, and one of each kind proves the way there."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CONVOY_DB", str(folder / "perf.db"))
    monkeypatch.setenv("COLUMNS", "140")
    return Command(capsys, monkeypatch)


def test_optimize_run_explain(folder: Path, inside: Command) -> None:
    outputs = ("--plan", "p.json", "--report", "r.html", "--json", "s.json")
    # Without Inductor, which compiles for longer than all the rest takes; `test_commands` has it.
    done = convoy(folder, "optimize", "net.py:small", "--trust", "--size", "16", "--deny-engines", "inductor", *outputs)
    assert done.returncode == 0, done.stderr
    assert "speed-up" in done.stdout
    summary = json.loads((folder / "s.json").read_text(encoding="utf-8"))
    assert summary["rel_l2_error"] < 1e-5
    assert summary["speedup"] >= 0.98
    assert {layer["name"] for layer in summary["layers"]}
    assert "Content-Security-Policy" in (folder / "r.html").read_text(encoding="utf-8")
    assert "the steps' times add up to" in inside.works("explain", "p.json")
    layer = inside.works("explain", "p.json", summary["layers"][0]["name"])
    assert "candidate" in layer
    assert any(line.split()[:1] == ["aten"] for line in layer.splitlines())
    assert "largest output" in inside.works("run", "net.py:small", "--trust", "--plan", "p.json", "--size", "16")


def test_wrong_input_is_one_clear_line_and_exit_code_2(folder: Path, inside: Command) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".db"}
    done = convoy(folder, "engines", "--problem", "conv:what")
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("convoy: --problem: got")
    line = inside.refused("optimize", "net.py:small", "--trust", "--size", "16", "--only-engines", "nobody")
    assert line.startswith("convoy: --only-engines: got")
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".db"}
    assert {name: content for name, content in after.items() if name in before} == before


def test_layers_engines_doctor_db(inside: Command) -> None:
    key = inside.works("layers", "net.py:small", "--trust", "--size", "16", "--keys").splitlines()[0]
    assert key.startswith("conv:fprop:n1c3h16w16k8")
    assert "2 layers" in inside.works("layers", "net.py:small", "--trust", "--size", "16")
    assert "aten" in inside.works("engines", "--problem", key, "--device", "cpu")
    assert "torch" in inside.works("doctor")
    inside.works("db", "info")
