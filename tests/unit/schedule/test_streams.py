"""Dags and list scheduling: what must hold of every schedule, on random nets, and small ones that are known."""

import random
from dataclasses import dataclass

import pytest

from convoy.schedule import Dag, assign_streams, dag_of, finished_before
from convoy.schedule.streams import EVENT_US


@dataclass
class Launch:
    args: tuple[str, ...]
    results: tuple[str, ...]


DIAMOND = [Launch(("x",), ("a",)), Launch(("a",), ("b",)), Launch(("a",), ("c",)), Launch(("b", "c"), ("d",))]


def random_dag(seed):
    draw = random.Random(seed)
    size = draw.randint(1, 40)
    reach = draw.choice((2, 5, 40))
    needs = []
    for index in range(size):
        earlier = range(max(0, index - reach), index)
        needs.append(tuple(sorted(draw.sample(earlier, min(len(earlier), draw.choice((0, 1, 1, 2, 3)))))))
    return Dag(tuple(draw.choice((0.0, 1.0, draw.uniform(0.1, 20))) for _ in range(size)), tuple(needs))


def makespan(dag, placed):
    return max((p.start_us + dag.times_us[p.launch] for p in placed), default=0.0)


def test_needs_and_the_critical_path():
    dag = dag_of(DIAMOND, [1.0, 5.0, 2.0, 1.0])
    assert dag.needs == ((), (0,), (0,), (1, 2))
    assert dag.distances_us() == [7.0, 6.0, 3.0, 1.0]
    assert dag.critical_path() == [0, 1, 3]
    assert (dag.critical_us, dag.total_us) == (7.0, 9.0)
    empty = dag_of([], [])
    assert (empty.critical_path(), empty.critical_us, assign_streams(empty, 3)) == ([], 0.0, [])


def test_the_diamond_runs_its_short_side_beside_the_long_one():
    dag = dag_of(DIAMOND, [1.0, 5.0, 2.0, 1.0])
    placed = assign_streams(dag, 2)
    assert [(p.launch, p.stream, p.waits) for p in placed] == [(0, 0, ()), (1, 0, ()), (2, 1, (0,)), (3, 0, (2,))]
    assert makespan(dag, placed) == 7.0  # the critical path waits for nothing


def test_a_copy_is_made_by_name_and_read_by_name():
    launches = [Launch(("x",), ("x@nhwc",)), Launch(("x@nhwc",), ("y",)), Launch(("x",), ("z",))]
    assert dag_of(launches, [1.0] * 3).needs == ((), (0,), ())


@pytest.mark.parametrize("streams", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(40))
def test_every_schedule_is_whole_safe_and_no_longer_than_serial(seed, streams):
    dag = random_dag(seed)
    placed = assign_streams(dag, streams)
    assert sorted(p.launch for p in placed) == list(range(len(dag.times_us)))
    assert {p.stream for p in placed} <= set(range(streams))
    assert broken(dag, placed, streams) == []
    for one in placed:
        began = {p.launch: p.start_us for p in placed}
        for before in dag.needs[one.launch]:
            assert one.start_us >= began[before] + dag.times_us[before]
    assert dag.critical_us <= makespan(dag, placed) + 1e-9
    assert makespan(dag, placed) <= dag.total_us + 1e-9
    if streams == 1:
        assert all(not p.waits for p in placed)


def broken(dag, placed, streams):
    """Launches that may start before something that they need has finished."""
    known = finished_before([(p.stream, p.waits) for p in placed], streams)
    position = {p.launch: at for at, p in enumerate(placed)}
    return [
        (p.launch, before)
        for at, p in enumerate(placed)
        for before in dag.needs[p.launch]
        if position[before] > known[at][placed[position[before]].stream]
    ]


def test_no_wait_can_be_left_out():
    """Each event that a schedule has is needed: without it, something could be read before it is there."""
    taken = 0
    for seed in range(40):
        dag = random_dag(seed)
        placed = assign_streams(dag, 3)
        for at, one in enumerate(placed):
            for wait in one.waits:
                fewer = type(one)(one.launch, one.stream, tuple(w for w in one.waits if w != wait), one.start_us)
                assert broken(dag, [*placed[:at], fewer, *placed[at + 1 :]], 3)
                taken += 1
    assert taken > 100


def optimum_us(dag, streams):
    """The shortest makespan of all, by trying every order: some order, each launch as early as it can, is optimal."""
    count = len(dag.times_us)
    best = [dag.total_us]

    def go(done, ends, free):
        if len(done) == count:
            best[0] = min(best[0], max(ends.values(), default=0.0))
            return
        for launch in range(count):
            if launch in done or any(before not in done for before in dag.needs[launch]):
                continue
            for stream in range(streams):
                start = max([free[stream], *(ends[before] for before in dag.needs[launch])])
                end = start + dag.times_us[launch]
                if end < best[0]:
                    go(done | {launch}, ends | {launch: end}, [*free[:stream], end, *free[stream + 1 :]])

    go(frozenset(), {}, [0.0] * streams)
    return best[0]


def test_small_schedules_are_nearly_optimal():
    """Graham's bound for list scheduling, and in nearly all cases the optimum itself."""
    optimal = 0
    for seed in range(60):
        draw = random.Random(seed)
        needs = [tuple(sorted(draw.sample(range(i), min(i, draw.choice((0, 1, 1, 2)))))) for i in range(6)]
        dag = Dag(tuple(float(draw.randint(100, 2000)) for _ in needs), tuple(needs))
        best, found = optimum_us(dag, 2), makespan(dag, assign_streams(dag, 2))
        events = EVENT_US * len(needs)
        assert best - 1e-6 <= found <= (2 - 1 / 2) * best + events
        optimal += found <= best + events
    assert optimal >= 55


def test_independent_chains_take_a_stream_each():
    chains = [Launch((f"v{c}{i - 1}",), (f"v{c}{i}",)) for i in range(5) for c in range(4)]
    dag = dag_of(chains, [2.0] * 20)
    placed = assign_streams(dag, 4)
    assert makespan(dag, placed) == dag.critical_us == 10.0
    assert all(not p.waits for p in placed)
