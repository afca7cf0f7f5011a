"""Engines with oneDNN's, torch's and our own instruction sets limited to each level that this CPU has, a process for each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from convoy.engines.compilers.host_compiler import compiler
from convoy.engines.compilers.instruction_sets import cpu_flags, kernel_levels, onednn_levels

CHILD = Path(__file__).with_name("isa_child.py")
LEVELS = {
    "sse41": ("sse4", "default", 4),
    "avx2": ("avx2", "avx2", 8),
    "avx512_core": ("avx512", "avx512", 16),
    "avx512_core_bf16": ("avx512_bf16", "avx512", 16),
    "avx512_core_amx": ("amx", "avx512", 16),
}
"""oneDNN's level, with ours, torch's, and the floats of a register."""

HERE = [level for level in LEVELS if level in onednn_levels(cpu_flags(), "")]


@pytest.mark.skipif(not HERE, reason="not an x86 CPU")
@pytest.mark.parametrize("level", HERE)
def test_engines_are_exact_on_integers_at_every_level_that_the_cpu_has(level):
    ours, torchs, lanes = LEVELS[level]
    limits = {"ONEDNN_MAX_CPU_ISA": level.upper(), "CONVOY_MAX_CPU_ISA": ours, "ATEN_CPU_CAPABILITY": torchs}
    done = subprocess.run(
        [sys.executable, str(CHILD)], capture_output=True, text=True, check=False, env={**os.environ, **limits}
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == []
    assert found["onednn"][-1] == level
    assert found["lanes"] == lanes
    assert min(found["ran"].values()) >= 2
    assert {"aten", "onednn", "gemm"} <= set(found["ran"])
    assert not compiler() or {"cpu.direct", "cpu.depthwise", "cpu.grouped", "cpu.winograd"} <= set(found["ran"])
    assert not compiler() or ("cpu.direct_bf16" in found["ran"]) == (ours in ("avx512_bf16", "amx"))
    newest_of_ours = kernel_levels(cpu_flags(), "")[-1]
    assert (found["march"] == "-march=native") == (ours == newest_of_ours)
    limited = level != onednn_levels(cpu_flags(), "")[-1]
    assert found["versions"].get("onednn_max_cpu_isa", "") == (level if limited else "")
