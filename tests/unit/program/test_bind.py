"""Memory goes back after its last use; orders that could read a value too early are refused."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from convoy.errors import PlanError
from convoy.plan import Step
from convoy.problem import EngineConfig, Knobs, TensorSpec
from convoy.program.bound_plan import BoundPlan, BoundStep
from convoy.program.lifetimes import peak_bytes, with_frees
from convoy.program.verification.step_order import check_order
from convoy.schedule import finished_before, parallel_steps


def step(index, args, results, time_us=1.0):
    config = EngineConfig("aten", 1, Knobs())
    return Step("region", "op", (f"n{index}",), args, results, "p", config, "nchw", median_us=time_us)


def random_steps(seed):
    draw = random.Random(seed)
    values, steps = ["x"], []
    for index in range(draw.randint(1, 30)):
        args = tuple(dict.fromkeys(draw.choices(values[-8:], k=draw.choice((1, 1, 2, 3)))))
        steps.append(step(index, args, (f"v{index}",), draw.uniform(0.5, 5)))
        values.append(f"v{index}")
    return tuple(steps)


def bound(steps):
    names = ["x", *(name for s in sorted(steps, key=lambda s: int(s.results[0][1:])) for name in s.results)]
    slot = {name: index for index, name in enumerate(names)}
    return [
        BoundStep(s, None, (), tuple(slot[a] for a in s.args), tuple(slot[r] for r in s.results), ()) for s in steps
    ]


@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize("seed", range(30))
def test_memory_goes_back_only_when_every_reader_has_finished(seed, streams):
    steps = parallel_steps(random_steps(seed), streams)
    check_order(steps)
    found = bound(steps)
    outputs = [len(found)]
    found = with_frees(found, outputs)
    freed = [slot for b in found for slot in b.frees]
    assert len(set(freed)) == len(freed)
    assert not set(freed) & set(outputs)
    known = finished_before([(b.step.stream, b.step.waits) for b in found], streams)
    owner = {slot: b.step.stream for b in found for slot in b.results}
    for at, b in enumerate(found):
        for slot in b.frees:
            users = [i for i, other in enumerate(found) if slot in (*other.args, *other.results)]
            # The next step of the stream that owns the memory is the first that could be given it.
            later = [i for i in range(at + 1, len(found)) if found[i].step.stream == owner.get(slot, 0)]
            assert all(user <= known[later[0]][found[user].step.stream] for user in users if later)
    if streams == 1:
        assert all(b.frees == tuple(s for s in sorted({*b.args, *b.results} - set(outputs)) if last(found, s) == i)
                   for i, b in enumerate(found))  # fmt: skip


def last(found, slot):
    return max(i for i, other in enumerate(found) if slot in (*other.args, *other.results))


def held(steps, sizes, outputs, scratch=0):
    names = list(dict.fromkeys(["x", *(name for s in steps for name in s.results)]))
    slot = {name: index for index, name in enumerate(names)}
    made = [
        BoundStep(
            s,
            SimpleNamespace(workspace_bytes=scratch),
            (),
            tuple(slot[a] for a in s.args),
            tuple(slot[r] for r in s.results),
            tuple(TensorSpec((sizes[r],), "i8") for r in s.results),
        )
        for s in steps
    ]
    made = with_frees(made, [slot[o] for o in outputs])
    return peak_bytes(BoundPlan(made, names, [], [], 0, 0))


def test_peaks_are_those_of_all_streams_together():
    chain = (step(0, ("x",), ("a",)), step(1, ("a",), ("b",)), step(2, ("b",), ("c",)))
    sizes = {"a": 100, "b": 10, "c": 1}
    assert held(chain, sizes, ["c"]) == 110
    assert held(chain, sizes, ["c"], scratch=7) == 117
    aside = (*chain[:2], replace(chain[2], stream=1, waits=(1,)))
    assert held(aside, sizes, ["c"], scratch=7) == 110 + 1 + 14  # a second pool, a second workspace
    assert held((*chain, step(3, ("a",), ("d",))), {**sizes, "d": 2}, ["d"]) == 111


def test_a_missing_wait_is_refused():
    taken = 0
    for seed in range(30):
        steps = parallel_steps(random_steps(seed), 3)
        for at, one in enumerate(steps):
            if one.waits:
                with pytest.raises(PlanError, match="waits"):
                    check_order((*steps[:at], replace(one, waits=()), *steps[at + 1 :]))
                taken += 1
    assert taken > 20


def test_too_many_streams_are_refused():
    with pytest.raises(PlanError, match="streams under 16"):
        check_order((replace(step(0, ("x",), ("v0",)), stream=16),))


@pytest.mark.parametrize("seed", range(10))
def test_random_numbers_are_drawn_in_one_order_on_any_streams(seed):
    draw = random.Random(seed)
    steps = random_steps(seed)
    drawing = {index for index in range(len(steps)) if draw.random() < 0.4}
    steps = tuple(replace(s, pattern="draw") if index in drawing else s for index, s in enumerate(steps))
    for streams in (2, 4):
        found = [s.nodes for s in parallel_steps(steps, streams) if s.pattern == "draw"]
        assert found == [s.nodes for s in steps if s.pattern == "draw"]
