"""bench/inference/inference.py: which cases are missing, and what happens when tuning has no time left. No device."""

import functools
import importlib
import math
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from convoy.compare.frameworks import Entry


@pytest.fixture
def bench(monkeypatch):
    return importlib.import_module("bench.inference.inference")


@pytest.fixture
def recorder(bench, tmp_path):
    found = bench.Recorder("inference", device="Some GPU", folder=tmp_path)
    for net, providers in {
        "a": ["convoy", "torch.graph", "torch.graph.nhwc"],
        "b": ["convoy"],
        "c": ["torch.graph"],
    }.items():
        for provider in providers:
            found.add(
                subject=net, provider=provider, metric="replay_ms", unit="ms", p50=1.0, dtype="fp16", processes="one"
            )
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
        asked.append(settings.time_s)

        def program(args, kwargs):
            del args, kwargs

        program.runnable = SimpleNamespace(replay=lambda: None)
        notes = (
            ("3 of the net's 9 different layers and subgraphs were never measured: measuring ended after 40 s",)
            if cut
            else ()
        )
        return SimpleNamespace(program=SimpleNamespace(programs=[program]), plan=SimpleNamespace(notes=notes))

    monkeypatch.setattr(bench, "optimize_model", optimize_model)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    run = bench.Run((), "quick", None, allowed, time.monotonic() + left)
    ready = bench.tuned(torch.nn.Identity(), torch.zeros(1), bench.Case("net", 1, "fp16"), run)
    assert asked == [pytest.approx(given, abs=5.0)]
    assert ready.note.endswith(" cut") is cut


COMPARED = Path(__file__).parent / "compare"


@pytest.fixture
def in_jax(bench, tmp_path, monkeypatch):
    """Asks for JAX's figures of the smallest net, where a planted framework stands for JAX: what comes of it, and all rows."""
    monkeypatch.syspath_prepend(str(COMPARED))  # children import from where their parent does
    jax_peer = importlib.import_module("bench.inference.jax_peer")
    monkeypatch.setattr(bench, "jax_figures", functools.partial(jax_peer.jax_figures, device="cpu"))
    recorder = bench.Recorder("inference", device="Some GPU", folder=tmp_path)

    def ask(entry, peers=("jax",), left=90):
        monkeypatch.setitem(jax_peer.FRAMEWORKS, "jax", entry)
        run = bench.Run(peers, "quick", None, math.inf, time.monotonic() + left)
        case = bench.Case(f"{COMPARED / 'planted_frameworks.py'}:tiny", 2, "fp32")
        return bench.in_jax(case, run, recorder), recorder.rows

    return ask


def test_jax_is_timed_in_its_own_process(in_jax):
    found, rows = in_jax(Entry("jax", "tests.unit.compare.planted_frameworks:RIGHT"))
    assert 1 <= found.timed.median_ms < 20  # the faster of its two ways
    assert {row["metric"]: (row["provider"], row["ok"]) for row in rows} == dict.fromkeys(
        ("replay_ms", "images_per_s", "peak_memory_bytes", "compile_s"), ("jax", "true")
    )


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (Entry("jax", "tests.unit.compare.planted_frameworks:WRONG"), "wrong_result: "),
        (
            Entry("jax", "tests.unit.compare.planted_frameworks:RIGHT", ("no_such_module_here",), "pip install it"),
            "absent: ",
        ),
    ],
    ids=["wrong", "absent"],
)
def test_where_jax_fails_a_row_says_why(in_jax, entry, why):
    found, (row,) = in_jax(entry)
    assert found is None
    assert (row["metric"], row["p50"], row["ok"]) == ("replay_ms", "nan", "false")
    assert row["note"].startswith(why)


def test_jax_is_left_out_where_nobody_asked_for_it_and_where_no_time_is_left(in_jax):
    right = Entry("jax", "tests.unit.compare.planted_frameworks:RIGHT")
    assert in_jax(right, ("graph",)) == (None, [])
    assert in_jax(right, left=5) == (None, []), "which would be a failure of its own"


def test_a_peer_that_fails_leaves_the_others(bench, monkeypatch):
    def broken(model, x):
        raise RuntimeError("no such kernel\nand more")

    peers = importlib.import_module("bench.inference.inference_peers")
    monkeypatch.setattr(peers, "eager", lambda model, x: lambda: model(x))
    monkeypatch.setattr(peers, "stock_graph", lambda model, args, kwargs: broken(model, args))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    run = bench.Run(("eager", "graph", "max-autotune"), "quick", None, math.inf, time.monotonic() + 100)
    ready, failed = peers.peers(torch.nn.Identity(), torch.zeros(1, 3, 4, 4), run)
    assert set(ready) == {"torch.eager", "torch.eager.nhwc"}
    assert failed == dict.fromkeys(("torch.graph", "torch.graph.nhwc"), "RuntimeError: no such kernel")
