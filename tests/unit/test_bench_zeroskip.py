"""The zero-skipping benchmark's own parts, on a CPU: its runs, its peers, its checking."""

from argparse import ArgumentTypeError, Namespace
from dataclasses import replace

import pytest
import torch
from bench.shared.record import Recorder
from bench.zeroskip import (
    zeroskip,
    zeroskip_cases,
    zeroskip_choice,
    zeroskip_contest,
    zeroskip_nets,
    zeroskip_slopes,
    zeroskip_tables,
)

from convoy.engines.activation_sparsity import SparsityShares
from convoy.engines.compilers import host_compiler
from convoy.engines.library.aten import ENGINE
from convoy.measurement.device.detect import detect_target
from convoy.pipeline.check.end_to_end import Latency
from convoy.problem import ConvProblem, Epilogue, Knobs, Pool

CPU = detect_target("cpu")
OPTIONS = Namespace(dtype="fp32", numerics="strict", device="cpu", shares=zeroskip_cases.SHARES)
SMALL = ConvProblem(1, 16, 6, 6, 8, 3, 3, 1, 1, epilogue=Epilogue(pool=Pool("max", 2, 2, 2, 2)))


def test_runs_have_the_cases_that_they_are_for():
    counts = {
        run: len(list(zeroskip_cases.plans(run, OPTIONS, 1)))
        for run in ("curve", "deep", "vgg19", "pairs", "pools", "replica")
    }
    assert counts == {"curve": 120, "deep": 48, "vgg19": 16, "pairs": 5, "pools": 9, "replica": 16}
    problems = [problem for problem, _ in zeroskip_cases.plans("pairs", OPTIONS, 8)]
    assert [(p.c, p.h) for p in problems] == [(64, 224), (128, 112), (256, 56), (512, 28), (512, 14)]
    assert {(p.n, str(p.epilogue)) for p in problems} == {(8, "bias+relu+max2x2s2x2p0x0")}


def test_a_run_may_say_its_dtype_and_batch():
    assert zeroskip_cases.run_of("pairs") == ("pairs", None, None)
    assert zeroskip_cases.run_of("pairs:fp16:32") == ("pairs", "fp16", 32)
    for wrong in ("pear", "pairs:fp17", "pairs:fp16:x"):
        with pytest.raises(ArgumentTypeError, match="none of"):
            zeroskip_cases.run_of(wrong)
    halves = Namespace(**{**vars(OPTIONS), "dtype": "fp16"})
    assert {p.numerics for p, _ in zeroskip_cases.plans("pairs", halves, 32)} == {"half"}


def test_means_are_of_each_of_ours_over_each_peer():
    figures = [
        {"convoy.fused": 2.0, "convoy.dense+pool": 3.0, "cudnn.best+pool": 8.0, "convoy.zeroskip.a": 4.0},
        {"convoy.dense": 2.0, "convoy.zeroskip.a": 4.0, "convoy.zeroskip.b": 1.0, "cudnn.best": 5.0},
    ]
    lines = zeroskip.summary("run", figures).splitlines()
    assert "  convoy.fused over cudnn.best+pool: mean 4.00x, best 4.00x, least 4.00x of 1" in lines
    assert "  convoy.zeroskip over convoy.dense: mean 2.00x, best 2.00x, least 2.00x of 1" in lines
    assert "  convoy.zeroskip over cudnn.best+pool: mean 2.00x, best 2.00x, least 2.00x of 1" in lines
    assert "  convoy.dense over cudnn.best: mean 2.50x, best 2.50x, least 2.50x of 1" in lines


@pytest.mark.parametrize("kind", ["random", "channels", "equal planes"])
def test_inputs_have_their_zeros(kind):
    problem = zeroskip_cases.laid(SMALL, 4, "fp32", "strict")
    case = zeroskip_cases.case_of(problem, 50, kind, "cpu")
    x = case.data.args[0]
    assert float((x == 0).double().mean()) == pytest.approx(0.5, abs=0.06)
    if kind == "channels":
        assert int((x == 0).flatten(2).all(2)[0].sum()) == 8
    if kind == "equal planes":
        assert torch.equal(x[0], x[3])


