"""Frameworks with planted faults, as `id=module:NAME`: each runs in a child process of its own, without torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convoy.compare.case import Case
from convoy.compare.frameworks.base import BuiltModel, CaseInputs, FrameworkConfig, Outputs, UnsupportedCaseError


def answer(material: CaseInputs) -> BuiltModel:
    """The right answer, from the file of exact results."""
    exact = material.exact()
    return BuiltModel(lambda: time.sleep(0.001), lambda: exact)


class Right:
    """Two ways, the second faster; JSON lines and noise on standard output must harm nobody."""

    def ways(self, case: Case, material: CaseInputs) -> Sequence[FrameworkConfig]:
        assert "torch" not in sys.modules, "a framework without torch is measured without torch"
        print('{"ready": "not this"}', flush=True)

        def slow() -> BuiltModel:
            return BuiltModel(lambda: time.sleep(0.02), answer(material).check)

        def fast() -> BuiltModel:
            built = answer(material)
            built.kinds, built.notes, built.detail = (lambda: {"conv": 1.0}), ["a note"], {"own": 1}
            built.peak_memory = lambda: 123
            return built

        def broken() -> BuiltModel:
            raise ValueError("this way is not there")

        return [FrameworkConfig("slow", slow), FrameworkConfig("fast", fast), FrameworkConfig("broken", broken)]


class One:
    """One way by a function of (case, material)."""

    def __init__(self, build: Any, *, chooses: bool = True) -> None:
        self.build, self.chooses = build, chooses

    def ways(self, case: Case, material: CaseInputs) -> Sequence[FrameworkConfig]:
        return [FrameworkConfig("one", lambda: self.build(case, material), chooses=self.chooses)]


def wrong(case: Case, material: CaseInputs) -> BuiltModel:
    outputs: Outputs = {name: array * (1 + 1e-3) for name, array in material.exact().items()}
    return BuiltModel(lambda: None, lambda: outputs)


def crash(case: Case, material: CaseInputs) -> BuiltModel:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def hang(case: Case, material: CaseInputs) -> BuiltModel:
    while True:
        time.sleep(1)


def exhausted(case: Case, material: CaseInputs) -> BuiltModel:
    raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 PB")


def greedy(case: Case, material: CaseInputs) -> BuiltModel:
    kept: list[Any] = []
    for _ in range(4000):
        kept.append(np.ones(1 << 20))
        time.sleep(0.005)
    return answer(material)


def later(case: Case, material: CaseInputs) -> BuiltModel:
    """Right, and breaks when it is timed."""
    calls = [0]

    def run() -> None:
        calls[0] += 1
        time.sleep(0.001)
        if calls[0] > 6:
            raise ArithmeticError("the seventh call")

    return BuiltModel(run, answer(material).check)


def unsupported(case: Case, material: CaseInputs) -> BuiltModel:
    raise UnsupportedCaseError("no such operator here")


class Logs:
    """Writes down when it was built."""

    def __init__(self, name: str, *, chooses: bool) -> None:
        self.name, self.chooses = name, chooses

    def ways(self, case: Case, material: CaseInputs) -> Sequence[FrameworkConfig]:
        def build() -> BuiltModel:
            log, start = Path(os.environ["PLANTED_LOG"]), time.time()
            time.sleep(0.3)
            if self.chooses:  # two turns long enough for the one that needs none, unless it waits for them
                limit = start + 60
                while time.time() < limit and not (log.exists() and "free" in log.read_text()):
                    time.sleep(0.05)
            with log.open("a") as file:
                file.write(f"{self.name} {start} {time.time()}\n")
            return answer(material)

        return [FrameworkConfig("one", build, chooses=self.chooses)]


ONE_LOG, TWO_LOG, FREE_LOG = Logs("one", chooses=True), Logs("two", chooses=True), Logs("free", chooses=False)
RIGHT, WRONG, CRASH, HANG = Right(), One(wrong), One(crash), One(hang, chooses=False)
EXHAUSTED, GREEDY, LATER, UNSUPPORTED = One(exhausted), One(greedy), One(later), One(unsupported)


def tiny() -> Any:
    """A net that is made in no time."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
    )


def every_operator() -> Any:
    """The net of all operators."""
    from tests.unit.compare.every_operator import EveryOperator

    return EveryOperator()
