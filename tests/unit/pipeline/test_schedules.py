"""Which schedule is kept: the fastest by the clock that holds no more memory than is allowed, and serial where none is faster."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from convoy.deadline import Deadline
from convoy.pipeline import schedule_search, schedules
from convoy.pipeline.check.end_to_end import Latency
from convoy.pipeline.schedules import ScheduleSearch
from convoy.plan import Step
from convoy.problem import EngineConfig, Knobs
from convoy.program import CudaGraphProgram
from convoy.schedule import (
    CapacityModel,
    Collective,
    cast_groups,
    device_us,
    exposed_us,
    fit_contention,
    parallel_steps,
)


def step(index: int, args: tuple[str, ...], us: float) -> Step:
    config = EngineConfig("aten", 1, Knobs())
    return Step("region", "op", (f"n{index}",), args, (f"v{index}",), "p", config, "any", median_us=us)


BRANCHES = tuple(step(index, ("x",), 10.0) for index in range(4))


class Clock:
    """Says what schedules take by the number of their streams, and remembers whom it compared."""

    def __init__(self, took_ms: dict[int, float], noise_ms: float = 0.0) -> None:
        self.took_ms, self.noise_ms = took_ms, noise_ms
        self.pairs: list[tuple[int, int]] = []

    def __call__(self, best: SimpleNamespace, challenger: SimpleNamespace) -> tuple[Latency, Latency]:
        self.pairs.append((best.streams, challenger.streams))
        first, second = (
            Latency(name, tuple(self.took_ms[program.streams] + noise for noise in (-late, 0.0, late)))
            for name, program, late in (("best", best, self.noise_ms), ("challenger", challenger, -self.noise_ms))
        )
        return first, second


def streams_of(steps: Sequence[Step]) -> int:
    return 1 + max(one.stream for one in steps)


def contest(monkeypatch: pytest.MonkeyPatch, clock: Clock, grown: float = 1.0, full_from: int = 99) -> ScheduleSearch:
    def build(steps: Sequence[Step]) -> SimpleNamespace:
        if streams_of(steps) >= full_from:
            raise torch.OutOfMemoryError("planted")
        return SimpleNamespace(streams=streams_of(steps))

    monkeypatch.setattr(schedule_search, "_bound", lambda program: program)
    monkeypatch.setattr(schedule_search, "_bytes", lambda program: 1000 if program.streams == 1 else int(1000 * grown))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    made = ScheduleSearch(BRANCHES, build(BRANCHES), build, 1.1, clock)  # type: ignore[arg-type]
    for streams in (2, 3, 4):
        made.challenge(str(streams), parallel_steps(BRANCHES, streams))
    return made


def test_the_fastest_is_kept_and_each_is_timed_beside_the_best_so_far(monkeypatch: pytest.MonkeyPatch):
    clock = Clock({1: 4.0, 2: 2.0, 3: 2.5, 4: 1.5})
    made = contest(monkeypatch, clock)
    assert (made.name, streams_of(made.steps)) == ("4", 4)
    assert clock.pairs == [(1, 2), (2, 3), (2, 4)]
    assert [took for _, took in made.measured] == [2000.0, 2500.0, 1500.0]
    words = made.words("BOUNDS")
    assert words == (
        "streams: 4 (measured by number of streams: 1 4.000 ms, 2 2.000 ms, 3 2.500 ms, 4 1.500 ms; BOUNDS)"
    )


def test_serial_stays_where_nothing_wins_four_of_five_rounds(monkeypatch: pytest.MonkeyPatch):
    made = contest(monkeypatch, Clock({1: 4.0, 2: 3.95, 3: 4.2, 4: 3.91}, noise_ms=0.1))
    assert made.name == "1"
    assert made.steps == BRANCHES


def test_what_holds_too_much_memory_is_named_and_left_out(monkeypatch: pytest.MonkeyPatch):
    made = contest(monkeypatch, Clock({1: 4.0, 2: 2.0, 3: 5.0, 4: 5.0}), grown=1.3)
    assert made.name == "1"
    (note,) = made.notes
    assert "2 would take 2.000 ms instead of 4.000 ms and 1.30 times the memory" in note
    assert len(made.measured) == 3  # it still tells how steps slow one another


def test_weights_and_inputs_count_beside_values(monkeypatch: pytest.MonkeyPatch):
    """A net of batch 1 is mostly weights: values that live side by side are little of what it holds."""
    spec = SimpleNamespace(size_bytes=7)
    bound = SimpleNamespace(resident_bytes=1000, inputs=[(spec, "nhwc"), (spec, "nchw")])
    monkeypatch.setattr(schedule_search, "peak_bytes", lambda _: 100)
    assert schedule_search._bytes(bound) == 1114  # type: ignore[arg-type]


def test_what_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch):
    made = contest(monkeypatch, Clock({1: 4.0, 2: 2.0, 3: 1.0}), full_from=3)
    assert made.name == "2"
    assert [note for note in made.notes if "3 does not fit" in note]


def test_a_schedule_without_room_to_run_is_named(monkeypatch: pytest.MonkeyPatch):
    class Full(Clock):
        def __call__(self, best: SimpleNamespace, challenger: SimpleNamespace) -> tuple[Latency, Latency]:
            if challenger.streams == 3:
                raise RuntimeError("CUDA error: out of memory")
            return super().__call__(best, challenger)

    made = contest(monkeypatch, Full({1: 4.0, 2: 2.0, 3: 1.0, 4: 5.0}))
    assert made.name == "2"
    assert [note for note in made.notes if "3 does not fit" in note]


def test_without_room_to_run_step_by_step_what_steps_take_is_not_known(monkeypatch: pytest.MonkeyPatch):
    """As where a limit of tuning's memory leaves no room for the values of a run beside those that a graph holds."""
    program: Any = SimpleNamespace(runnable=CudaGraphProgram.__new__(CudaGraphProgram))
    program.runnable.eager = program.runnable.inputs = None
    raised: list[Exception] = []

    def full(*_: object) -> tuple[float, ...]:
        raise raised[-1]

    monkeypatch.setattr(schedules, "device_shares", full)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for error in (torch.OutOfMemoryError("full"), RuntimeError("CUDA error: out of memory")):
        raised.append(error)
        assert schedules._shares(program) == ()
    raised.append(ValueError("a slip of ours"))
    with pytest.raises(ValueError, match="a slip of ours"):
        schedules._shares(program)


