"""Engines with planted faults, for the end-to-end tests: each claims every convolution, and does harm in its own way."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from convoy.engines.base import Buffers, Engine, Executable, Knobs
from convoy.engines.library.aten import Aten
from convoy.errors import CompileError
from convoy.problem import ConvProblem, Problem
from convoy.support import Support
from convoy.target import Target


class _Faulty(Engine):
    """Does what ATen does, apart from the fault."""

    family = "library"

    def supports(self, problem: Problem, target: Target) -> Support:
        return Support.yes() if isinstance(problem, ConvProblem) else Support.no("convolutions only")

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        inner = Aten().build(problem, knobs, target)
        inner.launch = self.spoil(inner.launch)  # type: ignore[method-assign]
        return inner

    def spoil(self, launch):
        return launch


class Wrong(_Faulty):
    id = "planted.wrong"

    def spoil(self, launch):
        def run(buffers: Buffers, workspace: torch.Tensor | None) -> None:
            launch(buffers, workspace)
            buffers.results[0][-1, -1, -1, -1] += 1

        return run


class Hangs(_Faulty):
    id = "planted.hangs"

    def spoil(self, launch):
        return lambda *_: time.sleep(3600)


class Dies(_Faulty):
    id = "planted.dies"

    def spoil(self, launch):
        return lambda *_: os._exit(7)


class Broken(_Faulty):
    id = "planted.broken"

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        raise CompileError(self.id, "does not compile", "line 1: planted")


class Greedy(_Faulty):
    id = "planted.greedy"

    def spoil(self, launch):
        def run(*_: object) -> None:
            raise torch.OutOfMemoryError("planted: out of memory")

        return run


class Stalls(_Faulty):
    """Hangs on a 1x1 convolution, after it has made the file that `PLANTED_MARK` names: so a test knows when."""

    id = "planted.stalls"

    def supports(self, problem: Problem, target: Target) -> Support:
        one = isinstance(problem, ConvProblem) and problem.r == problem.s == 1
        return Support.yes() if one else Support.no("1x1 convolutions only")

    def spoil(self, launch):
        def run(*_: object) -> None:
            Path(os.environ["PLANTED_MARK"]).touch()
            time.sleep(3600)

        return run


STALLS = "planted.stalls=tests.e2e.planted:Stalls"
ALL = tuple(f"{cls.id}={__name__}:{cls.__name__}" for cls in (Wrong, Hangs, Dies, Broken, Greedy))
EXPECTED = {
    "planted.wrong": "wrong_result",
    "planted.hangs": "timeout",
    "planted.dies": "launch_error",
    "planted.broken": "compile_error",
    "planted.greedy": "out_of_memory",
}
