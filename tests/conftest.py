"""What all tests share: those that need an NVIDIA GPU are skipped, with a reason, where there is none."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

ROOT = str(Path(__file__).parents[1])


def pytest_configure() -> None:
    """What holds for the whole run."""
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
