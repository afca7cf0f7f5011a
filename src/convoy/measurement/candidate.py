"""One candidate on the device: build, pack, check, and hand out something that can be timed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from convoy.engines.base import Buffers, Engine, Executable
from convoy.engines.manifest import load_engine
from convoy.errors import CompileError
from convoy.measurement.accuracy import check
from convoy.measurement.data import Data, make_data, oracle, result_specs, tensor_specs
from convoy.measurement.guards import Guarded, run_guarded
from convoy.perfdb.row import Status
from convoy.problem import ConvProblem, EngineConfig, LinearProblem, Problem
from convoy.target import Target

KINDS = ("integer", "normal")
"""Data that every candidate is checked on."""

MOST_COPIES = 8
"""Copies of a problem's tensors that cold timing rotates over, at most."""


class Failure(Exception):  # noqa: N818 - not an error of the program: an outcome with its status
    """A candidate that is out, with the status and the reason of its row."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(slots=True)
class Bench:
    """The data of one problem with the oracle's answers, made once for all its candidates."""

    problem: Problem
    target: Target
    data: dict[str, Data] = field(default_factory=dict[str, Data])
    exact: dict[str, list[torch.Tensor]] = field(default_factory=dict[str, list[torch.Tensor]])

    def of(self, kind: str) -> tuple[Data, list[torch.Tensor]]:
        """Data of a kind and its exact results."""
        if kind not in self.data:
            self.data[kind] = make_data(self.problem, 20231, kind, self.target.device)
            self.exact[kind] = oracle(self.problem, self.data[kind])
        return self.data[kind], self.exact[kind]


@dataclass(slots=True)
class Ready:
    """A candidate that is right and can be timed."""

    config: EngineConfig
    executable: Executable
    launch: Callable[[], object]
    error: float
    resident_bytes: int


def prepare(bench: Bench, config: EngineConfig, extra: tuple[str, ...], *, cold: bool) -> Ready:
    """Build a candidate and hold it to the oracle on every kind of data; raises Failure with the row's status."""
    problem, target = bench.problem, bench.target
    engine = load_engine(config.engine, extra)
    support = engine.supports(problem, target)
    if not support:
        raise Failure(Status.UNSUPPORTED, support.reason)
    try:
        executable = engine.build(problem, config.knobs, target)
    except CompileError as error:
        raise Failure(Status.COMPILE_ERROR, _first_lines(str(error))) from error
    error = max(_verify(bench, engine, executable, kind) for kind in KINDS)
    data, _ = bench.of("normal")
    packed = executable.pack(data.constants)
    launches = [_launcher(problem, executable, copy) for copy in _copies(bench, executable, data, packed, cold=cold)]
    turn = itertools.cycle(launches)
    launch = launches[0] if len(launches) == 1 else (lambda: next(turn)())
    return Ready(config, executable, launch, error, executable.resident_bytes(packed))


def _verify(bench: Bench, engine: Engine, executable: Executable, kind: str) -> float:
    """Run once on guarded buffers full of garbage; the error against the oracle."""
    problem, device = bench.problem, bench.target.device
    data, exact = bench.of(kind)
    try:
        trial = run_guarded(executable, problem, data)
    except torch.OutOfMemoryError as error:
        raise Failure(Status.OUT_OF_MEMORY, _first_lines(str(error))) from error
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        raise Failure(Status.LAUNCH_ERROR, _first_lines(f"{type(error).__name__}: {error}")) from error
    if trial.fault:
        raise Failure(Status.WRONG_RESULT, trial.fault)
    tf32 = device == "cuda" and not _is_strict(problem)
    verdict = check(problem, engine.family, trial.results, exact, kind, tf32=tf32, data=data)
    if not verdict.ok:
        raise Failure(Status.WRONG_RESULT, f"on {kind} data: {verdict.reason}")
    return verdict.error


def _is_strict(problem: Problem) -> bool:
    return isinstance(problem, (ConvProblem, LinearProblem)) and problem.numerics == "strict"


def _copies(bench: Bench, executable: Executable, data: Data, packed: tuple, *, cold: bool) -> list[Buffers]:
    """Buffers to time on: one set, or so many that together they exceed the cache twice."""
    problem, target = bench.problem, bench.target
    arg_specs, constant_specs = tensor_specs(problem)
    size = sum(spec.size_bytes for spec in (*arg_specs, *constant_specs, *result_specs(problem)))
    count = min(MOST_COPIES, 1 + 2 * target.cache_bytes // max(size, 1)) if cold else 1
    sets: list[Buffers] = []
    for index in range(count):
        args = data.args if index == 0 else tuple(t.clone(memory_format=torch.preserve_format) for t in data.args)
        constants = packed if index == 0 else executable.pack(data.constants)
        results: list[torch.Tensor | None] = [None for _ in result_specs(problem)]
        if not executable.allocates_results:
            results = [Guarded(spec, problem.layout, target.device).tensor for spec in result_specs(problem)]
        sets.append(Buffers(args, results, constants))
    return sets


def _launcher(problem: Problem, executable: Executable, buffers: Buffers) -> Callable[[], object]:
    device = next((t.device for t in buffers.args), torch.device("cpu"))
    size = executable.workspace_bytes
    workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
    if executable.allocates_results:
        args, constants, count = buffers.args, buffers.constants, len(buffers.results)
        return lambda: executable.launch(Buffers(args, [None] * count, constants), workspace)
    return lambda: executable.launch(buffers, workspace)


def _first_lines(text: str, lines: int = 12) -> str:
    return "\n".join(text.strip().splitlines()[:lines])[:2000]
