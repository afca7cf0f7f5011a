"""Gradients that travel while others are made: when each bucket begins, and that the averages are right."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from convoy.plan import Step
from convoy.problem import EngineConfig, Knobs, TensorSpec
from convoy.program.bound_plan import BoundPlan, BoundStep
from convoy.schedule import CapacityModel, collectives, parallel_steps
from convoy.schedule.collectives import buckets
from convoy.schedule.timeline import planned
from convoy.training.allreduce import gradient_allreduce, overlapped_allreduce
from convoy.training.allreduce.bf16_allreduce import Bf16ErrorFeedback
from convoy.training.allreduce.bucket_completion import all_written
from convoy.training.allreduce.gradient_allreduce import GradientAllReduce, allreduce_gradients
from convoy.training.allreduce.overlapped_allreduce import OverlappedAllReduce

CPU = torch.device("cpu")


@pytest.fixture
def alone() -> Iterator[Any]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Sent(GradientAllReduce):
    """Notes what is sent instead of sending it."""

    def __init__(self) -> None:
        super().__init__(None, CPU)
        self.buckets: list[tuple[int, list[str]]] = []
        self.now = 0

    def begin(self, bucket: Sequence[Any], made: Sequence[Any] = ()) -> None:
        self.buckets.append((self.now, list(bucket)))

    def end(self) -> None:
        self.now = -1


def bound(order: Sequence[str], learned: Sequence[str], sizes: dict[str, int]) -> BoundPlan:
    """A step for each name, in order; the loss and the learned ones are returned."""
    names = ["x", *order]
    config = EngineConfig("aten", 1, Knobs())
    steps = [
        BoundStep(
            Step("region", "op", (name,), ("x",), (name,), "p", config, "any"),
            SimpleNamespace(workspace_bytes=0),  # type: ignore[arg-type]
            (),
            (0,),
            (names.index(name),),
            (TensorSpec((sizes.get(name, 1),), "i8"),),
        )
        for name in order
    ]
    return BoundPlan(steps, names, [], [names.index(name) for name in ("loss", *learned)], 0, 0)


def run(made: OverlappedAllReduce, sent: Sent, names: Sequence[str]) -> None:
    slots: list[Any] = [None] * len(names)
    for index, name in enumerate(names[1:]):
        slots[index + 1] = name
        sent.now = index
        made.after(index, slots)
    made.end()


@pytest.mark.parametrize("seed", range(20))
def test_each_bucket_begins_with_its_last_gradient_and_in_everyones_order(seed: int, monkeypatch: pytest.MonkeyPatch):
    draw = random.Random(seed)
    learned = [f"g{index}" for index in range(draw.randint(1, 12))]
    order = [*learned, "loss", "other", "more"]
    draw.shuffle(order)
    sizes = {name: draw.randint(1, 40) for name in learned}
    monkeypatch.setattr(overlapped_allreduce, "allreduce_buckets", lambda s, d: buckets(s, d, limit=50))
    given, sent = bound(order, learned, sizes), Sent()
    run(OverlappedAllReduce(given, len(learned), sent), sent, given.slot_names)
    wanted = buckets([sizes[name] for name in reversed(learned)], ["i8"] * len(learned), limit=50)
    back = learned[::-1]
    assert [names for _, names in sent.buckets] == [[back[i] for i in bucket] for bucket in wanted]
    assert sent.now == -1
    latest = -1
    for begun, names in sent.buckets:
        latest = max(latest, *(order.index(name) for name in names))
        assert begun == latest  # no later than it must be, and never before one that others begin first


def test_gradients_that_no_launch_makes_are_not_waited_for():
    given = bound(["loss", "g0"], ["g0"], {})
    assert all_written(given, 1)
    given.outputs[1] = 0
    assert not all_written(given, 1)


def test_averages_keep_values_and_memory_formats(alone: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gradient_allreduce, "allreduce_buckets", lambda s, d: buckets(s, d, limit=300))
    given = [
        torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.randn(5),
        torch.randn(6, 2, 1, 1),
        torch.randn(3, 4).t(),
        torch.randn(2, 2, dtype=torch.float64),
    ]
    before, strides = [g.clone() for g in given], [g.stride() for g in given]
    allreduce_gradients(given, GradientAllReduce(alone, CPU))
    assert [g.stride() for g in given] == strides
    assert all(torch.equal(g, b) for g, b in zip(given, before, strict=True))


def test_averages_divide_by_the_number_of_processes(alone: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
    given = [torch.full((3, 2, 2, 2), 8.0).to(memory_format=torch.channels_last), torch.full((2,), 4.0)]
    allreduce_gradients(given, GradientAllReduce(alone, CPU))
    assert [g.unique().tolist() for g in given] == [[2.0], [1.0]]


def test_with_nccl_the_sender_divides(alone: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    asked: list[Any] = []
    before = dist.all_reduce

    def watched(flat: torch.Tensor, how: Any, **words: Any) -> Any:
        asked.append(how)
        return before(flat, dist.ReduceOp.SUM, **words)

    monkeypatch.setattr(dist, "all_reduce", watched)
    given = [torch.full((3, 2), 8.0), torch.full((2,), 4.0)]
    allreduce_gradients(given, GradientAllReduce(alone, CPU))
    assert asked == [dist.ReduceOp.AVG]
    assert [g.unique().tolist() for g in given] == [[8.0], [4.0]]  # of one process; nobody divided once more


def test_a_gradient_that_travels_alone_is_sent_from_where_it_lies(alone: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(gradient_allreduce, "allreduce_buckets", lambda s, d: buckets(s, d, limit=1))
    copies: list[int] = []
    before = torch._foreach_copy_

    def counted(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        copies.append(len(into))
        before(into, values)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    dense = [torch.full((4, 3, 2, 2), 6.0).to(memory_format=torch.channels_last), torch.full((5,), 2.0)]
    allreduce_gradients(dense, GradientAllReduce(alone, CPU))
    assert copies == []
    turned = torch.arange(12.0).reshape(3, 4).t()
    allreduce_gradients([turned], GradientAllReduce(alone, CPU))
    assert copies == [1]
    assert [g.unique().tolist() for g in dense] == [[3.0], [1.0]]
    assert torch.equal(turned, torch.arange(12.0).reshape(3, 4).t() / 2)


def test_error_feedback_finds_its_errors_after_a_step_that_was_given_up(alone: Any):
    """A capture may fail amid the buckets; the next step's first bucket is the first one again."""
    averages = Bf16ErrorFeedback(alone, CPU)
    fine = 1 + 2.0**-10  # bf16 has 1 and 1 + 2 ** -7
    found = []
    for step in range(17):
        if step == 5:
            averages.begin([torch.full((2,), fine)])
            averages.restart()  # what was sent is lost, with its error
            averages._errors.clear()
        given = [torch.full((2,), fine), torch.full((3, 2), -fine), torch.full((2,), fine)]
        allreduce_gradients(given, averages)
        found.append(given)
    assert len(averages._errors) == 1  # one bucket, whose errors every step finds
    total = torch.stack([given[0] for given in found[5:]]).double().sum()
    assert abs(total - 2 * 12 * fine) < 2 * 2.0**-7


