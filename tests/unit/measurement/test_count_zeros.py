"""Zeros in the inputs of convolutions: counted on the user's own, given to the data that skipping engines are timed on, and kept
apart in the search: a time at many zeros says nothing of an input with few."""

from __future__ import annotations

import pytest
import torch

from convoy.capture import capture_inference
from convoy.compare.study.learn_criteria import known_layers
from convoy.engines.activation_sparsity import (
    BUCKETS,
    CURVE,
    KINDS,
    SparsityBucket,
    SparsityShares,
    bucket_of,
    matches_bucket,
    sparsity_kind,
    sparsity_percent,
    with_sparsity,
)
from convoy.graph.text import parse_graph
from convoy.measurement.count_zeros import image_shares, layer_zeros, zero_shares
from convoy.measurement.data import make_data
from convoy.measurement.data_with_zeros import with_zeros
from convoy.measurement.reference_data import ReferenceData
from convoy.perfdb.row import Measurement, Status
from convoy.problem import ConvProblem, EngineConfig, Knobs, LinearProblem
from convoy.settings import Effort
from convoy.tune.predict import TimePredictor
from convoy.tune.search_space import SearchSpace
from convoy.tune.tuning_task import TuningTask
from tests.unit.tune.test_tuning_task import PROTOCOL, TARGET, Fake

CONV = ConvProblem(2, 6, 8, 9, 4, 3, 3, layout="nhwc", numerics="strict")
PROBLEM = LinearProblem(2, 8, 4)


class Skipping(Fake):
    skips_zeros = True


class Leaving(Fake):
    """Leaves out dead channels."""

    skips_zeros = True
    zeros_kind = "dead_channels"


def zeros(*percents: int) -> list[SparsityBucket]:
    return [SparsityBucket(zeros=percent) for percent in percents]


# ---- words


def test_shares_are_taken_for_the_next_lower_one():
    assert [bucket_of(share) for share in (0.0, 0.099, 0.1, 0.55, 0.949, 0.95, 0.9999, 1.0)] == [
        0,
        0,
        10,
        50,
        90,
        95,
        99,
        99,
    ]
    assert [bucket_of(share / 100) for share in BUCKETS] == list(BUCKETS)
    assert set(CURVE) <= {*BUCKETS, 75}


def test_a_configs_share_travels_with_its_knobs():
    knobs = with_sparsity(Knobs.of(skip="auto"), 70)
    assert str(knobs) == "skip=auto,zeros=70"
    assert sparsity_percent(Knobs.parse(str(knobs))) == 70
    assert sparsity_percent(Knobs.of(skip="auto")) is None
    channels = with_sparsity(Knobs.of(split=2), 20, "dead_channels")
    assert (str(channels), sparsity_kind(channels), sparsity_percent(channels)) == (
        "dead_channels=20,split=2",
        "dead_channels",
        20,
    )
    levels = SparsityBucket.of(SparsityShares(0.77, 0.29, 0.05, 0.0))
    assert levels == SparsityBucket(70, 20, 0, 0)
    assert matches_bucket(channels, levels)
    assert not matches_bucket(channels, SparsityBucket(20, 10, 20, 20))
    assert matches_bucket(Knobs.of(split=2), levels)


# ---- counting


def test_zeros_are_counted_where_convolutions_read():
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 8, 3),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(8, 4, 1),
    )
    x = torch.randn(2, 3, 12, 12)
    x[0, :, :6] = 0
    x[1, 0, 0, 0] = -0.0
    captured = capture_inference(net, (x,))
    shares = zero_shares(captured.graph, captured.constants, captured.flatten_inputs((x,), {}))
    seen = [x, net[:2](x), net[:4](x)]
    assert [s.zeros for s in shares.values()] == pytest.approx([float((t == 0).double().mean()) for t in seen])
    assert shares[captured.graph.inputs[0]].zeros == pytest.approx(217 / 864)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_nets_run_counts_what_is_counted_image_by_image(dtype):
    """Negative values, NaN and -0.0, more channels than a block, sides that tiles do not divide."""
    torch.manual_seed(0)
    x = torch.randn(3, 40, 11, 20)
    x[0, ::3], x[1, 5:, :8, 8:16], x[2, 32:] = 0, -0.0, 0
    x[2, 33, 9, 1] = torch.nan
    x = x.to(dtype).contiguous(memory_format=torch.channels_last if dtype == torch.float16 else torch.contiguous_format)
    captured = capture_inference(torch.nn.Conv2d(40, 4, 1).to(dtype), (x,))
    (found,) = zero_shares(captured.graph, captured.constants, [x]).values()
    images = [image_shares(image) for image in x]
    for kind in KINDS:
        assert getattr(found, kind) == pytest.approx(sum(getattr(image, kind) for image in images) / 3)
        assert 0 < getattr(found, kind) < 0.5


