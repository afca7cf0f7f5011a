"""convoy layers lists convolutions of every kind, a transposed one from its input to its result."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from convoy.cli.app import app

NETS = """
from torch import nn

def planes():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ConvTranspose2d(4, 2, 2, stride=2), nn.Flatten(), nn.Linear(512, 5))

def volumes():
    return nn.Sequential(nn.Conv3d(3, 4, 3, padding=1), nn.ConvTranspose3d(4, 2, 2, stride=2))
"""


@pytest.mark.parametrize(
    ("net", "layers"),
    [
        ("planes", [("[1,3,8,8]", "[1,4,8,8]"), ("[1,4,8,8]", "[1,2,16,16]"), ("[1,512]", "[1,5]")]),
        ("volumes", [("[1,3,16,8,8]", "[1,4,16,8,8]"), ("[1,4,16,8,8]", "[1,2,32,16,16]")]),
    ],
)
def test_every_kind_is_listed(tmp_path: Path, net: str, layers: list[tuple[str, str]]) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    asked = ["layers", f"{tmp_path}/nets.py:{net}", "--trust", "--size", "8"]
    result = CliRunner().invoke(app, asked, catch_exceptions=False, env={"COLUMNS": "200"})
    lines = [line for line in result.output.splitlines() if "fp32[" in line]
    assert len(lines) == len(layers)
    for line, (read, made) in zip(lines, layers, strict=True):
        assert [word for word in line.split() if word.startswith("fp32[")] == [f"fp32{read}", f"fp32{made}"]
    keys = CliRunner().invoke(app, [*asked, "--keys"], catch_exceptions=False).output.splitlines()
    assert len(keys) == len(layers)
