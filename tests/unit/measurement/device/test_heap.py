"""Freed memory stays in the process where the C library can do that."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from convoy.measurement.device.heap import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory() and keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(1 << 20) for _ in range(20)]
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


def page_faults(how):
    command = [sys.executable, "-c", FAULTS, how]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
def test_tensors_that_come_and_go_cost_no_page_faults():
    # 20 tensors of 1024 pages; the heap may grow by one of them while it is measured.
    assert page_faults("keep") <= 2048 < page_faults("leave")