@pytest.mark.skipif(not host_compiler.compiler(), reason="no C compiler")
def test_providers_compete_and_are_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(zeroskip_contest, "ROUNDS", 2)
    monkeypatch.setattr(zeroskip_contest, "engines", lambda *, skipping: ["zeroskip.cpu"] if skipping else ["onednn"])
    case = zeroskip_cases.case_of(zeroskip_cases.laid(SMALL, 1, "fp32", "strict"), 75, "random", "cpu")
    recorder = Recorder("zeroskip", device="test", folder=tmp_path)
    found = zeroskip_contest.measure(case, CPU, 2, recorder)
    assert set(found) >= {"convoy.zeroskip.cpu", "torch", "convoy.dense+pool", "sparse"}
    assert "WRONG" not in capsys.readouterr().out
    assert all("zeros 75 % random" in row["note"] for row in recorder.rows)
    assert zeroskip.summary("pairs", [found]).count("over") >= 2
    assert zeroskip_contest.region_us(ENGINE.build(case.problem, Knobs(), CPU), case, "cpu") > 0


def test_a_wrong_result_is_not_timed(capsys):
    case = zeroskip_cases.case_of(
        zeroskip_cases.laid(replace(SMALL, epilogue=Epilogue()), 1, "fp32", "strict"), 0, "random", "cpu"
    )
    executable = ENGINE.build(case.problem, Knobs(), CPU)
    assert zeroskip_contest.right_and_timed("right", executable, case, CPU) is not None
    case.exact[0][0, 1, 2, 3] += 1
    assert zeroskip_contest.right_and_timed("planted", executable, case, CPU) is None
    assert "WRONG planted" in capsys.readouterr().out


# ---- how time falls with zeros


def test_a_line_is_fitted_to_the_times_and_a_dense_input_has_its_price():
    times = {share: {"convoy.zeroskip.a": 110.0 - share, "convoy.dense": 100.0} for share in (0, 25, 50, 75)}
    found = zeroskip_slopes.fall(times, "convoy.zeroskip.a")
    assert (found.correlation, found.slope_us) == pytest.approx((-1.0, -1.0))
    assert (found.dense_cost, found.at_75) == pytest.approx((1.1, 0.35))
    flat = zeroskip_slopes.fall({s: {"x": 5.0} for s in (0, 50, 90)}, "x")
    assert (flat.correlation, flat.slope_us) == (0.0, 0.0)
    assert flat.dense_cost != flat.dense_cost, "there is no dense engine"
    assert zeroskip_slopes.fall(times, "convoy.zeroskip.b") is None


def test_falls_are_recorded_for_each_layer_and_kind(tmp_path):
    recorder = Recorder("zeroskip", device="test", folder=tmp_path)
    figures = [
        ((SMALL, share, kind), {"convoy.zeroskip.a": 10.0 - share / 10, "convoy.dense": 10.0})
        for kind in ("random", "channels")
        for share in (0, 50, 75)
    ]
    zeroskip.record_falls(figures, recorder)
    assert len(recorder.rows) == 8
    assert {row["metric"] for row in recorder.rows} == {"correlation", "slope_us", "dense_cost", "share_of_dense"}
    assert {row["note"] for row in recorder.rows if row["metric"] == "correlation"} == {
        "zeros 0..75 % random", "zeros 0..75 % channels",
    }  # fmt: skip


def test_rows_of_other_shares_of_zeros_stay_in_the_file(tmp_path):
    for note, us in (("zeros 50 % random a", 1.0), ("zeros 90 % random a", 2.0), ("zeros 50 % random b", 3.0)):
        recorder = Recorder("zeroskip", device="test", folder=tmp_path)
        recorder.add(subject="s", provider="torch", metric="kernel_us", unit="us", p50=us, note=note)
        recorder.write()
    assert [row["p50"] for row in recorder.earlier()] == ["2", "3"]


# ---- choices


def test_an_engine_that_skips_is_chosen_where_it_was_clearly_faster_at_the_level_below(monkeypatch):
    tuner = zeroskip_choice.Tuner(CPU, 2, ["zeroskip.cpu"], ["aten"])
    times = {("zeros", 0, "aten"): 10.0, ("zeros", 50, "zeroskip.cpu"): 9.8, ("zeros", 90, "zeroskip.cpu"): 5.0}
    monkeypatch.setattr(tuner, "best", lambda problem, ids, kind, percent: ("", None, times[kind, percent, ids[0]]))
    assert tuner.choose(SMALL, SparsityShares(0.55)) == (("", None, 10.0), None), "2 % faster is not clearly faster"
    assert tuner.choose(SMALL, SparsityShares(0.93))[1] == ("", None, 5.0)


