"""The zero-skipping benchmark's own parts, on a CPU: its runs, its peers, its checking."""

import sys
from argparse import ArgumentTypeError, Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import zeroskip  # noqa: E402
from record import Recorder  # noqa: E402

from convoy.engines import host_compiler  # noqa: E402
from convoy.engines.aten import ENGINE  # noqa: E402
from convoy.measurement.detect import detect_target  # noqa: E402
from convoy.problem import ConvProblem, Epilogue, Knobs, Pool  # noqa: E402

CPU = detect_target("cpu")
OPTIONS = Namespace(dtype="fp32", numerics="strict", device="cpu", shares=zeroskip.SHARES)
SMALL = ConvProblem(1, 16, 6, 6, 8, 3, 3, 1, 1, epilogue=Epilogue(pool=Pool("max", 2, 2, 2, 2)))


def test_runs_have_the_cases_that_they_are_for():
    counts = {
        run: len(list(zeroskip.plans(run, OPTIONS, 1)))
        for run in ("curve", "deep", "vgg19", "pairs", "pools", "replica")
    }
    assert counts == {"curve": 120, "deep": 48, "vgg19": 16, "pairs": 5, "pools": 9, "replica": 16}
    problems = [problem for problem, _ in zeroskip.plans("pairs", OPTIONS, 8)]
    assert [(p.c, p.h) for p in problems] == [(64, 224), (128, 112), (256, 56), (512, 28), (512, 14)]
    assert {(p.n, str(p.epilogue)) for p in problems} == {(8, "bias+relu+max2x2s2x2p0x0")}


def test_a_run_may_say_its_dtype_and_batch():
    assert zeroskip.run_of("pairs") == ("pairs", None, None)
    assert zeroskip.run_of("pairs:fp16:32") == ("pairs", "fp16", 32)
    for wrong in ("pear", "pairs:fp17", "pairs:fp16:x"):
        with pytest.raises(ArgumentTypeError, match="none of"):
            zeroskip.run_of(wrong)
    halves = Namespace(**{**vars(OPTIONS), "dtype": "fp16"})
    assert {p.numerics for p, _ in zeroskip.plans("pairs", halves, 32)} == {"half"}


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
    problem = zeroskip.laid(SMALL, 4, "fp32", "strict")
    case = zeroskip.case_of(problem, 50, kind, "cpu")
    x = case.data.args[0]
    assert float((x == 0).double().mean()) == pytest.approx(0.5, abs=0.06)
    if kind == "channels":
        assert int((x == 0).flatten(2).all(2)[0].sum()) == 8
    if kind == "equal planes":
        assert torch.equal(x[0], x[3])


@pytest.mark.skipif(not host_compiler.compiler(), reason="no C compiler")
def test_providers_compete_and_are_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(zeroskip, "ROUNDS", 2)
    monkeypatch.setattr(zeroskip, "engines", lambda *, skipping: ["zeroskip.cpu"] if skipping else ["onednn"])
    case = zeroskip.case_of(zeroskip.laid(SMALL, 1, "fp32", "strict"), 75, "random", "cpu")
    recorder = Recorder("zeroskip", device="test", folder=tmp_path)
    found = zeroskip.measure(case, CPU, 2, recorder)
    assert set(found) >= {"convoy.zeroskip.cpu", "torch", "convoy.dense+pool", "sparse"}
    assert "WRONG" not in capsys.readouterr().out
    assert all("zeros 75 % random" in row["note"] for row in recorder.rows)
    assert zeroskip.summary("pairs", [found]).count("over") >= 2
    assert zeroskip.region_us(ENGINE.build(case.problem, Knobs(), CPU), case, "cpu") > 0


def test_a_wrong_result_is_not_timed(capsys):
    case = zeroskip.case_of(zeroskip.laid(replace(SMALL, epilogue=Epilogue()), 1, "fp32", "strict"), 0, "random", "cpu")
    executable = ENGINE.build(case.problem, Knobs(), CPU)
    assert zeroskip.right_and_timed("right", executable, case, CPU) is not None
    case.exact[0][0, 1, 2, 3] += 1
    assert zeroskip.right_and_timed("planted", executable, case, CPU) is None
    assert "WRONG planted" in capsys.readouterr().out
