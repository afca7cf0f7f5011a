"""One candidate on the device: build it, check it against the oracle, and launch it for timing."""

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
    """A correct candidate that can be timed.

    Args:
        reference: the problem's data.
        config: the candidate's config.
        executable: the built executable.
        packed: its packed constants.
        error: its relative L2 error.

    Attributes:
        resident_bytes: bytes of its packed constants.
    """

    def __init__(
        self, reference: ReferenceData, config: EngineConfig, executable: Executable, packed: Packed, error: float
    ) -> None:
        self.config, self.executable, self.error = config, executable, error
        self.resident_bytes = executable.resident_bytes(packed)
        self._data = reference.timed_on(config)
        self._cache_bytes = reference.target.cache_bytes
        self._copies = [packed]
        self._turn = 0
        self._output_buffers = reference.output_buffers
        self._output_buffers.workspace(
            executable.workspace_bytes
        )  # allocated now, so that a lack of memory is this candidate's failure

    def held_bytes(self, *, cold: bool) -> int:
        """Memory that it holds until it is timed; cold: including the copies of constants that cold timing makes."""
        return self.resident_bytes * (self._wanted_copies() if cold else len(self._copies))

    def launch(self) -> None:
        """Launch once on the current stream, with the next copy of the constants."""
        self._turn = (self._turn + 1) % len(self._copies)
        buffers = Buffers(self._data.args, self._output_buffers.results(self.executable), self._copies[self._turn])
        self.executable.launch(buffers, self._output_buffers.workspace(self.executable.workspace_bytes))

    def make_copies(self, *, whole: bool) -> None:
        """Copy the constants until one round through all copies exceeds the cache (`Protocol.cold`).

        Args:
            whole: also constants that the executable uses unpacked (`Protocol.copies_whole`).
        """
        while len(self._copies) < self._wanted_copies():
            own = [constant.clone() for constant in self._data.constants] if whole else self._data.constants
            self._copies.append(self.executable.pack(own))

    def release_copies(self) -> None:
        """Free the copies."""
        del self._copies[1:]

    def _wanted_copies(self) -> int:
        if not 0 < self.resident_bytes <= self._cache_bytes:
            return 1
        return min(MAX_COPIES, 2 + self._cache_bytes // self.resident_bytes)


def prepare(reference: ReferenceData, config: EngineConfig, extra: tuple[str, ...] = ()) -> PreparedCandidate:
    """Build a candidate and check it on every kind of data.

    Args:
        reference: the problem's data.
        config: the candidate's config.
        extra: extra engines as `id=module:Class`.

    Raises:
        Failure: with the row's status.
        ContextLostError: the device cannot be used any more.
    """
    problem, target = reference.problem, reference.target
    engine = _supporting(config, problem, target, extra)
    try:
        executable = build(engine, problem, config.knobs, target)
    except Exception as error:  # any exception of a build is this candidate's failure
        raise failure_of(error, Status.COMPILE_ERROR) from error
    trials = [reference.verify(engine, executable, kind) for kind in CHECKED_KINDS]
    error = max(error for error, _ in trials)
    return run_or_fail(lambda: PreparedCandidate(reference, config, executable, trials[-1][1], error), target.device)


def _supporting(config: EngineConfig, problem: Problem, target: Target, extra: tuple[str, ...]) -> Engine:
    try:
        engine = load_engine(config.engine, extra)
        if engine.version != config.version:
            raise Failure(Status.UNSUPPORTED, f"version {config.version} was asked for, {engine.version} is here")
        support = engine.accepts(problem, target)
    except (InputError, ImportError, AttributeError) as error:
        raise Failure(Status.UNSUPPORTED, first_lines(f"cannot be loaded: {error}")) from error
    except Exception as error:  # everything: an engine, for example the user's, may raise anything
        raise failure_of(error, Status.UNSUPPORTED) from error
    if not support:
        raise Failure(Status.UNSUPPORTED, support.reason)
    return engine
