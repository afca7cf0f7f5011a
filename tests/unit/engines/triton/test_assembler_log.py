"""A kernel's assembler runs once: what it says is heard while Triton compiles, and kept beside the binary."""

import os
import subprocess
from contextlib import nullcontext

import pytest

from convoy.engines.manifest import load_engine
from convoy.engines.triton import triton_build as module
from convoy.problem import LinearProblem
from convoy.target import Target

pytest.importorskip("triton")

TARGET = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
PROBLEM = LinearProblem(1, 256, 64, "fp16", "half")

pytestmark = pytest.mark.skipif(module.interpreting(), reason="Triton's interpreter compiles nothing")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """The assembler's command lines, from an empty cache."""
    found = []
    real = subprocess.run

    def run(command, **options):
        found.append([str(word) for word in command])
        return real(command, **options)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", run)
    return lambda: sum(word.startswith("--gpu-name") for command in found for word in command)


def build():
    engine = load_engine("triton.gemv")
    return engine.build(PROBLEM, engine.space(PROBLEM, TARGET)[0], TARGET).kernel.compiled


def test_the_log_of_triton_s_own_run_is_kept(runs, capfd):
    first = build()
    assert runs() == 1
    assert "bytes spill stores" in module.assembler_log(first)
    again = build()
    assert again.hash == first.hash
    assert module.assembler_log(again) == module.assembler_log(first)
    assert runs() == 1
    assert capfd.readouterr().out == ""
    assert "TRITON_DUMP_PTXAS_LOG" not in os.environ


def test_where_triton_says_nothing_the_assembler_is_asked(runs, monkeypatch):
    monkeypatch.setattr(module, "_listening", lambda: nullcontext([]))
    log = module.assembler_log(build())
    assert "bytes spill stores" in log
    assert runs() == 2