def test_a_value_that_two_convolutions_read_is_counted_once_and_none_is_fine_too():
    text = """graph 1
input %x: fp32[1,2,4,4]
constant %w: fp32[2,2,1,1]
%a: fp32[1,2,4,4] = conv2d(%x, %w, None, (1, 1), (0, 0), (1, 1), 1)
%b: fp32[1,2,4,4] = conv2d(%x, %w, None, (1, 1), (0, 0), (1, 1), 1)
return %a, %b
"""
    x = torch.zeros(1, 2, 4, 4)
    assert zero_shares(parse_graph(text), {"w": torch.ones(2, 2, 1, 1)}, [x]) == {"x": SparsityShares(1, 1, 1, 1)}
    nothing = parse_graph("graph 1\ninput %x: fp32[1]\n%a: fp32[1] = aten.relu.default(%x)\nreturn %a\n")
    assert zero_shares(nothing, {}, [torch.zeros(1)]) == {}


# ---- data


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("percent", [0, 30, 90])
def test_data_gets_the_zeros_that_are_asked_for_and_keeps_all_else(percent, layout):
    problem = ConvProblem(2, 40, 20, 20, 4, 3, 3, layout=layout)
    data = make_data(problem, 1)
    thin = with_zeros(data, percent, 2)
    x, before = thin.args[0], data.args[0]
    assert float((x == 0).double().mean()) == pytest.approx(percent / 100, abs=0.01)
    assert x.stride() == before.stride()
    kept = (x != 0) & (before != 0)
    assert torch.equal(x[kept], before[kept])
    assert thin.constants is data.constants
    assert torch.equal(with_zeros(data, percent, 2).args[0], x)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_lie_as_they_are_asked_for(kind):
    """As many of the kind as asked for, image by image; no value beside them is zero."""
    data = make_data(ConvProblem(3, 128, 30, 21, 4, 3, 3), 1)
    for percent in (0, 50, 100):
        x = with_zeros(data, percent, 2, kind).args[0]
        for image in x:
            found = image_shares(image)
            assert getattr(found, kind) == pytest.approx(percent / 100, abs=0.15 if kind == "dead_blocks" else 0.05)
            assert found.zeros == pytest.approx(getattr(found, kind), abs=0.1)
    assert kind == "dead_channels" or not torch.equal(x[0] == 0, x[1] == 0) or percent == 100
    channels = with_zeros(data, 25, 2, "dead_channels").args[0]
    dead = (channels == 0).flatten(2).all(2)
    assert dead.sum(1).tolist() == [32, 32, 32], "of every image exactly as many"
    assert not torch.equal(dead[0], dead[1]), "and not the same"


def test_integer_data_stays_integer_so_that_its_sums_stay_exact():
    data = make_data(ConvProblem(2, 40, 20, 20, 4, 3, 3), 1, "integer")
    x = with_zeros(data, 0, 2).args[0]
    assert not (x == 0).any()
    assert torch.equal(x, x.round())


def test_only_configs_with_a_share_are_timed_on_thinned_data():
    bench = ReferenceData(CONV, TARGET)
    plain = bench.timed_on(EngineConfig("aten"))
    thin = bench.timed_on(EngineConfig("zeroskip.cpu", 1, Knobs.of(skip="auto", zeros=90)))
    assert plain is bench.of("normal")[0]
    assert int((thin.args[0] == 0).sum()) > int((plain.args[0] == 0).sum())
    assert bench.timed_on(EngineConfig("other", 1, Knobs.of(zeros=90))) is thin
    channels = bench.timed_on(EngineConfig("zeroskip.channels", 1, Knobs.of(dead_channels=50))).args[0]
    assert int((channels == 0).flatten(2).all(2).sum()) == 2 * 3


# ---- the search


def config(engine: str, k: int = 0, zeros: int | None = None) -> EngineConfig:
    knobs = Knobs.of(k=k)
    return EngineConfig(engine, 1, knobs if zeros is None else with_sparsity(knobs, zeros))


def row(engine: str, us: float, zeros: int | None = None, samples: int = 3, k: int = 0) -> Measurement:
    return Measurement(PROBLEM.key, config(engine, k, zeros), TARGET.digest, PROTOCOL.id, Status.OK, samples, us)


def test_an_engine_that_skips_zeros_is_tried_for_every_share_of_its_layers_and_the_curve():
    task = TuningTask(
        SearchSpace(
            PROBLEM, [Fake("aten"), Skipping("skip", 2), Fake("z")], TARGET, zeros=zeros(70, 40), curve=(0, 70, 90)
        )
    )
    request = task.first_look(PROTOCOL, Effort.QUICK)
    wanted = [config("aten"), config("z"), *(config("skip", zeros=share) for share in (0, 40, 70, 90))]
    assert sorted(map(str, request.configs)) == sorted(map(str, wanted))
    assert [sparsity_percent(c.knobs) or 0 for c in request.configs] == [0, 0, 0, 40, 70, 90], (
        "many zeros last: they prune others"
    )


def test_each_engine_is_tried_for_the_shares_of_what_it_leaves_out():
    layers = [SparsityBucket(50, 0), SparsityBucket(50, 30), SparsityBucket(70, 30)]
    task = TuningTask(SearchSpace(PROBLEM, [Fake("aten"), Skipping("skip"), Leaving("leave")], TARGET, zeros=layers))
    wanted = {
        config("aten"),
        *(config("skip", zeros=share) for share in (50, 70)),
        *(EngineConfig("leave", 1, with_sparsity(Knobs.of(k=0), share, "dead_channels")) for share in (0, 30)),
    }
    assert set(task.first_look(PROTOCOL, Effort.QUICK).configs) == wanted


