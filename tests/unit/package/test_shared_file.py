"""One file, many readers: weights are its own pages, in several processes at once; nothing stays of a net that is gone."""

from __future__ import annotations

import gc
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import convoy
from convoy.package.archive import write_archive
from tests.unit.package.conftest import X

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")

READER = """
import hashlib, sys
import torch
import convoy

net = convoy.open(sys.argv[1], trust=sys.argv[2] == "trust")
print("opened", flush=True)
sys.stdin.readline()
x = torch.randn(2, 3, 17, 15, generator=torch.Generator().manual_seed(1))
print(hashlib.sha256(net(x).numpy().tobytes()).hexdigest(), flush=True)
"""


def mapped(path: Path) -> list[tuple[int, int]]:
    """Where a file lies in this process's memory."""
    found: list[tuple[int, int]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(f" {path}"):
            begin, _, end = line.partition(" ")[0].partition("-")
            found.append((int(begin, 16), int(end, 16)))
    return found


@pytest.mark.parametrize("trust", [True, False])
def test_constants_are_the_pages_of_the_file(damaged: Path, trust: bool) -> None:
    net = convoy.open(damaged, trust=trust)
    net(X)
    steps = net.programs[0].runnable.bound.steps  # type: ignore[union-attr]
    places = [one.data_ptr() for step in steps for one in step.constants if isinstance(one, torch.Tensor)]
    (mapping,) = mapped(damaged.resolve())
    assert places
    assert all(mapping[0] <= place < mapping[1] for place in places)


def test_two_processes_open_one_file_and_it_is_replaced_meanwhile(damaged: Path) -> None:
    expected = hashlib.sha256(convoy.open(damaged)(X).numpy().tobytes()).hexdigest()
    pipe = subprocess.PIPE
    readers = [
        subprocess.Popen([sys.executable, "-c", READER, damaged, trust], stdin=pipe, stdout=pipe, text=True)
        for trust in ("trust", "without")
    ]
    for reader in readers:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "opened\n"
    write_archive(damaged, [("manifest.json", [b"{}"])])
    assert [reader.communicate("\n", timeout=60)[0].strip() for reader in readers] == [expected, expected]


def state() -> tuple[int, int, int]:
    """Resident bytes, open files and mappings of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    mappings = len(Path("/proc/self/maps").read_text().splitlines())
    return pages * os.sysconf("SC_PAGE_SIZE"), len([*Path("/proc/self/fd").iterdir()]), mappings


def test_a_thousand_cycles_leak_nothing(portable: Path) -> None:
    def cycle() -> None:
        convoy.open(portable, trust=True)(X)

    for _ in range(100):
        cycle()
    gc.collect()
    before = state()
    for _ in range(1000):
        cycle()
    gc.collect()
    after = state()
    assert after[1] == before[1]
    assert after[2] - before[2] < 20
    assert after[0] - before[0] < 8 << 20, "one leaked block of memory a cycle would be more"
