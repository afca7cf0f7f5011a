"""Two processes train in bf16 with several buckets: the bits of DistributedDataParallel, and a plan that one process replays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_gradients_that_are_cast_and_sent_by_bucket_are_those_of_pytorch(tmp_path: Path):
    worker = Path(__file__).with_name("buckets_worker.py")
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
