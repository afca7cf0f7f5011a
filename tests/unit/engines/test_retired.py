"""Retired engines, and engines that compete only where they are named: plans, rows and the shipped results."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import convoy
from convoy.engines.competition import competing_engines
from convoy.engines.manifest import MANIFEST, RETIRED, entry, load_engine
from convoy.errors import InputError
from convoy.measurement import detect_target
from convoy.measurement.protocol import protocol_for
from convoy.perfdb import Database
from convoy.perfdb.row import Measurement, Status
from convoy.perfdb.shipped import read_shipped, shipped_targets
from convoy.problem import ConvProblem, EngineConfig, Knobs, is_subgraph_key
from convoy.program.verification.usable_config import why_not
from convoy.settings import Effort

PUBLISHED = {"gemm", "winograd2", "winograd4", "fft", "fft_tiled"}
REPLICAS = {"zeroskip.channels", "zeroskip.ecr", "zeroskip.gather", "zeroskip.blocks", "pruned.csr"}


def test_a_retired_id_says_why_and_is_never_used_again():
    assert RETIRED
    assert not RETIRED.keys() & MANIFEST.keys()
    for engine, reason in RETIRED.items():
        with pytest.raises(InputError, match=f"withdrawn: {reason[:20]}"):
            load_engine(engine)
        with pytest.raises(InputError, match="withdrawn"):
            competing_engines(convoy.Settings(only_engines=(engine,)))
        assert competing_engines(convoy.Settings(deny_engines=(engine,))) == competing_engines(convoy.Settings())


def test_a_plan_that_names_one_falls_back_with_the_reason():
    problem, target = ConvProblem(1, 3, 8, 8, 4, 3, 3), detect_target("cpu")
    for engine, reason in RETIRED.items():
        assert reason in why_not(EngineConfig(engine), problem, target)


def test_rows_that_name_one_are_left_out(tmp_path):
    model, x = nn.Conv2d(3, 4, 3).eval(), torch.randn(1, 3, 8, 8)
    target, db = detect_target("cpu"), tmp_path / "perf.db"
    problem = ConvProblem(1, 3, 8, 8, 4, 3, 3, numerics="as_torch")
    key = replace(problem, epilogue=convoy.problem.Epilogue(bias=True)).key
    protocol = protocol_for(Effort.NONE, "cpu").id
    rows = [
        Measurement(
            key, EngineConfig(engine, 1, Knobs()), target.digest, protocol, Status.OK, samples=9, median_us=0.01
        )
        for engine in RETIRED
    ]
    with Database.open(db) as database:
        database.put(rows)
    fast = convoy.optimize(model, (x,), settings=convoy.Settings(effort="none", db=db))
    assert not RETIRED.keys() & {step.config.engine for step in fast.plan.steps}
    assert torch.allclose(fast(x), model(x), atol=1e-5)


@pytest.mark.parametrize("target", shipped_targets())
def test_no_shipped_row_is_of_an_engine_that_cannot_be_chosen(target):
    for row in read_shipped(target):
        assert row.config.engine in MANIFEST
        numerics = load_engine(row.config.engine).only_numerics
        # A subgraph's key does not say the numerics.
        assert not numerics or is_subgraph_key(row.problem) or any(f":{name}:" in row.problem for name in numerics)


def test_published_algorithms_and_replicas_compete_where_they_are_named():
    usual = set(competing_engines(convoy.Settings(engines=())))
    assert not usual & (PUBLISHED | REPLICAS)
    assert set(MANIFEST) - set(competing_engines(convoy.Settings(), published=True)) == {
        "batches",
        "cuda.split_fp32",
        "triton.split_fp32",
    }
    for engine in PUBLISHED | REPLICAS:
        assert engine in competing_engines(convoy.Settings(only_engines=(engine,)))
        assert engine in competing_engines(convoy.Settings(engines=(entry(engine),)))


@pytest.mark.parametrize("engine", ["cuda.split_fp32", "triton.split_fp32"])
def test_split_products_compete_under_strict_numerics(engine):
    assert engine in competing_engines(convoy.Settings(numerics="strict"))
    assert engine not in competing_engines(convoy.Settings())
    assert engine in competing_engines(convoy.Settings(only_engines=(engine,)))
