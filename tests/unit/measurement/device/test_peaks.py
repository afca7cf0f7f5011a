import importlib
from dataclasses import replace
from functools import partial

import pytest
import torch

from convoy.engines.manifest import load_engine
from convoy.measurement import detect_target, floor_us, peaks
from convoy.measurement.device.peaks import ROUNDS, Peaks, settled_rates
from convoy.measurement.device.shortest_run import NO_RATE, Rate
from convoy.problem import ConvProblem, LayoutProblem, LinearProblem, SubgraphProblem, TensorSpec
from convoy.support import Support

shortest_run_module = importlib.import_module("convoy.measurement.device.shortest_run")
measured = importlib.import_module("convoy.measurement.device.peaks")  # the package's `peaks` is the function

ROUND = Peaks(1e9, {"fp32": 1e12, "fp16": 4e12, "bf16": 4e12, "tf32": 2e12}, 1e10, 1 << 20)


@pytest.fixture
def quick(monkeypatch):
    """Every run is timed twice, whatever else the machine does."""
    monkeypatch.setattr(shortest_run_module, "LEAST_S", 0.0)
    monkeypatch.setattr(shortest_run_module, "MOST_S", 0.0)


def test_ceilings_are_measured_once(quick):
    target = replace(detect_target("cpu"), name="quick")
    threads = torch.get_num_threads()
    found = peaks(target)
    assert found is peaks(target)
    assert 1e7 < found.bytes_per_s <= found.cache_bytes_per_s < 1e14
    assert 1e7 < found.flops["fp32"] < 1e15
    assert found.cache_bytes == target.cache_bytes
    assert torch.get_num_threads() == threads


def test_a_brief_measurement_takes_less_time_for_the_same_rates(monkeypatch):
    patience: list[shortest_run_module.Patience] = []

    def timed(run, device, **options):
        patience.append(options["patience"])
        return shortest_run_module.ShortestRun(1e-3, settled=True)

    monkeypatch.setattr(measured, "shortest_run", timed)
    target = replace(detect_target("cpu"), name="a third")
    brief, asked = peaks(target, brief=True), len(patience)
    assert peaks(target) == brief
    assert set(patience[:asked]) == {shortest_run_module.BRIEF}
    assert set(patience[asked:]) == {shortest_run_module.PATIENT}


def test_of_a_product_and_a_convolution_the_faster_is_a_cpus_ceiling(quick, monkeypatch):
    """A floor above what a layer takes is none: on AMD's CPUs a product by MKL is far behind oneDNN's convolutions."""
    target = detect_target("cpu")
    planted = {"fp32": Rate(1e20, settled=True), "bf16": NO_RATE}
    monkeypatch.setattr(measured, "_convolution_rate", lambda dtype, *_: planted[dtype])
    found = peaks(replace(target, name="another"))
    assert found.flops["fp32"] == 1e20
    assert 0 < found.flops["bf16"] < 1e20


def test_what_onednn_does_not_do_has_no_rate(quick, monkeypatch):
    target = detect_target("cpu")
    assert measured._convolution_rate("fp32", target).per_s > 1e7
    monkeypatch.setattr(load_engine("onednn"), "supports", lambda problem, target: Support.no("planted"))
    assert measured._convolution_rate("fp32", target) == NO_RATE


@pytest.mark.parametrize(("settled", "brief"), [(True, False), (False, False), (False, True)])
def test_on_a_busy_cpu_the_rates_of_one_thread_count_too(monkeypatch, settled, brief):
    threads = torch.get_num_threads()
    asked = []

    def memory():
        alone = torch.get_num_threads() == 1
        asked.append(torch.get_num_threads())
        return Rate(17e9 if alone else len(asked) * 1e9, settled=settled or alone)

    fixed = {"cache": Rate(60e9, settled=True), "fp32": Rate(150e9, settled=True)}
    measures = {"memory": memory, **{name: lambda rate=rate: rate for name, rate in fixed.items()}}
    monkeypatch.setattr(measured, "_measures", lambda *_: measures)
    torch.set_num_threads(2)
    try:
        found = peaks(replace(detect_target("cpu"), name=f"busy {settled}"), brief=brief)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert asked == ([2] if settled or brief else [2] * ROUNDS + [1])
    assert (found.bytes_per_s, found.flops) == (1e9 if settled or brief else 17e9, {"fp32": 150e9})
    assert found.settled is not brief


