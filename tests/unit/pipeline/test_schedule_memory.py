"""A schedule that would hold too much memory keeps more of its steps on the first stream, and no more than it must."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from convoy.pipeline.check.end_to_end import Latency
from convoy.pipeline.schedule_memory import fit_in_memory
from convoy.pipeline.schedules import ScheduleSearch
from convoy.plan import Step
from convoy.problem import EngineConfig, Knobs, TensorSpec
from convoy.program.bound_plan import BoundPlan, BoundStep
from convoy.program.eager import EagerProgram
from convoy.program.lifetimes import peak_bytes, stream_pools, with_frees
from convoy.program.verification.step_order import check_order
from convoy.schedule import CapacityModel, parallel_steps


def step(index: int, args: tuple[str, ...], us: float) -> Step:
    config = EngineConfig("aten", 1, Knobs())
    return Step("region", "op", (f"n{index}",), args, (f"v{index}",), "p", config, "any", median_us=us)


def module(first: int, source: str) -> list[Step]:
    """Three branches of two steps, and what joins them."""
    steps = [step(first + index, (source,), 10.0 + index) for index in range(3)]
    steps += [step(first + 3 + index, (f"v{first + index}",), 10.0 + index) for index in range(3)]
    return [*steps, step(first + 6, tuple(f"v{first + 3 + index}" for index in range(3)), 5.0)]


NET = (*module(0, "x"), *module(7, "v6"), *module(14, "v13"))
"""Three modules; what the first makes is large, what the last makes small."""


def size_of(name: str) -> int:
    return {0: 1000, 1: 300, 2: 10}[int(name[1:]) // 7]


def bound_of(steps: Sequence[Step]) -> BoundPlan:
    names = ["x", *(f"v{index}" for index in range(len(NET)))]
    slot = {name: index for index, name in enumerate(names)}
    made = [
        BoundStep(
            one,
            SimpleNamespace(workspace_bytes=0, allocates_results=True),  # type: ignore[arg-type]
            (),
            tuple(slot[name] for name in one.args),
            tuple(slot[name] for name in one.results),
            tuple(TensorSpec((size_of(name),), "i8") for name in one.results),
        )
        for one in steps
    ]
    return BoundPlan(with_frees(made, [slot["v20"]]), names, [], [slot["v20"]], 0, 0)


SERIAL = peak_bytes(bound_of(NET))


def streams_of(steps: Sequence[Step]) -> int:
    return 1 + max(one.stream for one in steps)


def test_what_fits_stays_as_it_is():
    fitted = fit_in_memory(partial(parallel_steps, NET, 3), NET, bound_of, peak_bytes, 10 * SERIAL)
    assert fitted is not None
    assert fitted.steps == parallel_steps(NET, 3)
    assert fitted.home == 0


@pytest.mark.parametrize("most", [1.45, 1.35, 1.1])
def test_what_is_too_large_is_made_to_fit_and_the_small_layers_stay_side_by_side(most: float):
    wanted = peak_bytes(bound_of(parallel_steps(NET, 3)))
    assert wanted > most * SERIAL
    fitted = fit_in_memory(partial(parallel_steps, NET, 3), NET, bound_of, peak_bytes, most * SERIAL)
    assert fitted is not None
    assert fitted.wanted_bytes == wanted
    assert peak_bytes(bound_of(fitted.steps)) <= most * SERIAL
    assert fitted.home > 0
    side = [one for one in fitted.steps if one.stream]
    assert side
    assert min(size_of(one.results[0]) for one in side) == 10


def test_steps_that_must_stay_do_and_nothing_else_changes():
    home = {1, 4, 8}
    placed = parallel_steps(NET, 3, home=home)
    assert {one.results for one in placed if one.stream == 0} >= {NET[index].results for index in home}
    assert streams_of(placed) > 1
    assert sorted(one.results for one in placed) == sorted(one.results for one in NET)


def test_under_a_model_of_contention_they_share_the_first_stream_with_others():
    home = {1, 4, 8}
    placed = parallel_steps(NET, 3, [0.4] * len(NET), CapacityModel(1.0), home=home)
    check_order(placed)
    first = {one.results for one in placed if one.stream == 0}
    assert first > {NET[index].results for index in home}
    assert streams_of(placed) > 1


def test_where_even_that_is_not_enough_there_is_none():
    assert fit_in_memory(partial(parallel_steps, NET, 3), NET, bound_of, peak_bytes, 0.5 * SERIAL) is None


def test_the_fullest_moment_of_a_stream_names_who_filled_it():
    bound = bound_of(parallel_steps(NET, 2))
    found = stream_pools(bound)
    assert sum(pool.size_bytes for pool in found.values()) == peak_bytes(bound)
    makers = found[1].makers
    assert {bound.steps[at].step.stream for at in makers} == {1}
    assert sum(size_of(bound.steps[at].step.results[0]) for at in makers) == found[1].size_bytes


def contest(most: float) -> ScheduleSearch:
    """Three streams that take half the time, against one."""

    def build(steps: Sequence[Step]) -> SimpleNamespace:
        return SimpleNamespace(runnable=EagerProgram(bound_of(steps), torch.device("cpu")))

    def clock(best: object, challenger: object) -> tuple[Latency, Latency]:
        return Latency("best", (4.0,)), Latency("challenger", (2.0,))

    made = ScheduleSearch(NET, build(NET), build, most, clock)  # type: ignore[arg-type]
    made.challenge_within("3", partial(parallel_steps, NET, 3), NET, bound_of)
    return made


def test_a_contest_says_how_many_steps_stay_and_runs_what_fits():
    made = contest(1.1)
    assert made.name == "3"
    assert peak_bytes(bound_of(made.steps)) <= 1.1 * SERIAL
    (note,) = made.notes
    assert "3 would hold" in note
    assert "steps stay on the first stream" in note


def test_a_contest_times_and_names_what_cannot_be_made_to_fit():
    made = contest(0.5)
    assert made.name == "1"
    (note,) = made.notes
    assert "times the memory of one stream; stream_memory allows 0.5 times" in note
