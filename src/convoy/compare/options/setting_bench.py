"""SettingBench: settings of PyTorch's options, built, kept ready and timed in turn in child processes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from convoy.compare.case import Case
from convoy.compare.child_processes import environment
from convoy.compare.child_session import ChildFailedError, ChildSession
from convoy.compare.limits import Limits
from convoy.compare.options.torch_options import words_of
from convoy.compare.runs.rows import Figure
from convoy.compare.samples import MOST_REPEATS, NOISY, figure, rounds_for
from convoy.measurement.statistics import disturbed_rounds

ROUNDS: Final = 9

BUILD_S: Final = 240.0
"""Most seconds to build one setting: ResNet-50 takes 30 to 60 s with a compiler, and with max-autotune some minutes."""

LEAST_BUILD_S: Final = 45.0
"""Seconds that a build is given although the time is nearly up: most take less, and it was begun in time."""

Setting = frozenset[str]
DEFAULTS: Final[Setting] = frozenset()


class SettingBench:
    """The children that settings are built and timed in; a new one is started where one died.

    PyTorch keeps the plan that it first found for a convolution for as long as the process lives, whether it was searched for
    with cudnn.benchmark or not. So settings with that option have a child of their own.

    Args:
        case: net and setting.
        folder: for its material.
        limits: time and memory of a child.
    """

    def __init__(self, case: Case, folder: Path, limits: Limits) -> None:
        self.case, self.folder = case, folder
        self.limits = limits.on_this_machine()
        self.facts: dict[str, Any] = {}
        self.errors: dict[Setting, float] = {}
        """Relative L2 error of every setting that was ever built: of outputs, in training of gradients."""
        self.deadline = math.inf
        """`time.monotonic()` after which a build is not waited for much longer."""
        self._children: dict[bool, ChildSession] = {}
        self._built: dict[Setting, float] = {}

    def open(self, *, searching: bool = False) -> None:
        """Make the material and start a child.

        Args:
            searching: the one in which cuDNN searches.

        Raises:
            ChildFailedError: a child failed before it could be asked anything; none is left behind.
            InputError: the model cannot be used.
        """
        if searching in self._children:
            return
        if not (self.folder / "facts.json").exists():
            child = self._start("material")
            try:
                child.wait_for("material")
            finally:
                child.end()
        child = self._start("options")
        try:
            self.facts = child.wait_for("facts")
        except BaseException:  # everything, an interrupt too: the child must not outlive this call
            child.end()
            raise
        self._children[searching] = child

    def close(self) -> None:
        """End the children."""
        for searching in list(self._children):
            self._close(searching)

    def build(self, setting: Setting) -> None:
        """Make a setting ready, unless it is.

        Raises:
            ChildFailedError: it cannot be built, is wrong, or ended its child.
        """
        if setting in self._built:
            return
        searching = _searches(setting)
        self.open(searching=searching)
        message = {"do": "build", "name": words_of(setting), "options": sorted(setting)}
        left = max(LEAST_BUILD_S, self.deadline - time.monotonic())
        built = self._ask(searching, message, "built", min(BUILD_S, self.limits.timeout_s, left))
        if "failed" in built:
            raise ChildFailedError(built["failed"]["status"], built["failed"]["reason"])
        self._built[setting] = built["call_s"]
        self.errors[setting] = built["error"]

    def keep(self, *settings: Setting) -> None:
        """Drop every other setting."""
        for setting in [s for s in self._built if s not in settings]:
            del self._built[setting]
            self._children[_searches(setting)].tell({"do": "drop", "name": words_of(setting)})

    def time(self, *settings: Setting) -> list[Figure]:
        """Latency of each, in interleaved rounds, in milliseconds; noisy rounds are taken again.

        Raises:
            ChildFailedError: one of them cannot be built, or ended its child.
        """
        for setting in settings:
            self.build(setting)
        count = rounds_for(max(self._built[s] for s in settings), min(ROUNDS, self.limits.rounds))
        best: list[Figure] = []
        for _ in range(MOST_REPEATS + 1):
            samples = self._rounds(settings, count)
            dropped = disturbed_rounds(samples)
            found = [
                figure("latency_ms", "ms", [v for i, v in enumerate(values) if i not in dropped])
                for values in samples.values()
            ]
            if not best or max(map(noise, found)) < max(map(noise, best)):
                best = found
            if max(map(noise, best)) <= NOISY:
                break
        return best

    def _rounds(self, settings: Sequence[Setting], count: int) -> dict[int, list[float]]:
        """Milliseconds by the setting's number: rounds of one child in one message, of two in turn."""
        homes: dict[bool, list[int]] = {}
        for index, setting in enumerate(settings):
            homes.setdefault(_searches(setting), []).append(index)
        samples: dict[int, list[float]] = {index: [] for index in range(len(settings))}
        together = len(homes) == 1
        for _ in range(1 if together else count):
            for searching, indices in homes.items():
                names = [words_of(settings[index]) for index in indices]
                message = {"do": "rounds", "names": names, "rounds": count if together else 1}
                for index, own in zip(indices, self._ask(searching, message, "samples"), strict=True):
                    samples[index] += own
        return samples

    def fed_by(self, setting: Setting, workers: int) -> Figure:
        """Milliseconds of a step that a data loader feeds."""
        self.build(setting)
        message = {"do": "load", "name": words_of(setting), "workers": workers}
        return figure("latency_ms", "ms", self._ask(_searches(setting), message, "loaded"))

    def _ask(self, searching: bool, message: Mapping[str, Any], name: str, timeout_s: float = 0.0) -> Any:
        child = self._children[searching]
        child.timeout_s = timeout_s or self.limits.timeout_s
        try:
            return child.ask(message, name)
        except ChildFailedError:
            self._close(searching)
            raise

    def _close(self, searching: bool) -> None:
        self._children.pop(searching).end()
        self._built = {setting: s for setting, s in self._built.items() if _searches(setting) != searching}

    def _start(self, role: str) -> ChildSession:
        return ChildSession(
            {"role": role, "case": self.case.to_dict(), "folder": str(self.folder)},
            environment(self.case, "inductor", self.folder),
            timeout_s=self.limits.timeout_s,
            memory_limit_bytes=self.limits.memory_bytes,
        )


def _searches(setting: Setting) -> bool:
    return "cudnn_benchmark" in setting


def noise(found: Figure) -> float:
    """A figure's spread, as a share of it."""
    return found.spread / found.p50 if found.p50 else 0.0
