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


@pytest.mark.parametrize(("allowed", "efforts"), [(math.inf, ["quick"]), (-1.0, ["quick", "none"])])
def test_tuning_that_takes_too_long_is_cut_and_the_rest_predicted(bench, monkeypatch, allowed, efforts):
    asked = []

    def optimize_model(model, args, *, name, settings, observer=None):
        asked.append(str(settings.effort))
        if observer is not None:
            observer("compiling", 0, 0)  # of unknown length: never a reason to stop
            observer("conv", 3, 9)

        def program(args, kwargs):
            del args, kwargs

        program.runnable = SimpleNamespace(replay=lambda: None)
        return SimpleNamespace(program=SimpleNamespace(programs=[program]), plan=SimpleNamespace(notes=()))

    monkeypatch.setattr(bench, "optimize_model", optimize_model)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    run = bench.Run((), "quick", None, allowed, time.monotonic() + 1e6)
    ready = bench.tuned(torch.nn.Identity(), torch.zeros(1), bench.Case("net", 1, "fp16"), run)
    assert asked == efforts
    assert ("cut at conv: 3 of 9" in ready.note) == (len(efforts) == 2)
