"""One candidate on the device: build it, hold it to the oracle, and hand out a launch that can be timed."""

from __future__ import annotations

from convoy.engines.base import Buffers, Engine, Executable, Packed
from convoy.engines.dynamic_weight import build
from convoy.engines.manifest import load_engine
from convoy.errors import InputError
from convoy.measurement.failure import Failure, failure_of, first_lines, run_or_fail
from convoy.measurement.protocol import MAX_COPIES
from convoy.measurement.reference_data import CHECKED_KINDS, ReferenceData
from convoy.perfdb.row import Status
from convoy.problem import EngineConfig, Problem
from convoy.target import Target


class PreparedCandidate:
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
        self, bench: ReferenceData, config: EngineConfig, executable: Executable, packed: Packed, error: float
    ) -> None:
        self.config, self.executable, self.error = config, executable, error
        self.resident_bytes = executable.resident_bytes(packed)
        self._data = bench.timed_on(config)
        self._cache_bytes = bench.target.cache_bytes
        self._copies = [packed]
        self._turn = 0
        self._landing = bench.landing
        self._landing.workspace(executable.workspace_bytes)  # now: whoever has no room for it is to blame

    def held_bytes(self, *, cold: bool) -> int:
        """Memory of its own that it holds until it was timed; cold: with the copies that it will make for that."""
        return self.resident_bytes * (self._wanted_copies() if cold else len(self._copies))

    def launch(self) -> None:
        """Launch once on the current stream, with the next copy of the constants."""
        self._turn = (self._turn + 1) % len(self._copies)
        buffers = Buffers(self._data.args, self._landing.results(self.executable), self._copies[self._turn])
        self.executable.launch(buffers, self._landing.workspace(self.executable.workspace_bytes))

    def cool(self, *, whole: bool) -> None:
        """Copy the constants until a round through all copies exceeds the cache (`Protocol.cold`).

        Args:
            whole: also those that the executable takes as they are (`Protocol.copies_whole`).
        """
        while len(self._copies) < self._wanted_copies():
            own = [constant.clone() for constant in self._data.constants] if whole else self._data.constants
            self._copies.append(self.executable.pack(own))

    def thaw(self) -> None:
        """Let go of the copies."""
        del self._copies[1:]

    def _wanted_copies(self) -> int:
        if not 0 < self.resident_bytes <= self._cache_bytes:
            return 1
        return min(MAX_COPIES, 2 + self._cache_bytes // self.resident_bytes)


def prepare(bench: ReferenceData, config: EngineConfig, extra: tuple[str, ...] = ()) -> PreparedCandidate:
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
    trials = [bench.verify(engine, executable, kind) for kind in CHECKED_KINDS]
    error = max(error for error, _ in trials)
    return run_or_fail(lambda: PreparedCandidate(bench, config, executable, trials[-1][1], error), target.device)


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