def test_a_rate_that_comes_again_in_another_round_is_settled():
    rates = {"lucky": iter([90.0, 100.0, 99.0]), "never": iter([10.0, 20.0, 40.0, 1.0]), "quiet": iter([7.0])}

    def measure(name):
        return Rate(next(rates[name]), settled=name == "quiet")

    found = settled_rates({name: partial(measure, name) for name in rates}, rounds=3)
    assert found == {"lucky": Rate(100.0, True), "never": Rate(40.0, False), "quiet": Rate(7.0, True)}


def test_compute_bound_problems_take_their_operations():
    problem = ConvProblem(1, 64, 56, 56, 64, 3, 3, 1, 1, numerics="strict")
    assert floor_us(problem, Peaks(1e15, ROUND.flops)) == pytest.approx(problem.flops / 1e12 * 1e6)


def test_the_numerics_decide_which_arithmetic_counts():
    def floor(numerics, dtype="fp32"):
        problem = ConvProblem(
            1, 64, 56, 56, 64, 3, 3, 1, 1, numerics=numerics, x_dtype=dtype, weight_dtype=dtype, y_dtype=dtype
        )
        return floor_us(problem, Peaks(1e15, ROUND.flops)) / problem.flops * 1e6

    assert floor("strict") == pytest.approx(1.0)
    assert floor("as_torch") == pytest.approx(1 / 2)
    assert floor("half") == pytest.approx(1 / 4)
    assert floor("half", "fp16") == pytest.approx(1 / 4)
    # A narrow type may always be computed in a wider, faster one.
    slow_half = Peaks(1e15, {"fp32": 1e12, "fp16": 1e9})
    assert floor_us(LinearProblem(1, 512, 512, "fp16"), slow_half) == pytest.approx(2 * 512 * 512 / 1e12 * 1e6)


def test_bytes_come_from_the_cache_where_they_fit():
    small = LayoutProblem(TensorSpec((1, 8, 16, 16), "fp32"), "nchw", "nhwc")
    large = LayoutProblem(TensorSpec((8, 64, 64, 64), "fp32"), "nchw", "nhwc")
    assert floor_us(small, ROUND) == pytest.approx(small.bytes_min / 1e10 * 1e6)
    assert floor_us(large, ROUND) == pytest.approx(large.bytes_min / 1e9 * 1e6)
    assert floor_us(small, Peaks(1e9, {"fp32": 1e12})) == pytest.approx(small.bytes_min / 1e9 * 1e6)


def test_constants_that_timing_keeps_cold_come_from_memory():
    problem = LinearProblem(1, 256, 256)
    assert problem.bytes_min < ROUND.cache_bytes
    assert floor_us(problem, ROUND) == pytest.approx(4 * 256 * 256 / 1e9 * 1e6)
    tiny = LinearProblem(1, 16, 16)
    assert floor_us(tiny, ROUND) == pytest.approx(tiny.bytes_min / 1e10 * 1e6)


def test_pieces_of_the_graph_have_bytes_alone_where_nobody_knows_of_operations():
    problem = SubgraphProblem("text", bytes_min=4096)
    assert floor_us(problem, ROUND, "bf16") == pytest.approx(4096 / 1e10 * 1e6)
    assert floor_us(problem, ROUND, "fp32", 10**9) == pytest.approx(1e9 / ROUND.flops["fp32"] * 1e6)
