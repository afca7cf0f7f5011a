"""Resources, contention and admission: by hand, on random nets, and against an exact optimum."""

from __future__ import annotations

import itertools
import random

import pytest

from convoy.schedule import (
    CapacityModel,
    Dag,
    DeviceResources,
    KernelResources,
    assign_streams,
    finished_before,
    fit_capacity,
    share_of,
    simulate,
)
from convoy.schedule.admission import admit
from convoy.schedule.contention import RunningLaunches
from convoy.schedule.streams import EVENT_US

H100 = DeviceResources(sms=132)


@pytest.mark.parametrize(
    ("kernel", "resident", "share"),
    [
        (KernelResources(132, 128), 16, 1 / 16),  # threads: 2048 / 128
        (KernelResources(66, 256, registers=255), 1, 0.5),  # registers: 256 x 255 rounded up to 65536
        (KernelResources(132, 128, registers=128), 4, 0.25),  # registers: 65536 / (128 x 128)
        (KernelResources(264, 128, shared_bytes=100 << 10), 2, 1.0),
        (KernelResources(9, 32), 32, 9 / (32 * 132)),  # blocks
        (KernelResources(10_000, 1024), 2, 1.0),
        (KernelResources(1, 64, shared_bytes=1 << 20), 1, 1 / 132),
    ],
)
def test_shares_follow_from_the_scarcest_resource(kernel, resident, share):
    assert kernel.resident(H100) == resident
    assert kernel.share(H100) == pytest.approx(share)


def test_a_launch_of_several_kernels_takes_their_mean_by_time():
    small, full = KernelResources(132, 128, time_us=3.0), KernelResources(10_000, 128, time_us=1.0)
    assert share_of([small, full], H100) == pytest.approx((3 / 16 + 1) / 4)
    assert share_of([KernelResources(132, 128), KernelResources(66, 128)], H100) == pytest.approx(1 / 16)
    assert share_of([], H100) == 0


def two(share_a, share_b):
    return Dag((10.0, 6.0), ((), ()), (share_a, share_b))


@pytest.mark.parametrize(
    ("shares", "together"),
    [((0.4, 0.5), 10.0), ((0.5, 0.5), 10.0), ((1.0, 1.0), 16.0), ((1.0, 0.5), 13.0)],
)
def test_two_that_fit_take_the_longer_ones_time_and_others_are_slowed(shares, together):
    side_by_side = [(0, 0, ()), (1, 1, ())]
    assert simulate(two(*shares), side_by_side, CapacityModel(), 0.0) == pytest.approx(together)
    assert simulate(two(*shares), [(0, 0, ()), (1, 0, ())], CapacityModel(), 0.0) == 16.0


def test_an_event_costs_where_it_is_waited_for():
    dag = Dag((2.0, 3.0), ((), (0,)), (0.1, 0.1))
    assert simulate(dag, [(0, 0, ()), (1, 1, (0,))], CapacityModel(), 0.5) == 5.5
    assert simulate(dag, [(0, 0, ()), (1, 0, ())], CapacityModel(), 0.5) == 5.0


def test_side_work_waits_until_there_is_room():
    """A chain of half the device; of two side kernels of the other half only one fits at a time."""
    chain = Dag((4.0, 4.0, 3.0, 3.0), ((), (0,), (), ()), (0.5, 0.5, 0.5, 0.5))
    placed = assign_streams(chain, 3, model=CapacityModel())
    starts = {one.launch: one.start_us for one in placed}
    assert starts[0] == 0
    assert starts[1] == 4
    first, second = sorted((2, 3), key=lambda launch: starts[launch])
    assert (starts[first], starts[second]) == (0, 3)
    assert (
        admit(chain, 3, chain.distances_us(), CapacityModel(), EVENT_US, holds=False)[0] > 8
    )  # were nothing held back
    held = next(one for one in placed if one.launch == second)
    before = next(at for at, one in enumerate(placed) if one.launch == first)
    assert held.stream == placed[before].stream or before in held.waits
    assert len({one.stream for one in assign_streams(chain, 3)}) == 3  # without a model all three begin at once


def test_the_critical_path_is_admitted_whatever_runs():
    dag = Dag((1.0, 10.0, 2.0), ((), (0,), ()), (0.2, 1.0, 0.9))
    _, begun, held = admit(dag, 2, dag.distances_us(), CapacityModel(), EVENT_US, holds=True)
    assert begun == {0: (0.0, 0), 1: (1.0, 0), 2: (11.0, 0)}
    assert set(held) == {2}


def random_dag(seed, most=30):
    draw = random.Random(seed)
    size = draw.randint(1, most)
    needs = [tuple(sorted(draw.sample(range(i), min(i, draw.choice((0, 1, 1, 2)))))) for i in range(size)]
    times = tuple(draw.uniform(5, 50) for _ in range(size))
    return Dag(times, tuple(needs), tuple(draw.choice((0.1, 0.3, 0.5, 1.0)) for _ in range(size)))


def order_of(placed):
    return [(one.launch, one.stream, one.waits) for one in placed]


def makespan(dag, placed, model):
    return simulate(dag, order_of(placed), model, EVENT_US)