@pytest.mark.skipif(not host_compiler.compiler(), reason="no C compiler")
def test_wrong_choices_are_counted(monkeypatch, capsys):
    problem = zeroskip_cases.laid(replace(SMALL, epilogue=Epilogue()), 1, "fp32", "strict")
    tuner = zeroskip_choice.Tuner(CPU, 1, ["zeroskip.cpu"], ["onednn"])
    monkeypatch.setattr(zeroskip_choice, "MARGIN", -99.0)  # skipping, however slow
    counted = {"cases": 0, "skipping": 0, "wrong": 0, "worst": 1.0, "gain": []}
    for dense_us, skip_us in ((10.0, 10.2), (10.0, 10.5)):
        monkeypatch.setattr(zeroskip_choice, "in_turn", lambda first, second, times=(dense_us, skip_us): times)
        (case, *_) = zeroskip_choice.held_out(problem, "cpu")
        zeroskip_choice.count(case, zeroskip_choice.shares_of(case.data.args[0]), tuner, CPU, counted)
    assert (counted["cases"], counted["skipping"], counted["wrong"]) == (2, 2, 1)
    assert counted["worst"] == pytest.approx(1.05)
    assert "WRONG" not in capsys.readouterr().out


def test_held_out_inputs_have_shares_between_the_levels():
    problem = zeroskip_cases.laid(ConvProblem(1, 64, 24, 24, 8, 1, 1), 2, "fp32", "strict")
    found = [
        (case.kind, zeroskip_choice.shares_of(case.data.args[0])) for case in zeroskip_choice.held_out(problem, "cpu")
    ]
    dead = [shares.dead_channels for kind, shares in found if kind == "channels"]
    assert dead == pytest.approx([0, 0.04, 0.14, 0.27, 0.55, 0.97], abs=0.02)
    (patches,) = (shares for kind, shares in found if kind == "patches")
    assert patches.dead_tiles == pytest.approx(0.75, abs=0.05)
    assert len(zeroskip_choice.layers(5, 8)) == 5
    assert {p.n for p in zeroskip_choice.layers(5, 8)} == {8}


# ---- whole nets