def test_without_anything_known_it_competes_without_zeros():
    task = TuningTask(SearchSpace(PROBLEM, [Fake("aten"), Skipping("skip")], TARGET))
    assert config("skip", zeros=0) in task.first_look(PROTOCOL, Effort.QUICK).configs


def test_each_share_has_its_own_finals():
    task = TuningTask(
        SearchSpace(
            PROBLEM,
            [Fake("aten"), *(Fake(n) for n in "abcd"), Skipping("skip")],
            TARGET,
            zeros=zeros(0, 90),
            curve=(99,),
        )
    )
    task.take_known([row("aten", 100.0), *(row(n, 50.0 + i) for i, n in enumerate("abcd"))])
    task.take_known([row("skip", 80.0, 0), row("skip", 20.0, 90), row("skip", 1.0, 99)])
    assert not task.is_done(PROTOCOL, Effort.QUICK)
    request = task.finals(PROTOCOL, Effort.QUICK)
    assert {str(c) for c in request.configs} == {
        str(c) for c in (config("aten"), *(config(n) for n in "abc"), config("skip", zeros=90))
    }
    assert request.best_us == 50.0, "dense candidates are not pruned by what skipping takes at 90 %"
    for found in request.configs:
        task.take(row(found.engine, task.rows[found].median_us, sparsity_percent(found.knobs), PROTOCOL.rounds))
    assert task.is_done(PROTOCOL, Effort.QUICK)
    assert task.finals(PROTOCOL, Effort.QUICK) is None


def test_knobs_are_widened_within_a_share():
    task = TuningTask(SearchSpace(PROBLEM, [Fake("aten"), Skipping("skip", 5)], TARGET, zeros=zeros(0, 90)))
    task.take_known([row("aten", 100.0, samples=9), row("skip", 300.0, 0), row("skip", 30.0, 90)])
    request = task.widen(PROTOCOL, Effort.QUICK)
    assert {sparsity_percent(c.knobs) for c in request.configs} == {90}, "at 0 it is out of the race"


def test_rows_of_shares_that_no_layer_has_are_left_in_the_database():
    task = TuningTask(SearchSpace(PROBLEM, [Fake("aten"), Skipping("skip")], TARGET, zeros=zeros(50)))
    task.take_known([row("skip", 5.0, 95), row("skip", 40.0, 50)])
    assert list(task.rows) == [config("skip", zeros=50)]


# ---- what an image's input could spare


def test_channels_tiles_and_blocks_that_are_zero():
    x = torch.ones(40, 12, 20)
    x[3], x[32:], x[:32, :8, 8:16] = 0, 0, 0
    x[5, 1, 9] = torch.nan
    found = image_shares(x)
    assert found.zeros == pytest.approx(float((x == 0).double().mean()))
    assert found.dead_channels == pytest.approx(9 / 40)
    tiles = 40 * 6
    assert found.dead_tiles == pytest.approx((9 * 6 + 30) / tiles), "of 31 live channels one has a NaN in the tile"
    assert found.dead_blocks == pytest.approx(6 / 12), "the last block, of eight channels, all over; the first is alive"
    x[5, 1, 9] = -0.0
    assert image_shares(x).dead_blocks == pytest.approx(7 / 12)


def test_every_convolution_has_its_images_also_where_two_read_one_value():
    class Fork(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Conv2d(3, 4, 1), torch.nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x):
            x = torch.relu(x)
            return self.first(x) + self.second(x)

    images = [torch.randn(1, 3, 9, 9, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    captured = capture_inference(Fork(), (images[0],))
    found = layer_zeros(captured.graph, captured.constants, ([image] for image in images))
    assert list(found) == ["first", "second"]
    wanted = [float((image <= 0).double().mean()) for image in images]
    assert [image.zeros for image in found["first"]] == pytest.approx(wanted)
    assert found["second"] == found["first"]


def test_a_time_at_many_zeros_teaches_nothing_about_other_inputs():
    key = ConvProblem(1, 64, 28, 28, 64, 3, 3, 1, 1, layout="nhwc").key
    rows = [
        Measurement(key, EngineConfig(engine, 1, knobs), TARGET.digest, PROTOCOL.id, Status.OK, 9, us)
        for engine, knobs, us in (
            ("aten", Knobs.of(), 500.0),
            ("onednn", Knobs.of(), 400.0),
            ("skip", Knobs.of(zeros=0), 450.0),
            ("skip", Knobs.of(zeros=99), 5.0),
        )
    ]
    (layer,) = known_layers(rows)
    assert layer.best_us == {"aten": 500.0, "onednn": 400.0, "skip": 450.0}
    assert (
        TimePredictor.from_rows(rows).roofline.flops_per_us == TimePredictor.from_rows(rows[:3]).roofline.flops_per_us
    )
