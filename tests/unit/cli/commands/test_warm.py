"""convoy warm: which kernels it builds, and that one that cannot be compiled does not stop the others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from convoy.cli.commands import warm
from convoy.engines.compilers import host_compiler
from convoy.engines.manifest import load_engine
from convoy.errors import CompileError
from convoy.package.plan_choice import own_engines
from convoy.settings import Settings
from convoy.support import Support
from convoy.zoo import import_torchvision
from tests.e2e.command import NET, Command

WORDS = ("--trust", "--size", "16", "--device", "cpu")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET, encoding="utf-8")
    return Command(capsys, monkeypatch)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Engine and problem of each build, which compiles nothing; `cpu.direct` cannot be compiled."""
    found: list[tuple[str, str]] = []

    def build(engine: Any, problem: Any, knobs: Any, target: Any) -> None:
        assert engine.accepts(problem, target)
        found.append((engine.id, problem.key))
        if engine.id == "cpu.direct":
            raise CompileError(engine.id, "the C compiler refused the source", "log")

    for engine in own_engines(Settings(), "cpu"):
        monkeypatch.setattr(type(load_engine(engine)), "build", build)
    return found


@pytest.mark.skipif(not host_compiler.compiler_support(), reason="needs a C compiler")
def test_each_kernel_is_built_once_and_one_that_fails_is_named(command: Command, builds: list[tuple[str, str]]) -> None:
    done = command("warm", "net.py:small", "net.py:small", *WORDS)
    assert done.code == 0, done.err
    assert len(builds) == len(set(builds))
    assert {problem.split(":")[0] for _, problem in builds} >= {"conv", "linear"}
    assert len({engine for engine, _ in builds}) > 1  # it went on behind the one that failed
    assert done.err.count("cpu.direct: the C compiler refused the source") == 1
    assert len(re.findall(r"^net.py:small: \d+ different layers and subgraphs, [\d.]+ s$", done.out, re.MULTILINE)) == 2
    assert re.search(r"^-?\d+ files more \(-?[\d.]+ MiB\) in /", done.out, re.MULTILINE)


def test_a_machine_without_a_compiler_is_told_so(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_compiler, "compiler_support", lambda: Support.no("needs a C compiler on the PATH"))
    done = command("warm", "net.py:small", *WORDS)
    assert done.code != 0
    assert "needs a C compiler" in done.err


def test_the_usual_nets_are_known() -> None:
    assert set(warm.USUAL) <= set(import_torchvision().models.list_models())
