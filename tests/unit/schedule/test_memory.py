"""The arena: no two values that live together overlap, nothing is wasted without need, and the check catches faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from convoy.schedule import check, lifetimes, plan_memory
from convoy.schedule.memory import ALIGNMENT


@dataclass(frozen=True)
class Launch:
    args: tuple[str, ...]
    results: tuple[str, ...]


def random_launches(rng: random.Random) -> tuple[list[Launch], dict[str, int]]:
    launches: list[Launch] = []
    names = ["x"]
    for index in range(rng.randint(1, 20)):
        args = tuple(rng.sample(names, min(len(names), rng.randint(1, 3))))
        results = tuple(f"v{index}_{j}" for j in range(rng.randint(1, 2)))
        launches.append(Launch(args, results))
        names += results
    return launches, {name: rng.randint(0, 5000) for name in names}


def test_random_arenas_are_right_and_no_larger_than_no_sharing() -> None:
    rng = random.Random(1)
    for _ in range(200):
        launches, sizes = random_launches(rng)
        keep = {launches[-1].results[0]}
        arena = plan_memory(launches, sizes, keep=keep)
        lives = lifetimes(launches, keep)
        assert check(arena, lives, sizes) == ""
        assert arena.offsets.keys() == lives.keys()
        assert arena.size_bytes <= sum(-(-max(sizes[name], 1) // ALIGNMENT) * ALIGNMENT for name in lives)


def test_a_chain_needs_two_buffers() -> None:
    launches = [Launch(("x" if i == 0 else f"v{i - 1}",), (f"v{i}",)) for i in range(9)]
    arena = plan_memory(launches, {f"v{i}": 1024 for i in range(9)} | {"x": 0})
    assert arena.size_bytes == 2048


def test_the_check_catches_an_overlap_and_a_place_outside() -> None:
    launches = [Launch((), ("a",)), Launch((), ("b",)), Launch(("a", "b"), ("c",))]
    sizes = {"a": 300, "b": 300, "c": 10}
    arena = plan_memory(launches, sizes)
    lives = lifetimes(launches)
    assert "overlap" in check(replace(arena, offsets={**arena.offsets, "b": arena.offsets["a"]}), lives, sizes)
    assert "outside" in check(replace(arena, offsets={**arena.offsets, "c": arena.size_bytes}), lives, sizes)
