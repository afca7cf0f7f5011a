"""One candidate on the device: build it, hold it to the oracle, and hand out a launch that can be timed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import torch

from convoy.engines.base import Buffers, Engine, Executable, Packed
from convoy.engines.manifest import load_engine
from convoy.errors import CompileError, InputError
from convoy.measurement.accuracy import check
from convoy.measurement.data import Data, make_data, oracle, result_specs
from convoy.measurement.guards import ALIGNMENT, Guarded, run_guarded
from convoy.measurement.protocol import MOST_COPIES
from convoy.perfdb.row import Status
from convoy.problem import ConvProblem, EngineConfig, LayoutProblem, LinearProblem, Problem
from convoy.target import Target

KINDS: Final = ("integer", "normal")
"""Data that every candidate is checked on."""

SEED: Final = 20231

ORACLE_FLOPS: Final = {"cpu": 4e9, "cuda": 1e12}
"""Work above which the oracle computes some images of a batch alone: about half a second of float64 on either device."""

REASON_LINES: Final = 12
REASON_CHARACTERS: Final = 2000


class Failure(Exception):  # noqa: N818 - not an error of the program: an outcome with its status
    """A candidate that is out, with the status and the reason of its row."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class ContextLostError(Exception):
    """The device's context cannot be used any more in this process (CUDA, after an illegal access)."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


def first_lines(text: str) -> str:
    """The beginning of a compiler's or an exception's words, cut to what a row may hold."""
    return "\n".join(text.strip().splitlines()[:REASON_LINES])[:REASON_CHARACTERS]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory is used up, in Python's, torch's or CUDA's way."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    words = ("out of memory", "can't allocate memory", "cannot allocate memory", "std::bad_alloc")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def failure_of(error: Exception, otherwise: Status) -> Failure:
    """What an exception out of an engine means for its row; an engine may raise whatever it likes."""
    if isinstance(error, Failure):
        return error
    if is_out_of_memory(error):
        return Failure(Status.OUT_OF_MEMORY, first_lines(str(error)) or type(error).__name__)
    if isinstance(error, CompileError):
        return Failure(Status.COMPILE_ERROR, first_lines(f"{error.summary}\n{error.log}"))
    return Failure(otherwise, first_lines(f"{type(error).__name__}: {error}"))


class Bench:
    """The data of one problem with the oracle's answers, made once for all its candidates.

    Of a batch whose oracle would take too long the first images and the last are checked: a kernel treats the images of a
    batch alike but for its first and last tiles.

    Args:
        problem: what is computed.
        target: where.
        sibling: the bench of another problem: if it is the same one in another memory format, its answers serve again (one
            seed gives the same values in every format).
    """

    def __init__(self, problem: Problem, target: Target, sibling: Bench | None = None) -> None:
        self.problem = problem
        self.target = target
        self.checked = checked_images(problem, target.device)
        self._data: dict[str, Data] = {}
        same = sibling is not None and without_layout(sibling.problem) == without_layout(problem)
        self._exact: dict[str, list[torch.Tensor]] = sibling._exact if sibling and same else {}
        self._small = problem
        if self.checked and isinstance(problem, (ConvProblem, LinearProblem)):
            self._small = replace(problem, n=len(self.checked))

    def fill(self) -> None:
        """Make everything now."""
        for kind in KINDS:
            self.of(kind)

    def of(self, kind: str) -> tuple[Data, list[torch.Tensor]]:
        """Data of a kind, and its exact results (of the images that are checked)."""
        if kind not in self._data:
            self._data[kind] = make_data(self.problem, SEED, kind, self.target.device)
        if kind not in self._exact:
            self._exact[kind] = oracle(self._small, self._picked(self._data[kind]))
        return self._data[kind], self._exact[kind]

    def _picked(self, data: Data) -> Data:
        return Data(tuple(map(self._pick, data.args)), data.constants) if self.checked else data

    def _pick(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[list(self.checked)]

    def verify(self, engine: Engine, executable: Executable, kind: str) -> float:
        """Launch once on guarded buffers full of garbage.

        Returns:
            The relative L2 error against the oracle.

        Raises:
            Failure: it raised, wrote where it may not, or is wrong.
            ContextLostError: it broke the device's context.
        """
        data, exact = self.of(kind)
        trial = survive(lambda: run_guarded(executable, self.problem, data), self.target.device)
        if trial.fault:
            raise Failure(Status.WRONG_RESULT, trial.fault)
        results = trial.results
        if self.checked:
            results = [r if r is None or r.shape[0] != self.problem.n else self._pick(r) for r in results]  # type: ignore[union-attr]
        tf32 = self.target.device == "cuda" and not _is_strict(self.problem)
        verdict = check(self._small, engine.family, results, exact, kind, tf32=tf32, data=self._picked(data))
        if not verdict.ok:
            raise Failure(Status.WRONG_RESULT, f"on {kind} data: {first_lines(verdict.reason)}")
        return verdict.error


Found = TypeVar("Found")


def survive(launch: Callable[[], Found], device: str) -> Found:
    """Run a launch; what it raises becomes a Failure, or a ContextLostError where the device does not answer afterwards."""
    try:
        return launch()
    except Exception as error:  # an engine may raise anything, and each becomes a row with its reason
        failure = failure_of(error, Status.LAUNCH_ERROR)
        if device == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                raise ContextLostError(failure) from error
        raise failure from error


def checked_images(problem: Problem, device: str) -> tuple[int, ...]:
    """Which images of a large batch are checked; empty: all."""
    if isinstance(problem, ConvProblem) and problem.direction != "fprop":
        return ()
    if not isinstance(problem, (ConvProblem, LinearProblem)) or problem.n < 3 or problem.flops <= ORACLE_FLOPS[device]:
        return ()
    count = max(2, int(problem.n * ORACLE_FLOPS[device] / problem.flops))
    return (*range(count - 1), problem.n - 1)


def without_layout(problem: Problem) -> object:
    """What two problems share that differ in memory format alone."""
    if isinstance(problem, (LinearProblem, LayoutProblem)):
        return problem.key
    return problem.with_layout("nchw").key


@dataclass(slots=True)
class Ready:
    """A candidate that is right and can be timed.

    Attributes:
        config: which one.
        executable: built.
        launch: launches once on the current stream.
        error: its relative L2 error, the larger of both kinds of data.
        resident_bytes: bytes of its packed constants.
        held_bytes: memory that it holds while it waits to be timed.
    """

    config: EngineConfig
    executable: Executable
    launch: Callable[[], object]
    error: float
    resident_bytes: int
    held_bytes: int


def prepare(bench: Bench, config: EngineConfig, extra: tuple[str, ...], *, cold: bool) -> Ready:
    """Build a candidate and hold it to the oracle on every kind of data.

    Args:
        bench: the problem with its data.
        config: which candidate.
        extra: extra engines as `id=module:Class`.
        cold: whether launches go round copies of the constants (`Protocol.cold`).

    Raises:
        Failure: with the row's status.
        ContextLostError: the device cannot be used any more.
    """
    problem, target = bench.problem, bench.target
    engine = _supporting(config, problem, target, extra)
    try:
        executable = engine.build(problem, config.knobs, target)
    except Exception as error:  # whatever a build raises is this candidate's failure, kept with its reason
        raise failure_of(error, Status.COMPILE_ERROR) from error
    error = max(bench.verify(engine, executable, kind) for kind in KINDS)
    data, _ = bench.of("normal")
    return survive(lambda: _ready(bench, config, executable, data, error, cold=cold), target.device)


def _supporting(config: EngineConfig, problem: Problem, target: Target, extra: tuple[str, ...]) -> Engine:
    try:
        engine = load_engine(config.engine, extra)
        if engine.version != config.version:
            raise Failure(Status.UNSUPPORTED, f"version {config.version} was asked for, {engine.version} is here")
        support = engine.supports(problem, target)
    except (InputError, ImportError, AttributeError) as error:
        raise Failure(Status.UNSUPPORTED, first_lines(f"cannot be loaded: {error}")) from error
    except Exception as error:
        raise failure_of(error, Status.UNSUPPORTED) from error
    if not support:
        raise Failure(Status.UNSUPPORTED, support.reason)
    return engine


def _is_strict(problem: Problem) -> bool:
    return isinstance(problem, (ConvProblem, LinearProblem)) and problem.numerics == "strict"


def _ready(
    bench: Bench, config: EngineConfig, executable: Executable, data: Data, error: float, *, cold: bool
) -> Ready:
    packed = executable.pack(data.constants)
    resident = executable.resident_bytes(packed)
    copies = [packed]
    cache = bench.target.cache_bytes
    if cold and 0 < resident <= cache:
        copies += [executable.pack(data.constants) for _ in range(min(MOST_COPIES - 1, 1 + cache // resident))]
    workspace = aligned_bytes(executable.workspace_bytes, bench.target.device)
    launch = _launcher(bench.problem, executable, data.args, copies, workspace, bench.target.device)
    held = resident * len(copies) + executable.workspace_bytes
    return Ready(config, executable, launch, error, resident, held)


def aligned_bytes(size: int, device: str) -> torch.Tensor | None:
    """A workspace as `Executable.launch` is promised it; None for none."""
    if not size:
        return None
    raw = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + size]


def _launcher(
    problem: Problem,
    executable: Executable,
    args: tuple[torch.Tensor, ...],
    copies: list[Packed],
    workspace: torch.Tensor | None,
    device: str,
) -> Callable[[], object]:
    """A launch that takes the next copy of the constants each time.

    Results come as they will in the finished program: on a CPU new tensors for each launch, made by the executable or
    before it, and on a GPU, where one graph is captured, buffers that stay.
    """
    turn = itertools.cycle(copies)
    if executable.allocates_results:
        count = len(result_specs(problem))
        return lambda: executable.launch(Buffers(args, [None] * count, next(turn)), workspace)
    results = [Guarded(spec, problem.layout, device).tensor for spec in result_specs(problem)]
    if device == "cuda":
        return lambda: executable.launch(Buffers(args, list(results), next(turn)), workspace)
    return lambda: executable.launch(
        Buffers(args, [torch.empty_like(result) for result in results], next(turn)), workspace
    )
