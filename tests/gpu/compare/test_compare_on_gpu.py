"""On a GPU: frameworks are built side by side and timed in turn, with energy and their graphs' memory; options are tried."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from convoy.cli.app import app
from convoy.compare import read

pytestmark = pytest.mark.gpu

NET = """
from torch import nn

def net():
    layers = nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
"""


def run(folder: Path, *words: str) -> Path:
    """A command on the net; its run file."""
    (folder / "net.py").write_text(NET)
    out = folder / "run.json"
    every = [
        "compare",
        f"{folder / 'net.py'}:net",
        "--trust",
        "--device",
        "cuda",
        "--size",
        "64",
        "--run",
        str(out),
        *words,
    ]
    done = CliRunner().invoke(app, every)
    assert done.exit_code == 0, done.output
    return out


@pytest.mark.slow
@pytest.mark.parametrize("mode", [["--dtype", "fp16"], ["--dtype", "bf16", "--train"]], ids=["inference", "training"])
def test_frameworks_side_by_side(tmp_path: Path, mode: list[str]) -> None:
    words = ["--frameworks", "torch,inductor,convoy", "--batch", "4,8", "--time-s", "10", *mode]
    rows = read(run(tmp_path, *words, "--db", str(tmp_path / "perf.db"))).rows
    assert {(row.provider, row.batch): (row.status, row.reason) for row in rows} == {
        (name, batch): ("ok", "") for name in ("torch", "inductor", "convoy") for batch in (4, 8)
    }
    for row in rows:
        assert row.detail["timed"] == "in turn"
        assert "provisional" not in row.detail
        energy, memory = row.figure("energy_j"), row.figure("peak_memory_bytes")
        assert energy is None or 0 < energy.p50 < 100
        assert memory is not None
        assert 4 * 3 * 64 * 64 * 2 < memory.p50 < 1 << 32
    assert sum(1 for row in rows if row.detail.get("kinds")) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("mode", [[], ["--train"]], ids=["inference", "training"])
def test_options_one_by_one(tmp_path: Path, mode: list[str]) -> None:
    tried = "channels_last,cudnn_benchmark,autocast_bf16,cuda_graph,cudnn" + (",fused_optimizer" if mode else "")
    rows = {row.provider: row for row in read(run(tmp_path, "--batch", "8", "--options", tried, *mode)).rows}
    for name, row in rows.items():
        assert row.ok, f"{name}: {row.status}: {row.reason}"
    assert {"defaults", "best", "alone: cudnn_benchmark", "alone: cuda_graph", "without: cudnn"} <= set(rows)
    steps = {row.detail["option"] for row in rows.values() if row.detail.get("kept")}
    assert {f"+ {option}, kept" for option in rows["best"].detail["options"]} <= steps
