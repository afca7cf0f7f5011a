"""The families of random problems without a GPU: each engine has enough of its own, on a device that is described."""

from collections import Counter

import pytest

from convoy.engines.dynamic_weight import build
from convoy.engines.manifest import MANIFEST, load_engine
from convoy.measurement.accuracy import judge, make_data
from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem, parse_problem
from convoy.target import Target
from tests.fuzz.problem_families import (
    ASKED_ON_DEVICE,
    CLAIMS,
    FAMILIES,
    LEAST_OWN,
    TRIES,
    claims,
    direction_of,
    family_problem,
    shape_of,
)
from tests.fuzz.random_problems import SEED, shrink

VERSIONS = (("torch", "2.13.0"), ("triton", "3.6.0"))
H100 = Target("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132, 80 << 30, 50 << 20, VERSIONS)
CPU = detect_target("cpu")
ENGINES = [name for name in MANIFEST if name not in ASKED_ON_DEVICE]


def problems():
    return [family_problem(SEED, family, index) for index in range(TRIES) for family in FAMILIES]


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_has_problems_of_its_own_in_every_direction_that_it_has_on_a_gpu(name):
    """Where this fails for a new engine: say its directions in CLAIMS, and draw a family that it is made for."""
    engine = load_engine(name)
    own = [p for p in problems() if engine.accepts(p, H100)]
    found = Counter(map(direction_of, own))
    assert set(found) == set(claims(name))
    assert all(count >= LEAST_OWN for count in found.values()), found
    for direction in found:
        assert len({shape_of(p) for p in own if direction_of(p) == direction}) >= LEAST_OWN


def test_the_table_names_engines_and_what_is_asked_on_a_device_has_a_reason():
    assert set(CLAIMS) <= set(MANIFEST)
    assert set(ASKED_ON_DEVICE) <= set(MANIFEST)
    assert all(len(reason) > 20 for reason in ASKED_ON_DEVICE.values())
    assert all(claims(name) for name in ASKED_ON_DEVICE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_various_and_the_same_for_the_same_seed(family):
    drawn = [family_problem(SEED, family, index) for index in range(TRIES)]
    family_problem.cache_clear()
    assert drawn == [family_problem(SEED, family, index) for index in range(TRIES)]
    assert drawn != [family_problem(SEED + 1, family, index) for index in range(TRIES)]
    assert len({p.key for p in drawn}) > 0.8 * len(drawn)
    for problem in drawn:
        text = problem.mask.text if getattr(problem, "mask", None) else getattr(problem, "text", "")
        assert parse_problem(problem.key, text) == problem


@pytest.mark.parametrize("family", FAMILIES)
def test_pytorch_does_what_is_drawn(family):
    engine = load_engine("aten")
    for index in range(4):
        problem = family_problem(SEED, family, index)
        kind = ("integer", "normal")[index % 2]
        executable = build(engine, problem, engine.space(problem, CPU)[0], CPU)
        verdict = judge(executable, engine.family, problem, make_data(problem, index, kind), kind)
        assert verdict.ok, f"{problem}: {verdict.reason}"


def test_a_pruned_problem_is_made_small_with_its_mask():
    problem = next(p for p in (family_problem(SEED, "pruned parts", i) for i in range(TRIES)) if p.c >= 24)
    smallest = shrink(problem, lambda p: isinstance(p, ConvProblem) and p.mask is not None and p.c >= 24)
    assert (smallest.c, smallest.k, smallest.r, smallest.h) == (24, 1, 1, 1)
    assert smallest.mask.shape == (1, 24, 1, 1)
