"""One candidate on the device: build it, hold it to the oracle, and hand out a launch that can be timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeVar

import torch

from convoy.engines.base import Buffers, Engine, Executable, Packed
from convoy.engines.fresh import build
from convoy.engines.manifest import load_engine
from convoy.engines.zeros import kind_of
from convoy.errors import CompileError, InputError
from convoy.measurement.accuracy import check
from convoy.measurement.data import Data, dense, fresh_constants, in_layout, make_data, oracle, result_specs, with_zeros
from convoy.measurement.guards import ALIGNMENT, Guarded, checksum, run_guarded
from convoy.measurement.protocol import MOST_COPIES
from convoy.perfdb.row import Status
from convoy.problem import ConvProblem, EngineConfig, LayoutProblem, LinearProblem, Pool, Problem, SubgraphProblem
from convoy.target import Target

KINDS: Final = ("integer", "normal")
"""Data that every candidate is checked on; the last is what it is timed on."""

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
        sibling: the bench of another problem: if that differs in memory format, activation and pooling alone, its data
            serves again, and its answers do if activation and pooling are the same (`make_data` gives the same values for both).
    """

    def __init__(self, problem: Problem, target: Target, sibling: Bench | None = None) -> None:
        self.problem = problem
        self.target = target
        self.checked = checked_images(problem, target.device)
        self._data: dict[str, Data] = {}
        self._exact: dict[str, list[torch.Tensor]] = {}
        self._sums: dict[str, list[torch.Tensor]] = {}
        self._thinned: dict[tuple[str, int], Data] = {}
        if sibling is not None and shared_data(sibling.problem) == shared_data(problem):
            layout = problem.source if isinstance(problem, LayoutProblem) else problem.layout
            for kind in list(sibling._data):
                sibling._remake_if_spoilt(kind)
                data, _ = sibling.of(kind)
                self._data[kind] = Data(tuple(in_layout(dense(t), layout) for t in data.args), data.constants)
            if _finish(sibling.problem) == _finish(problem):
                self._exact = sibling._exact
        self._small = problem
        if self.checked and isinstance(problem, (ConvProblem, LinearProblem)):
            self._small = replace(problem, n=len(self.checked))

    def fill(self) -> None:
        """Make everything now."""
        for kind in KINDS:
            data, _ = self.of(kind)
            self._sums[kind] = checksum((*data.args, *data.constants))

    def of(self, kind: str) -> tuple[Data, list[torch.Tensor]]:
        """Data of a kind, and its exact results (of the images that are checked)."""
        if kind not in self._data:
            self._data[kind] = make_data(self.problem, SEED, kind, self.target.device)
        if kind not in self._exact:
            self._exact[kind] = oracle(self._small, self._picked(self._data[kind]))
        return self._data[kind], self._exact[kind]

    def timed_on(self, config: EngineConfig) -> Data:
        """What a candidate is timed on: the ordinary data, or, where its engine skips zeros, the same with that many in x."""
        data, _ = self.of("normal")
        kind = kind_of(config.knobs)
        if kind is None:
            return data
        wanted = kind, config.knobs.integer(kind)
        if wanted not in self._thinned:
            self._thinned[wanted] = with_zeros(data, wanted[1], SEED, kind)
        return self._thinned[wanted]

    def _remake_if_spoilt(self, kind: str) -> None:
        """Make the data again where an earlier candidate has written to it, so that nobody else is taken for wrong."""
        data, _ = self.of(kind)
        sums = checksum((*data.args, *data.constants))
        before = self._sums.setdefault(kind, sums)
        if not all(torch.equal(a, b) for a, b in zip(before, sums, strict=True)):
            del self._data[kind]

    def _picked(self, data: Data) -> Data:
        if not self.checked:
            return data
        weights = range(1, 1 + fresh_constants(self.problem))
        picked = [t if index in weights else self._pick(t) for index, t in enumerate(data.args)]
        return Data(tuple(picked), data.constants)

    def _pick(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[list(self.checked)]

    def verify(self, engine: Engine, executable: Executable, kind: str) -> tuple[float, Packed]:
        """Launch once on guarded buffers full of garbage.

        Returns:
            The relative L2 error against the oracle, and the packed constants.

        Raises:
            Failure: it raised, wrote where it may not, or is wrong.
            ContextLostError: it broke the device's context.
        """
        self._remake_if_spoilt(kind)
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
        return verdict.error, trial.packed


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


def shared_data(problem: Problem) -> str:
    """Text that is the same for two problems with the same data: they differ in memory format, activation and pooling alone."""
    if isinstance(problem, LayoutProblem):
        return problem.key
    if isinstance(problem, SubgraphProblem):
        return problem.text
    plain = replace(problem, epilogue=replace(problem.epilogue, activation="none", pool=None))
    return (plain.with_layout("nchw") if isinstance(plain, ConvProblem) else plain).key


def _finish(problem: Problem) -> tuple[str, Pool | None]:
    layer = isinstance(problem, (ConvProblem, LinearProblem))
    return (problem.epilogue.activation, problem.epilogue.pool) if layer else ("", None)


class Ready:
    """A candidate that is right and can be timed.

    Args:
        bench: the problem with its data.
        config: which candidate.
        executable: built.
        packed: its constants, packed.
        error: its relative L2 error.

    Attributes:
        resident_bytes: bytes of its packed constants.
    """

    def __init__(
        self, bench: Bench, config: EngineConfig, executable: Executable, packed: Packed, error: float
    ) -> None:
        self.config, self.executable, self.error = config, executable, error
        self.resident_bytes = executable.resident_bytes(packed)
        self._data = bench.timed_on(config)
        self._cache_bytes = bench.target.cache_bytes
        self._copies = [packed]
        self._turn = 0
        self._workspace = aligned_bytes(executable.workspace_bytes, bench.target.device)
        self._results = _result_maker(bench.problem, executable, bench.target.device)

    @property
    def held_bytes(self) -> int:
        """Memory that it holds while it waits to be timed."""
        return self.resident_bytes * len(self._copies) + self.executable.workspace_bytes

    def launch(self) -> None:
        """Launch once on the current stream, with the next copy of the constants."""
        self._turn = (self._turn + 1) % len(self._copies)
        self.executable.launch(Buffers(self._data.args, self._results(), self._copies[self._turn]), self._workspace)

    def cool(self) -> None:
        """Copy the constants until a round through all copies exceeds the cache (`Protocol.cold`)."""
        if len(self._copies) == 1 and 0 < self.resident_bytes <= self._cache_bytes:
            wanted = min(MOST_COPIES - 1, 1 + self._cache_bytes // self.resident_bytes)
            self._copies += [self.executable.pack(self._data.constants) for _ in range(wanted)]


def prepare(bench: Bench, config: EngineConfig, extra: tuple[str, ...] = ()) -> Ready:
    """Build a candidate and hold it to the oracle on every kind of data.

    Args:
        bench: the problem with its data.
        config: which candidate.
        extra: extra engines as `id=module:Class`.

    Raises:
        Failure: with the row's status.
        ContextLostError: the device cannot be used any more.
    """
    problem, target = bench.problem, bench.target
    engine = _supporting(config, problem, target, extra)
    try:
        executable = build(engine, problem, config.knobs, target)
    except Exception as error:  # whatever a build raises is this candidate's failure, kept with its reason
        raise failure_of(error, Status.COMPILE_ERROR) from error
    trials = [bench.verify(engine, executable, kind) for kind in KINDS]
    error = max(error for error, _ in trials)
    return survive(lambda: Ready(bench, config, executable, trials[-1][1], error), target.device)


def _supporting(config: EngineConfig, problem: Problem, target: Target, extra: tuple[str, ...]) -> Engine:
    try:
        engine = load_engine(config.engine, extra)
        if engine.version != config.version:
            raise Failure(Status.UNSUPPORTED, f"version {config.version} was asked for, {engine.version} is here")
        support = engine.accepts(problem, target)
    except (InputError, ImportError, AttributeError) as error:
        raise Failure(Status.UNSUPPORTED, first_lines(f"cannot be loaded: {error}")) from error
    except Exception as error:
        raise failure_of(error, Status.UNSUPPORTED) from error
    if not support:
        raise Failure(Status.UNSUPPORTED, support.reason)
    return engine


def _is_strict(problem: Problem) -> bool:
    return isinstance(problem, (ConvProblem, LinearProblem)) and problem.numerics == "strict"


def aligned_bytes(size: int, device: str) -> torch.Tensor | None:
    """A workspace as `Executable.launch` is promised it; None for none."""
    if not size:
        return None
    raw = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + size]


def _result_maker(problem: Problem, executable: Executable, device: str) -> Callable[[], list[torch.Tensor | None]]:
    """Makes the results of a launch as the finished program will.

    On a CPU they are new tensors for each launch, from the executable or from here; on a GPU, where one graph is captured,
    they are buffers that stay.
    """
    specs = result_specs(problem)
    if executable.allocates_results:
        return lambda: [None] * len(specs)
    templates = [Guarded(spec, problem.layout, device).tensor for spec in specs]
    if device == "cuda":
        return lambda: list(templates)
    return lambda: [torch.empty_like(template) for template in templates]
