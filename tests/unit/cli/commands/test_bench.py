"""convoy bench: programs of plans as batch sizes. A package's are in tests/unit/package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from convoy.cli.command_parts.bench_net import batch_sizes
from convoy.problem import TensorSpec
from tests.e2e.command import Command


def specs(*texts: str) -> list[tuple[TensorSpec, ...]]:
    return [tuple(map(TensorSpec.parse, text.split(" "))) for text in texts]


def test_programs_are_known_by_their_batch_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    found = batch_sizes(specs("fp32[8,3,9,9]", "fp32[1,3,9,9]", "fp32[1,3,7,7]", "fp32[8,3,9,9]"), is_batch=True)
    assert found == {8: 0, 1: 1}
    assert "another size: fp32[1,3,7,7]" in capsys.readouterr().err
    assert batch_sizes(specs("fp32[4,3] fp32[4]"), is_batch=True) == {4: 0}
    assert batch_sizes(specs("fp32[4,3] fp32[2]"), is_batch=True) == {1: 0}
    assert batch_sizes(specs("fp32[4,3]"), is_batch=False) == {1: 0}


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONVOY_DB", str(tmp_path / "perf.db"))
    return Command(capsys, monkeypatch)


def test_a_model_is_measured_by_its_plans(command: Command, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten())\n",
        encoding="utf-8",
    )
    plans: list[str] = []
    for batch in ("2", "1"):
        plan = f"net.{batch}.json"
        common = ("net.py:net", "--trust", "--size", "8", "--effort", "none", "--device", "cpu")
        command.works("optimize", *common, "--batch", batch, "--plan", plan)
        plans += ["--plan", plan]
    words = ("--trust", "--device", "cpu", "--seconds", "0.3", "--json")
    found = json.loads(command.works("bench", "net.py:net", *plans, *words))
    assert [one["batch"] for one in found["batches"]] == [1, 2]
    assert "--plan: got nothing" in command.refused("bench", "net.py:net", "--trust")