@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize("seed", range(30))
def test_admitted_schedules_are_whole_safe_and_within_their_bounds(seed, streams):
    dag, model = random_dag(seed), CapacityModel()
    placed = assign_streams(dag, streams, tries=4, model=model)
    assert sorted(one.launch for one in placed) == list(range(len(dag.times_us)))
    known = finished_before([(one.stream, one.waits) for one in placed], streams)
    position = {one.launch: at for at, one in enumerate(placed)}
    for at, one in enumerate(placed):
        for before in dag.needs[one.launch]:
            assert position[before] <= known[at][placed[position[before]].stream]
    took = makespan(dag, placed, model)
    assert dag.bound_us - 1e-6 <= took <= dag.total_us + EVENT_US * len(placed)
    if streams == 1:
        assert took == pytest.approx(dag.total_us)


def foreseen(dag, streams, model):
    """The prediction of `admit` for the schedule: its end, and the launches that were held back."""
    ways = [admit(dag, streams, dag.distances_us(), model, EVENT_US, holds=holds) for holds in (True, False)]
    end, _, holds = min(ways, key=lambda way: way[0])
    return end, holds


@pytest.mark.parametrize("seed", range(60))
def test_what_was_foreseen_is_what_the_waits_bring_about(seed):
    """Run by its streams and waits alone, a schedule takes what was foreseen: the events hold back what was held back."""
    dag, model = random_dag(seed), CapacityModel()
    placed = assign_streams(dag, 4, tries=1, model=model)
    end, holds = foreseen(dag, 4, model)
    assert makespan(dag, placed, model) == pytest.approx(end)
    known = finished_before([(one.stream, one.waits) for one in placed], 4)
    position = {one.launch: at for at, one in enumerate(placed)}
    for launch, others in holds.items():
        assert all(position[other] <= known[position[launch]][placed[position[other]].stream] for other in others)


def test_without_the_events_that_only_hold_back_it_is_another_schedule():
    """The random nets above do hold launches back, and that decides what they take."""
    changed = 0
    for seed in range(60):
        dag, model = random_dag(seed), CapacityModel()
        placed = assign_streams(dag, 4, tries=1, model=model)
        loose = [
            (one.launch, one.stream, tuple(w for w in one.waits if placed[w].launch in dag.needs[one.launch]))
            for one in placed
        ]
        changed += abs(simulate(dag, loose, model, EVENT_US) - makespan(dag, placed, model)) > EVENT_US
    assert changed >= 10


def optimum_us(dag, streams, model):
    """The shortest makespan under a model of all schedules that begin launches when others end, and may hold any back."""
    count = len(dag.times_us)
    best = [dag.total_us]

    def go(running, ended):
        if running.now_us >= best[0]:
            return
        if len(ended) == count:
            best[0] = running.now_us
            return
        ready = [
            launch
            for launch in range(count)
            if launch not in ended and launch not in running.left_us and all(b in ended for b in dag.needs[launch])
        ]
        room = streams - len(running.left_us)
        for size in range(min(room, len(ready)), -1, -1):
            for chosen in itertools.combinations(ready, size):
                if not chosen and not running.left_us:
                    continue
                later = RunningLaunches(dag, model)
                later.left_us, later.now_us = dict(running.left_us), running.now_us
                for launch in chosen:
                    later.begin(launch)
                go(later, ended | set(later.advance()))

    go(RunningLaunches(dag, model), frozenset())
    return best[0]


def test_small_schedules_are_nearly_optimal_under_contention():
    off: list[float] = []
    for seed in range(40):
        draw = random.Random(seed)
        needs = [tuple(sorted(draw.sample(range(i), min(i, draw.choice((0, 1, 1, 2)))))) for i in range(6)]
        shares = tuple(draw.choice((0.2, 0.4, 0.6, 1.0)) for _ in needs)
        dag = Dag(tuple(float(draw.randint(100, 2000)) for _ in needs), tuple(needs), shares)
        best, found = (
            optimum_us(dag, 3, CapacityModel()),
            makespan(dag, assign_streams(dag, 3, model=CapacityModel()), CapacityModel()),
        )
        assert dag.bound_us - 1e-6 <= best <= found + EVENT_US * 6
        off.append((found - EVENT_US * 6) / best - 1)
    assert sum(one <= 0 for one in off) >= 28
    assert max(off) < 0.2
    assert sum(off) / len(off) < 0.02


def test_a_capacity_is_found_again_from_what_schedules_took():
    dag = random_dag(3)
    schedules = [order_of(assign_streams(dag, streams)) for streams in (2, 3, 4)]
    for capacity in (0.75, 1.0, 1.5):
        took = [(order, simulate(dag, order, CapacityModel(capacity), EVENT_US)) for order in schedules]
        assert fit_capacity(dag, took, EVENT_US) == capacity
    assert fit_capacity(dag, [], EVENT_US) == 1.0


def test_lanes_carry_their_own_launches_and_no_others():
    """Transfers on a lane: in the order in which they are ready, beside everything else."""
    dag = Dag((5.0, 5.0, 5.0, 4.0, 4.0), ((), (0,), (1,), (0,), (1,)), (1.0, 1.0, 1.0, 0.1, 0.1), {3: 2, 4: 2})
    for model in (None, CapacityModel()):
        placed = assign_streams(dag, 2, model=model)
        assert {one.launch for one in placed if one.stream == 2} == {3, 4}
        starts = {one.launch: one.start_us for one in placed}
        assert starts[3] < starts[4]
        assert starts[3] >= 5.0
        assert all(one.waits for one in placed if one.launch in (3, 4))
