"""A captured step with NCCL: all-reduces inside the graph, beside the backward pass, on as many GPUs as there are (two at most).

With one GPU there is one process, whose all-reduces go to itself: they are captured all the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_overlapped_averages_have_the_bits_of_late_ones_and_are_one_graph(tmp_path: Path):
    processes = min(2, torch.cuda.device_count())
    worker = Path(__file__).with_name("overlap_worker.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*command, str(worker), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "4"},
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-20000:]  # torchrun has the last word, and a worker the one that counts
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(processes)]
    for one in found:
        assert one["graphs"] == [True, True]
        assert min(one["streams"]) > 1
        assert one["ends"]["overlapped"] == one["ends"]["apart"] == found[0]["ends"]["apart"]