def test_a_net_is_timed_with_and_without_the_engines_that_skip_and_its_answers_are_compared(tmp_path, monkeypatch):
    images = [torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    monkeypatch.setattr(Images, "images", images)
    options = Namespace(device="cpu", batch=2, db=tmp_path / "perf.db")
    recorder = Recorder("zeroskip", device="test", folder=tmp_path)
    monkeypatch.setattr(zeroskip_nets, "optimize_model", Optimized)
    monkeypatch.setattr(zeroskip_nets, "interleave", lambda runs, cuda: {name: Latency(name, (1.0,)) for name in runs})
    with torch.no_grad():
        zeroskip_nets.measure("net", zeroskip_nets.Vgg((4, "M", 8)), Images(), options, recorder)
    found = {(row["provider"], row["metric"]): row for row in recorder.rows}
    assert len(found) == 6
    assert all(row["ok"] == "true" for (provider, _), row in found.items() if provider != "convoy")
    assert found["convoy", "accuracy"]["ok"] == "false", "a planted wrong program is seen"
    assert found["convoy", "latency_ms"]["note"] == "the stock model was kept"
    assert "4 images" in found["torch.eager", "accuracy"]["note"]
    assert {str(denied) for denied in Optimized.denied} == {str(zeroskip_nets.SKIPPING), "()"}
    assert {"zeroskip.cpu", "zeroskip.channels"} <= set(zeroskip_nets.SKIPPING)


class Images:
    """A data set of five."""

    images: tuple = ()
    labels = torch.zeros(5, dtype=torch.int64)

    def __len__(self):
        return 5

    def batches(self, batch, drop_last=False):
        for start in range(0, 5 - 5 % batch if drop_last else 5, batch):
            yield torch.stack(list(self.images[start : start + batch])), self.labels[start : start + batch]


class Optimized:
    """Stands for optimize_model's result and is the model itself; with the engines that skip one that is off."""

    denied: list = []  # noqa: RUF012

    def __init__(self, model, args, *, name, settings):
        self.denied.append(settings.deny_engines)
        off = 0.0 if settings.deny_engines else 0.01
        self.program = lambda x: model(x) + off
        self.summary = Namespace(layers=())
        self.plan = Namespace(baseline=not settings.deny_engines)


# ---- tables


def row(subject, provider, us, note, metric="kernel_us", batch=1):
    return {
        "subject": subject, "provider": provider, "p50": str(us), "note": note, "metric": metric, "batch": str(batch),
        "dtype": "fp32", "numerics": "strict", "ok": "true", "commit": "abc1234", "device": "D", "versions": "v",
    }  # fmt: skip


def test_a_page_says_what_the_rows_are_about():
    problem = zeroskip_cases.laid(ConvProblem(1, 512, 14, 14, 512, 3, 3, 1, 1), 1, "fp32", "strict")
    key, pooled = problem.key, replace(problem, epilogue=replace(problem.epilogue, pool=zeroskip_cases.POOL)).key
    net = {"latency_ms": (0.5, 0.4, 0.2), "accuracy": (0.8, 0.8, 0.8)}
    rows = [
        *(row(f"conv:fprop:n1c{c}h{side}w{side}k{k}r3s3:", provider, us, f"zeros {zeros} % random a")
          for (c, k, side), zeros in zip(zeroskip_tables.VGG19, zeroskip_tables.VGG19_ZEROS, strict=True)
          for provider, us in (("convoy.dense", 10), ("cudnn.best", 50))),
        row(key, "convoy.dense", 10, "zeros 95 % channels a"),
        row(key, "convoy.zeroskip.channels", 4, "zeros 95 % channels b"),
        row(pooled, "convoy.fused", 10, "zeros 90 % random a"), row(pooled, "cudnn.best+pool", 70, "zeros 90 % random"),
        row(key, "convoy.zeroskip.channels", -0.9, "zeros 0..95 % channels", "correlation"),
        row(key, "convoy.zeroskip.channels", -0.1, "zeros 0..95 % channels", "slope_us"),
        row(key, "convoy.zeroskip.channels", 1.08, "zeros 0..95 % channels", "dense_cost"),
        *(row(key, "convoy.zeroskip.channels", us, f"zeros 95 % marks {what}")
          for what, us in zip(zeroskip_tables.MARKS, (11.8, 10.4, 16.0, 14.8, 16.1), strict=True)),
        *(row("conv:fprop:n32c1h14w14k1r3s3:", provider, us, "zeros 92 % equal planes x", metric)
          for metric in ("kernel_us", "region_us") for provider, us in (("cudnn.best", 9), ("convoy.zeroskip.ecr", 3))),
        *(row("net", provider, value, "zeros 10 to 60 % aten=2", metric)
          for metric, values in net.items()
          for provider, value in zip(("torch.graph", "convoy.dense", "convoy"), values, strict=True)),
        row("choices on held out inputs", "convoy", 0.0, "0 wrong of 90 inputs", "wrong_share"),
    ]  # fmt: skip
    page = zeroskip_tables.zeroskip_table(rows, "Zeros")
    for line in (
        "| VGG-19, strict fp32, batch 1: the convolutions | convoy.dense | cudnn.best | 16 | 5.00x | 5.00x | 5.00x |",
        "convolution + pooling in one | convoy.fused | cudnn.best+pool | 1 | 7.00x |",
        "512→512 @14, strict fp32, batch 1: 95 % dead channels | convoy.zeroskip.channels | convoy.dense | 1 | 2.50x |",
        "| 512→512 3x3 @14, batch 1 | channels | convoy.zeroskip.channels | -0.90 | -0.100 | 1.08x |  |",
        "| 512→512 @14 | 95 % | 11.8 | 10.4 | 16.0 | 14.8 | 16.1 |",
        "| with allocation and copies, as the paper times it | convoy.zeroskip.ecr | 1 | 3.0 | 3.00x | 3.00x |",
        "| net | 1 | 0.5000 | 0.4000 | 0.2000 | 2.00x | 80.00% / 80.00% |",
        "Chosen wrongly, held out inputs, batch 1: 0 wrong of 90 inputs.",
    ):
        assert line in page, line
    # A layer of the net that another question measured says nothing of the net.
    assert "the convolutions" not in zeroskip_tables.zeroskip_table(rows[2:], "Zeros")
