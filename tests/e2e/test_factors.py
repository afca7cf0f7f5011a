"""Two processes gather the factors of linear gradients: the averages are right, also when one process cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_averages_of_gathered_factors_are_those_of_float64_also_where_one_process_must_do_without(tmp_path: Path):
    worker = Path(__file__).with_name("factors_worker.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        str(worker),
        str(tmp_path),
    ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    assert {path.name for path in tmp_path.glob("*.done")} == {"0.done", "1.done"}