def test_the_same_schedule_is_not_tried_twice(monkeypatch: pytest.MonkeyPatch):
    clock = Clock({1: 4.0, 2: 2.0, 3: 2.5, 4: 1.5})
    made = contest(monkeypatch, clock)
    made.challenge("again", parallel_steps(BRANCHES, 3))
    assert len(clock.pairs) == 3


def test_contention_is_read_off_what_schedules_took():
    """Four launches of the whole device take four times as long together: the serial order is as good as any."""
    full, half = [1.0] * 4, [0.5] * 4
    assert device_us(BRANCHES, half) == 20.0
    assert fit_contention(BRANCHES, full, [(parallel_steps(BRANCHES, 4), 40.0)]) == CapacityModel(1.0)
    assert fit_contention(BRANCHES, full, [(parallel_steps(BRANCHES, 4), 20.0)]) == CapacityModel(2.0)
    assert fit_contention(BRANCHES, half, [(parallel_steps(BRANCHES, 4), 40.0)]) == CapacityModel(0.5)


def test_admission_changes_the_schedule():
    shares = [0.5] * 4
    loose, admitted = parallel_steps(BRANCHES, 4), parallel_steps(BRANCHES, 4, shares, CapacityModel(1.0))
    assert streams_of(loose) == 4
    assert streams_of(admitted) <= 4
    assert sorted(one.results for one in admitted) == sorted(one.results for one in BRANCHES)
    assert dataclasses.replace(admitted[0], stream=0, waits=()) in BRANCHES


def test_what_is_left_of_the_collectives_is_part_of_a_schedules_time(monkeypatch: pytest.MonkeyPatch):
    """Two streams are faster by the clock, but send everything at their end."""

    def left(took_us: dict[int, float]) -> ScheduleSearch:
        made = contest(monkeypatch, Clock({1: 1.0, 2: 0.9, 3: 2.0, 4: 2.0}))
        again = ScheduleSearch(
            BRANCHES, made._build(BRANCHES), made._build, 1.1, made._clock, lambda steps: took_us[streams_of(steps)]
        )
        again.challenge("2", parallel_steps(BRANCHES, 2))
        return again

    assert streams_of(left({1: 0.0, 2: 50.0}).steps) == 2
    assert streams_of(left({1: 0.0, 2: 200.0}).steps) == 1


def test_collectives_that_end_after_the_last_step_are_exposed():
    steps = (step(0, ("x",), 10.0), step(1, ("v0",), 20.0), step(2, ("v1",), 5.0))
    assert exposed_us(steps, []) == 0.0
    assert exposed_us(steps, [Collective(("v0",), 10.0)]) == 0.0
    assert exposed_us(steps, [Collective(("v0",), 30.0)]) == 5.0
    assert exposed_us(steps, [Collective(("v0",), 22.0), Collective(("v1", "v2"), 7.0)]) == 7.0
    assert exposed_us(steps, [Collective(("v2",), 7.0), Collective(("v0",), 7.0)]) == 14.0  # in order
    beside = parallel_steps((step(0, ("x",), 10.0), step(1, ("x",), 20.0)), 2)
    assert exposed_us(beside, [Collective(("v0",), 15.0)]) == 5.0


def test_values_that_are_cast_together_are_named():
    casts = dataclasses.replace(step(0, ("x",), 1.0), pattern="casts", results=("a@nhwc", "b"))
    assert cast_groups((step(1, ("x",), 1.0), casts)) == [("a", "b")]


def test_a_schedule_that_would_not_be_timed_in_time_is_named_and_left_out(monkeypatch: pytest.MonkeyPatch):
    deadline = Deadline()
    deadline.stop()
    clock = Clock({1: 4.0, 2: 2.0})
    monkeypatch.setattr(schedule_search, "_bound", lambda program: program)
    monkeypatch.setattr(schedule_search, "_bytes", lambda program: 1000)

    def build(steps: Sequence[Step]) -> SimpleNamespace:
        return SimpleNamespace(streams=streams_of(steps))

    made = ScheduleSearch(BRANCHES, build(BRANCHES), build, 1.1, clock, deadline=deadline)  # type: ignore[arg-type]
    made.challenge("2", parallel_steps(BRANCHES, 2))
    assert (made.name, clock.pairs) == ("1", [])
    assert made.notes == ["streams: 2 was not tried for lack of time"]
