"""Timelines: when steps run, which are critical, and what Perfetto reads."""

from __future__ import annotations

import pytest

from convoy.plan.describe import shapes
from convoy.plan.plan import Step
from convoy.problem import EngineConfig, Knobs
from convoy.schedule.timeline import bounds, chrome_trace, planned, spans


def step(name: str, args: tuple[str, ...], us: float, stream: int = 0, waits: tuple[int, ...] = ()) -> Step:
    config = EngineConfig("aten", 2, Knobs())
    return Step("region", "op", (name,), args, (name,), "p", config, "any", us, 0, stream, waits)


FORK = (
    step("a", ("x",), 2.0),
    step("b", ("a",), 5.0),
    step("c", ("a",), 3.0, 1, (0,)),
    step("d", ("b", "c"), 1.0, 0, (2,)),
)


def test_a_step_begins_when_its_stream_is_free_and_what_it_waits_for_is_done():
    found = planned(FORK)
    assert [(s.start_us, s.stream) for s in found] == [(0, 0), (2, 0), (2, 1), (7, 0)]
    assert [s.critical for s in found] == [True, True, False, True]
    late = planned((*FORK[:2], step("c", ("a",), 9.0, 1, (0,)), FORK[3]))
    assert late[3].start_us == 11
    assert [s.critical for s in late] == [True, False, True, True]


def test_bounds_are_the_sum_and_the_longest_chain():
    assert bounds(FORK).serial_us == 11
    assert bounds(FORK).critical_us == 8
    assert bounds(()).critical_us == 0


def test_the_critical_path_follows_the_times_that_were_measured():
    assert [s.critical for s in spans(FORK, [0, 2, 2, 12], [2, 3, 10, 1])] == [True, False, True, True]


def test_a_trace_has_a_process_for_each_timeline_and_a_row_for_each_stream():
    trace = chrome_trace({"planned": planned(FORK), "measured": []})
    events = trace["traceEvents"]
    assert isinstance(events, list)
    names = [e["args"]["name"] for e in events if e["ph"] == "M"]
    assert names == ["planned", "stream 0", "stream 1", "measured"]
    (side,) = [e for e in events if e["ph"] == "X" and not e["args"]["critical"]]
    assert (side["name"], side["ts"], side["dur"], side["pid"], side["tid"]) == ("op(c)", 2, 3, 0, 1)


def test_a_heading_names_all_of_a_few_inputs_and_the_last_of_many():
    assert shapes(("fp32[1]", "i64[2]")) == "fp32[1], i64[2]"
    assert shapes((*["fp32[3]"] * 9, "fp32[8,3,4,4]", "i64[8]")) == "11 inputs, the last fp32[8,3,4,4], i64[8]"


@pytest.mark.parametrize("count", [0, 1])
def test_few_steps(count: int):
    assert len(planned(FORK[:count])) == count
