"""Rows that were measured under other precision settings count where those do not matter, and nowhere else."""

from dataclasses import replace

import pytest
import torch

from convoy.measurement import protocol_for
from convoy.measurement.device.detect import precision_flags
from convoy.perfdb.row import Measurement, Status
from convoy.problem import ConvProblem, EngineConfig, Knobs, LayoutProblem, LinearProblem, SubgraphProblem, TensorSpec
from convoy.settings import Effort
from convoy.tune.precision import PRECISION_SETTINGS, depends_on_precision, equivalent_targets
from tests.unit.tune.test_search import GPU, PROBLEM, Timed, run
from tests.unit.tune.test_tuning_task import Fake

TWIN = replace(GPU, versions=(*GPU.versions, ("fp32_matmul", "high")))
PROTOCOL = protocol_for(Effort.QUICK, "cuda").id
HALF = replace(PROBLEM, dtype="fp16", numerics="half")
GRAPH = "graph 1\ninput %a: fp32[4,4]\n%b: fp32[4,4] = aten.{}(%a)\nreturn %b\n"


def test_every_setting_that_a_target_names_is_known():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert set(precision_flags("cpu")) <= set(PRECISION_SETTINGS)
        assert precision_flags("cpu")
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("problem", "matters"),
    [
        (ConvProblem(1, 8, 4, 4, 8, 1, 1), True),
        (ConvProblem(1, 8, 4, 4, 8, 1, 1, numerics="strict"), False),
        (HALF, False),
        (LinearProblem(1, 8, 8), True),
        (LinearProblem(1, 8, 8, dtype="bf16"), False),
        (SubgraphProblem(GRAPH.format("relu.default"), "any"), False),
        (SubgraphProblem(GRAPH.format("mm.default").replace("(%a)", "(%a, %a)"), "any"), True),
        (SubgraphProblem(GRAPH.format("relu.default").replace("fp32", "bf16"), "any"), False),
        (LayoutProblem(TensorSpec((1, 8, 4, 4), "fp32"), "nchw", "nhwc"), False),
    ],
)
def test_products_of_fp32_heed_them(problem, matters):
    assert depends_on_precision(problem) == matters


def test_twins_differ_in_these_settings_alone():
    newer = replace(TWIN, versions=(("fp32_matmul", "high"), ("torch", "99")))
    assert equivalent_targets(GPU, [TWIN, GPU, newer, replace(TWIN, units=1)]) == [TWIN]
    assert equivalent_targets(TWIN, [GPU]) == [GPU]


@pytest.mark.parametrize(("problem", "taken"), [(HALF, True), (PROBLEM, False)])
def test_a_twins_rows_are_measured_again_only_where_the_settings_matter(database, fakes, problem, taken):
    rows = [
        Measurement(problem.key, EngineConfig(name, 1, Knobs.of(k=0)), TWIN.digest, PROTOCOL, Status.OK, 11, us)
        for name, us in (("aten", 50.0), ("fast", 10.0))
    ]
    database.put(rows, targets=[TWIN])
    runner = Timed(lambda engine, k: 20.0, GPU)
    found = run([problem], fakes(Fake("aten"), Fake("fast")), database, runner, GPU)
    assert bool(runner.asked) != taken
    times = {row.config.engine: row.median_us for row in found.rows[problem.key]}
    assert times == ({"aten": 50.0, "fast": 10.0} if taken else {"aten": 20.0, "fast": 20.0})
    assert {row.target for row in found.rows[problem.key]} == {GPU.digest}
