"""A plan whose kernels can no longer be compiled runs on the baseline, with a note and a warning at the user's line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import convoy
from convoy.engines.algorithms.gemm import Gemm
from convoy.engines.manifest import load_engine
from convoy.errors import CompileError
from convoy.measurement import detect_target
from convoy.plan import load, save
from convoy.plan.plan import Plan
from convoy.problem import parse_problem

X = torch.linspace(-1, 1, 3 * 8 * 8).reshape(1, 3, 8, 8)


def by_gemm(plan: Plan) -> Plan:
    """The plan with another engine than the baseline for its convolutions, whatever the clock said."""
    engine, target = load_engine("gemm"), detect_target("cpu")
    steps = []
    for step in plan.steps:
        problem = parse_problem(step.problem) if step.problem.startswith("conv") else None
        able = problem is not None and engine.accepts(problem, target)
        steps.append(replace(step, config=engine.config(engine.space(problem, target)[0])) if able else step)
    return replace(plan, steps=tuple(steps), baseline=False)


def test_a_kernel_that_no_longer_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 4, 3)).eval()
    settings = convoy.Settings(effort="none", solver="baseline", db=tmp_path / "perf.db")
    tuned = convoy.optimize(net, (X,), settings=settings)
    path = tmp_path / "net.plan.json"
    save(by_gemm(tuned.plan), path)
    assert [step.config.engine for step in load(path).steps].count("gemm") == 2

    def refuse(*_: object, **__: object) -> object:
        raise CompileError("gemm", "the C compiler refused the source", "error: \N{GREEK SMALL LETTER ALPHA}")

    monkeypatch.setattr(Gemm, "build", refuse)
    with pytest.warns(UserWarning, match=r"convoy: PyTorch runs 2 steps, because gemm could not") as caught:
        fast = convoy.load(net, path, (X,))
    assert caught[0].filename == __file__
    assert any("gemm cannot: the C compiler refused" in note for note in fast.plan.notes)
    with torch.no_grad():
        assert torch.equal(fast(X), net(X))
