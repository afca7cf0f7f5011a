"""The command line as a user meets it: results, one clear line for each wrong input, nothing overwritten."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
        "import sys\nfrom convoy.cli.commands import app\nimport typer.testing\n"
        "r = typer.testing.CliRunner().invoke(app, ['--help'])\nassert r.exit_code == 0, r.output\n"
        "assert 'torch' not in sys.modules\nprint(r.output)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for command in ("optimize", "run", "explain", "layers", "engines", "db", "doctor"):
        assert command in done.stdout


def test_optimize_run_explain(folder: Path) -> None:
    outputs = ("--plan", "p.json", "--report", "r.html", "--json", "s.json")
    done = convoy(folder, "optimize", "net.py:small", "--trust", "--size", "16", *outputs)
    assert done.returncode == 0, done.stderr
    assert "speed-up" in done.stdout
    summary = json.loads((folder / "s.json").read_text(encoding="utf-8"))
    assert summary["rel_l2_error"] < 1e-5
    assert summary["speedup"] >= 0.98
    assert {layer["name"] for layer in summary["layers"]}
    assert "Content-Security-Policy" in (folder / "r.html").read_text(encoding="utf-8")
    explained = convoy(folder, "explain", "p.json")
    assert explained.returncode == 0
    assert "the steps' times add up to" in explained.stdout
    name = summary["layers"][0]["name"]
    layer = convoy(folder, "explain", "p.json", name)
    assert layer.returncode == 0, layer.stderr
    assert "candidate" in layer.stdout
    assert any(line.split()[:1] == ["aten"] for line in layer.stdout.splitlines())
    ran = convoy(folder, "run", "net.py:small", "--trust", "--plan", "p.json", "--size", "16")
    assert ran.returncode == 0, ran.stderr
    assert "largest output" in ran.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("optimize", "net.py:small", "--trust", "--size", "16", "--only-engines", "nobody"), "--only-engines: got"),
        (("engines", "--problem", "conv:what"), "--problem: got"),
    ],
)
def test_wrong_input_is_one_clear_line_and_exit_code_2(folder: Path, words: tuple[str, ...], expected: str) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".db"}
    done = convoy(folder, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("convoy: ")
    assert expected in lines[0]
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".db"}
    assert {name: content for name, content in after.items() if name in before} == before


def test_layers_engines_doctor_db(folder: Path) -> None:
    listed = convoy(folder, "layers", "net.py:small", "--trust", "--size", "16", "--keys")
    key = listed.stdout.splitlines()[0]
    assert key.startswith("conv:fprop:n1c3h16w16k8")
    assert "2 layers" in convoy(folder, "layers", "net.py:small", "--trust", "--size", "16").stdout
    assert "aten" in convoy(folder, "engines", "--problem", key, "--device", "cpu").stdout
    assert "torch" in convoy(folder, "doctor").stdout
    assert convoy(folder, "db", "info").returncode == 0
