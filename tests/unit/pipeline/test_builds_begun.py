"""What other processes begin to compile before the check: at effort `none`, what threads cannot build, of nets and steps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from torch.nn.functional import cross_entropy

import convoy
from convoy.engines.base import Engine, Executable
from convoy.engines.library.aten import Aten
from convoy.measurement.processes.parallel_compile import ParallelCompile
from convoy.measurement.processes.threaded_builds import BuildItem
from convoy.pipeline import schedules, whole_model
from convoy.problem import ConvProblem, Knobs, Problem
from convoy.support import Support
from convoy.target import Target
from convoy.training import training_job
from tests.unit.training.training_nets import batches, net, sgd


class Compiles(Engine):
    """ATen, as an engine that compiles in this process."""

    id = "compiles"
    family = "library"
    trusted = False

    def supports(self, problem: Problem, target: Target) -> Support:
        return Support.yes() if isinstance(problem, ConvProblem) else Support.no("convolutions only")

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        return 1.0

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        return Aten().build(problem, knobs, target)


class CompilesInThreads(Compiles):
    """The same in threads; nothing that it does needs a trial in another process."""

    id = "threads"
    trusted = True
    builds_in_threads = True


SETTINGS = convoy.Settings(
    isolate=False, solver="single", engines=(f"compiles={__name__}:Compiles",), only_engines=("compiles",)
)


def infer(settings: convoy.Settings) -> None:
    convoy.optimize(net().eval(), (batches(1)[0][0],), settings=settings)


def train(settings: convoy.Settings) -> None:
    model = net()
    convoy.training_step(model, cross_entropy, sgd(model), batches(1)[0], settings=settings)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What begins, in order."""
    found: list[object] = []

    def begin(_: ParallelCompile, wanted: Sequence[BuildItem]) -> None:
        found.append([config.engine for _, config in wanted])

    def checked(module: object, name: str) -> None:
        inner: Callable[..., object] = getattr(module, name)

        def check(*args: object, **kwargs: object) -> object:
            found.append("check")
            return inner(*args, **kwargs)

        monkeypatch.setattr(module, name, check)

    monkeypatch.setattr(ParallelCompile, "begin", begin)
    checked(whole_model, "NetCheck")
    checked(training_job, "StepCheck")
    return found


@pytest.mark.parametrize("use", [infer, train])
def test_builds_begin_before_the_check(use: Callable[[convoy.Settings], None], seen: list[object], tmp_path: Path):
    use(replace(SETTINGS, effort="none", db=tmp_path / "perf.db"))
    assert seen[1:] == ["check"]
    assert isinstance(seen[0], list)
    assert set(seen[0]) == {"compiles"}


@pytest.mark.parametrize("use", [infer, train])
def test_what_was_measured_was_compiled_then(
    use: Callable[[convoy.Settings], None], seen: list[object], tmp_path: Path
):
    use(replace(SETTINGS, effort="quick", db=tmp_path / "perf.db"))
    assert set(map(str, seen)) == {"check"}


@pytest.mark.parametrize("use", [infer, train])
@pytest.mark.parametrize("effort", ["none", "quick"])
def test_threads_begin_at_every_effort(
    use: Callable[[convoy.Settings], None], effort: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    found: list[set[str]] = []

    @contextmanager
    def begun(wanted: Sequence[BuildItem], *_: object) -> Generator[dict[BuildItem, object]]:
        found.append({config.engine for _, config in wanted})
        yield {}

    monkeypatch.setattr(schedules, "builds_begun", begun)
    entry = (f"threads={__name__}:CompilesInThreads",)
    use(replace(SETTINGS, effort=effort, engines=entry, only_engines=("threads",), db=tmp_path / "perf.db"))
    assert "threads" in found[0]
