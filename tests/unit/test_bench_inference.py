"""bench/inference.py: which cases are missing, and what happens when tuning has no time left. No device."""

import importlib
import math
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    return importlib.import_module("inference")


@pytest.fixture
def recorder(bench, tmp_path):
    found = bench.Recorder("inference", device="Some GPU", folder=tmp_path)
    for net, providers in {
        "a": ["convoy", "torch.graph", "torch.graph.nhwc"],
        "b": ["convoy"],
        "c": ["torch.graph"],
    }.items():
        for provider in providers:
            found.add(subject=net, provider=provider, metric="latency_ms", unit="ms", p50=1.0, dtype="fp16")
    found.add(subject="d", provider="convoy", metric="compile_s", unit="s", p50=1.0, dtype="fp16")
    found.write()
    return found


@pytest.mark.parametrize(("peers", "complete"), [(("graph",), {"a"}), ((), {"a", "b"}), (("graph", "inductor"), set())])
def test_cases_that_have_all_that_is_wanted_are_not_missing(bench, recorder, peers, complete):
    run = bench.Run(peers, "quick", None, math.inf, math.inf)
    assert {case.net for case in bench.there(recorder, run)} == complete
    assert bench.there(recorder, run) <= {bench.Case(net, 1, "fp16") for net in "abcd"}


@pytest.mark.parametrize(
    ("allowed", "left", "given"), [(math.inf, 1e6, 1e6 - 30), (40.0, 1e6, 40.0), (40.0, 10.0, 1.0)]
)
@pytest.mark.parametrize("cut", [False, True])
def test_tuning_has_the_time_that_is_allowed_and_left_and_the_row_says_where_it_was_cut(
    bench, monkeypatch, allowed, left, given, cut
):
    asked = []

    def optimize_model(model, args, *, name, settings):
        asked.append(settings.tune_s)

        def program(args, kwargs):
            del args, kwargs

        program.runnable = SimpleNamespace(replay=lambda: None)
        notes = ("3 of 9 problems were never measured on this target, and measuring ended after 40 s",) if cut else ()
        return SimpleNamespace(program=SimpleNamespace(programs=[program]), plan=SimpleNamespace(notes=notes))

    monkeypatch.setattr(bench, "optimize_model", optimize_model)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    run = bench.Run((), "quick", None, allowed, time.monotonic() + left)
    ready = bench.tuned(torch.nn.Identity(), torch.zeros(1), bench.Case("net", 1, "fp16"), run)
    assert asked == [pytest.approx(given, abs=5.0)]
    assert ready.note.endswith(" cut") is cut
