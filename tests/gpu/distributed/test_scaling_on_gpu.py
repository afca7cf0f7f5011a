"""On a GPU: training scales over the GPUs that are there, two at most."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from convoy.cli.app import app
from convoy.compare import read

pytestmark = pytest.mark.gpu

NET = """
from torch import nn

def net():
    layers = nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    return nn.Sequential(*layers)
"""


@pytest.mark.slow
def test_other_ways_to_train_are_captured_too(tmp_path: Path) -> None:
    """DistributedDataParallel compiled, and gradients in bf16: each is one CUDA graph."""
    (tmp_path / "net.py").write_text(NET)
    out = tmp_path / "run.json"
    words = ["scale", f"{tmp_path / 'net.py'}:net", "--trust", "--gpus", str(min(2, torch.cuda.device_count()))]
    words += ["--batch", "8", "--size", "32", "--dtype", "bf16", "--effort", "none", "--round-s", "0.05"]
    words += ["--providers", "torch.ddp.compiled,torch.ddp+bf16,convoy,convoy+bf16,convoy+bf16_error_feedback"]
    done = CliRunner().invoke(app, [*words, "--timeout-s", "280", "--db", str(tmp_path / "perf.db"), "-o", str(out)])
    assert done.exit_code == 0, done.output
    rows = read(out).rows
    assert all(row.ok for row in rows), [row.reason for row in rows]
    assert "one CUDA graph" in rows[0].setting, rows[0].notes
    for row in rows[2:]:
        assert not any("kernel by kernel" in note or "could not be captured" in note for note in row.notes), row.notes


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_training_scales_over_the_gpus_that_are_there(tmp_path: Path, dtype: str) -> None:
    (tmp_path / "net.py").write_text(NET)
    out = tmp_path / "run.json"
    count = min(2, torch.cuda.device_count())
    words = [
        "scale",
        f"{tmp_path / 'net.py'}:net",
        "--trust",
        "--gpus",
        str(count),
        "--batch",
        "8",
        "--size",
        "32",
        "--dtype",
        dtype,
    ]
    # What tuning does is tested elsewhere; here each process would compile for minutes.
    words += [
        "--effort",
        "none",
        "--round-s",
        "0.05",
        "--timeout-s",
        "280",
        "--db",
        str(tmp_path / "perf.db"),
        "-o",
        str(out),
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    for row in read(out).rows:
        assert row.ok, row.reason
        found = {figure.metric for figure in row.figures}
        assert {"step_ms", "host_ms", "launch_ms", "input_ms", "peak_memory_bytes", "images_per_s"} <= found
        assert row.detail["backend"] == "nccl"
        assert ("link_gb_per_s" in found) == (count > 1)
