"""Predictions, held to the method written out plainly: what is kept between them changes no digit."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from convoy.measurement.protocol import protocol_for
from convoy.perfdb.row import Measurement, Status
from convoy.perfdb.shipped import open_shipped, shipped_targets
from convoy.perfdb.time_columns import TimeColumns
from convoy.problem import ConvProblem, EngineConfig, Knobs, Problem, parse_problem
from convoy.problem.layer_coordinates import coordinates_of, kind_of
from convoy.settings import Effort
from convoy.tune.fitted_roofline import Roofline, fit_roofline
from convoy.tune.layer_samples import MAX_NEIGHBOURS
from convoy.tune.predict import DISTANCE_PENALTY, TimePredictor
from convoy.tune.problem_distance import distance

CONFIGS = [EngineConfig(engine, 1, Knobs.of(k=k)) for engine in ("modelled", "plain") for k in range(3)]
SPACE = {engine: [config for config in CONFIGS if config.engine == engine] for engine in ("modelled", "plain")}


def layers(count: int, seed: int) -> list[ConvProblem]:
    draws = random.Random(seed)
    sizes = [2**power for power in range(3, 8)]
    return [
        ConvProblem(
            1, draws.choice(sizes), side, side, draws.choice(sizes), filter_, filter_, 1, 1, layout=layout, numerics="as_torch"
        )
        for side, filter_, layout in ((draws.choice((7, 14, 28)), draws.choice((1, 3)), "nhwc") for _ in range(count))
    ]  # fmt: skip


def model(problem: Problem, config: EngineConfig) -> float | None:
    asked.append((problem.key, config))
    return None if config.engine == "plain" else 1.0 + problem.flops / 1e5 * (1 + config.knobs.integer("k"))


asked: list[tuple[str, EngineConfig]] = []


@pytest.fixture(scope="module")
def rows() -> list[Measurement]:
    draws = random.Random(1)
    return [
        Measurement(layer.key, config, "0" * 16, "p", Status.OK, 5, draws.uniform(1.0, 900.0))
        for layer in dict.fromkeys(layers(40, 0))
        for config in CONFIGS
        if draws.random() < 0.8
    ]


def plainly(rows: list[Measurement], problem: ConvProblem, config: EngineConfig) -> float:
    """The predicted time of one config, from all rows."""
    known = {layer.key: layer for layer in layers(40, 0)}
    best = [(known[row.problem], row.median_us) for row in rows]
    roofline = Roofline(
        {"fp32": max(layer.flops / time for layer, time in best)},
        max(layer.bytes_min / time for layer, time in best),
        min(time for _, time in best),
    )
    assert fit_roofline(TimeColumns.of(rows)) == roofline
    own = [
        (distance(coordinates_of(problem), coordinates_of(known[row.problem])), known[row.problem], row)
        for row in rows
        if row.config == config and kind_of(known[row.problem]) == kind_of(problem)
    ]
    own.sort(key=lambda item: (item[0], math.log(item[2].median_us / roofline.time_us(item[1]))))
    near = own[:MAX_NEIGHBOURS]
    expected = model(problem, config)
    ratios = [
        math.log(row.median_us / (model(layer, config) if expected else roofline.time_us(layer)))  # type: ignore[operator]
        for _, layer, row in near
    ]
    weights = [2.0 ** -(2 * far) for far, _, _ in near]
    mean = sum(w * ratio for w, ratio in zip(weights, ratios, strict=True)) / sum(weights)
    return (expected or roofline.time_us(problem)) * math.exp(mean) * (1 + DISTANCE_PENALTY * near[0][0])


def test_every_time_is_that_of_the_method_to_the_last_digit(rows: list[Measurement]) -> None:
    predictor = TimePredictor.from_rows(rows, model)
    for problem in (*layers(6, 2), *layers(4, 0)):
        found = predictor.predict(problem, SPACE)
        for config in CONFIGS:
            if config in found:
                assert found[config] == plainly(rows, problem, config)
        assert len(found) == len(CONFIGS)
        assert predictor.predict(problem, SPACE) == found


def test_a_cost_model_is_asked_once_for_each_row_that_is_near(rows: list[Measurement]) -> None:
    asked.clear()
    predictor = TimePredictor.from_rows(rows, model)
    assert not asked
    (problem,) = layers(1, 2)
    predictor.predict(problem, SPACE)
    first = [key for key in asked if key[0] != problem.key]
    assert len(first) == len(set(first)) <= MAX_NEIGHBOURS * len(SPACE["modelled"])
    asked.clear()
    predictor.predict(replace(problem, numerics="strict"), SPACE)
    assert not set(asked) & set(first)


def test_shipped_columns_predict_what_their_rows_predict() -> None:
    """Facts of problems are stored in shipped files, those of the user's rows are parsed: both must give the same times."""
    target = shipped_targets()[0]
    table = open_shipped(target)
    assert table is not None
    protocol = protocol_for(Effort.QUICK, "cuda").id
    times = table.times(protocol, ())
    some = times.taken(times.problem < 900)
    keys = sorted(some.measured_problems())
    plain = TimePredictor.from_rows([row for key in keys for row in table.lookup(key, protocol)])
    stored = TimePredictor(some)
    assert stored.roofline == plain.roofline
    assert stored.measurements == plain.measurements > 500
    configs = {
        config.engine: [config] for config in map(EngineConfig.parse, some.configs.taken(slice(0, 400)).entries())
    }
    for key in keys[::97]:
        problem = parse_problem(key)
        assert stored.predict(problem, configs) == plain.predict(problem, configs)