@pytest.mark.parametrize("broken", [float("inf"), float("nan")])
def test_error_feedback_forgets_what_is_not_finite(alone: Any, broken: float):
    averages = Bf16ErrorFeedback(alone, CPU)
    first, second = [torch.tensor([broken, 1.0])], [torch.tensor([3.0, 1.0])]
    allreduce_gradients(first, averages)
    assert not first[0][0].isfinite()  # as without feedback: whoever trains must see it
    allreduce_gradients(second, averages)
    assert torch.equal(second[0], torch.tensor([3.0, 1.0]))


def step(name: str, args: tuple[str, ...], us: float) -> Step:
    return Step("region", "op", (name,), args, (name,), "p", EngineConfig("aten", 1, Knobs()), "any", median_us=us)


SIDES = ("w0", "w1", "w2", "w3")
TIMES_US = {"w0": 20.0, "w1": 20.0, "w2": 20.0, "w3": 10.0}


def ends_us(found: Sequence[Step]) -> dict[str, float]:
    """The time at which each result is there, by the plan's own streams and waits."""
    return {one.results[0]: span.start_us + span.duration_us for one, span in zip(found, planned(found), strict=True)}


@pytest.mark.parametrize("contended", [False, True])
def test_what_is_sent_is_made_early(contended: bool):
    """Weight gradients behind one data gradient: the shortest would come last, and what is to be sent must not."""
    steps = (step("d", ("x",), 5.0), *(step(name, ("d",), TIMES_US[name]) for name in SIDES))
    sent = collectives(["w3"], [1 << 20], ["fp32"], 2)
    shares, model = ([0.4] * len(steps), CapacityModel()) if contended else ((), None)
    ends = {}
    for label, given in (("apart", ()), ("sent", sent)):
        found = parallel_steps(steps, 2, shares, model, given)
        assert sorted(one.results for one in found) == sorted(one.results for one in steps)
        assert max(one.stream for one in found) == 1
        ends[label] = ends_us(found)["w3"]
    assert ends["sent"] < ends["apart"]
    assert ends == {"apart": 35.0, "sent": 15.0}


def test_of_two_buckets_the_one_that_takes_longer_to_send_is_made_first():
    """The classifier's gradients are the most bytes: they leave first, though three smaller layers' would take longer to make."""
    steps = (step("d", ("x",), 5.0), *(step(name, ("d",), TIMES_US[name]) for name in SIDES))
    sent = collectives(SIDES, [1 << 10] * 3 + [20 << 20], ["fp32"] * 4, 2, limit=3 << 10)
    assert [one.args for one in sent] == [("w3",), ("w2", "w1", "w0")]
    ends = ends_us(parallel_steps(steps, 2, collectives=sent))
    assert ends["w3"] == 15.0
    assert ends["w3"] < min(ends[name] for name in SIDES[:3])
