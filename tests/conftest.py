"""All tests share this: those that need an NVIDIA GPU are skipped, with a reason, where there is none."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

ROOT = str(Path(__file__).parents[1])


def _use_one_gpu() -> None:
    """Where CONVOY_TEST_GPUS lists GPUs, a process of pytest-xdist sees one of them."""
    gpus, worker = os.environ.get("CONVOY_TEST_GPUS"), os.environ.get("PYTEST_XDIST_WORKER", "")
    if gpus and worker.startswith("gw"):
        listed = gpus.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = listed[int(worker[2:]) % len(listed)]


_use_one_gpu()  # before CUDA is asked for anything


def pytest_configure() -> None:
    """Set up the whole run."""
    # A shell that starts the tests in the background has them ignore interrupts, which some tests send themselves.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.pop("COLUMNS", None)  # pytest-xdist sets 80 in its processes: tables would leave columns out
    # Child processes import what tests share as the tests do.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
    if not torch.cuda.is_available():  # no test asks how fast JAX is on a CPU, and so it compiles in half of the time
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip every test marked `gpu` on a machine without one."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords and item.get_closest_marker("gpu"):
            item.add_marker(skip)
