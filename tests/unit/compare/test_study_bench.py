"""bench/study/study.py and bench/scaling/scaling.py turn run files into rows that the results' own rules allow."""

from __future__ import annotations

import csv
import dataclasses
import importlib
from pathlib import Path

import pytest
from bench.compare import compare_tables, options, options_figure, options_table
from bench.scaling import scaling, scaling_figure, scaling_tables
from bench.shared import svg
from bench.study import strategies_table, study, study_figure

from convoy.compare import Figure, Row, Run, write

BENCH = Path(__file__).parents[3] / "bench"
MANIFEST = {"target": {"name": "NVIDIA H100 80GB HBM3", "versions": {"torch": "2.13.0"}}, "protocol": "v4"}


def figures(**values):
    units = {"ms": "ms", "s": "1/s", "us": "us"}
    return tuple(Figure.once(name, units.get(name.rpartition("_")[2], "1"), value) for name, value in values.items())


STUDY = Run("study", MANIFEST, (
    Row("sweep:channels", "implicit gemm", mode="fprop", axes={"channels": 64}, figures=figures(time_us=5.0),
        detail={"engine": "triton.swapped"}, setting="triton.swapped [] nhwc"),
    Row("sweep:channels", "fft", "unsupported", "no", mode="fprop", axes={"channels": 64}),
    Row("alexnet", "one algorithm", figures=figures(total_us=900.0), setting="single:onednn"),
))  # fmt: skip
SCALING = Run("scaling", MANIFEST, (
    Row("resnet50", "torch.ddp", mode="training", batch=128, axes={"gpus": 2, "nodes": 1, "scaling": "weak"},
        figures=figures(step_ms=50.0, images_per_s=5120.0, efficiency=0.99)),
))  # fmt: skip


def strategy(provider: str, metric: str, value: str) -> dict[str, str]:
    about = {
        "subject": "alexnet",
        "dtype": "fp16",
        "batch": "1",
        "protocol": "replay",
        "device": "H100",
        "commit": "abc",
    }
    return {**about, "provider": provider, "metric": metric, "p50": value}


NETS = [
    strategy("convoy.library", "total_us", "300"),
    strategy("convoy.exact", "total_us", "100"),
    strategy("convoy.library", "peak_memory_bytes", "2e6"),
]


TOLD = "9.9x from options alone: bf16, compile (error 5.3e-03); no more from tf32; alternatives to what was kept: fp16 (1.2x)"
"""Advice as former versions wrote it; its factor is not that of the rows beside it."""


def test_an_ablation_becomes_rows_a_table_and_a_picture(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("CONVOY_COMMIT", "0123456789ab")
    run = importlib.import_module("examples").options_run()
    recorder = options.recorded(run)
    recorder.folder = tmp_path
    with recorder.write().open() as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "latency_ms"]
    assert [(row["provider"], row["note"].split("; ")[0]) for row in rows] == [
        ("torch.defaults", "defaults"), ("torch.alone", "compile"), ("torch.step", "a"), ("torch.without", "compile"),
        ("torch.without", "onednn"), ("torch.best", "best"),
    ]  # fmt: skip
    assert {row["provider"] for row in rows} <= set(svg.PEERS)
    page = options_table.options_table(rows, "Options")
    together = "({} where both were timed in the same rounds)"
    assert f"ms. 2.00x from options alone, in fp32 {together.format('2.0x')}: compile" in page

    def told(words: str) -> str:
        notes = [{**row, "note": row["note"].replace("2.0x from options alone: compile", words)} for row in rows]
        return options_table.options_table(notes, "Options")

    rest = TOLD.partition(": ")[2]
    assert f"ms. 2.00x from options alone, in bf16 {together.format('9.9x')}: {rest}" in told(TOLD)
    newer = f"2.00x from options alone, in bf16 (100.000 to 50.000 ms): {rest}"
    assert f"ms. 2.00x from options alone, in bf16: {rest}" in told(newer)
    assert "| compile | 2.00x | 1.96x |" in page
    assert "| onednn |  | 3.00x |" in page
    assert "from the defaults to the best setting" in options_figure.options_figure(rows, "Options")


def test_steps_fed_by_workers_are_a_subject_of_their_own(tmp_path: Path, monkeypatch) -> None:
    """A later ablation of the same net leaves them, and they leave an earlier one."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("CONVOY_COMMIT", "0123456789ab")
    run = importlib.import_module("examples").options_run()
    (best,) = (row for row in run.rows if row.detail.get("role") == "best")
    loaders = [
        dataclasses.replace(
            best, provider=f"{count} workers", figures=figures(latency_ms=latency), noisy=count == 0,
            detail={"role": "loader", "option": f"{count} workers"},
        )
        for count, latency in ((0, 75.0), (4, 55.0))
    ]  # fmt: skip
    recorder = options.recorded(dataclasses.replace(run, rows=[*run.rows, *loaders]))
    rows = [row for row in recorder.rows if row["metric"] == "latency_ms"]
    own = [row for row in rows if row["subject"].endswith(":loader")]
    assert [row["provider"] for row in own] == ["torch.best", "torch.loader", "torch.loader"]
    assert [row["provider"] for row in rows if row not in own].count("torch.loader") == 0
    page = options_table.options_table(rows, "Options")
    assert "fed by a data loader" in page
    assert "| 0 workers (noisy) | 75.000 | 1.50x |" in page
    assert "| 4 workers | 55.000 | 1.10x |" in page
    assert page.count("| option |") == 1
    alone = [row for row in own if row["provider"] == "torch.loader"]
    assert options_table.options_table(alone, "Options") == "Not measured yet."
    assert "Options" in options_figure.options_figure(rows, "Options")


@pytest.mark.parametrize(("script", "run", "subjects"), [
    (study, STUDY, {"sweep:channels channels=64 fprop", "alexnet"}), (scaling, SCALING, {"resnet50 x2 weak"}),
])  # fmt: skip
def test_a_run_becomes_rows_that_the_rules_allow(script, run, subjects, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CONVOY_COMMIT", "0123456789ab")
    write(run, tmp_path / "run.json")
    name = script.__name__.rpartition(".")[2]
    monkeypatch.setattr("sys.argv", [name, str(tmp_path / "run.json"), "--folder", str(tmp_path)])
    script.main()
    (path,) = tmp_path.glob("*.csv")
    assert path.name == f"{name}-nvidia-h100-80gb-hbm3.csv"
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["subject"] for row in rows} == subjects
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    rules = importlib.import_module("test_bench_results")
    assert [rules.defects(row, path, set(svg.PEERS)) for row in rows] == [[]] * len(rows)
    if name == "study":
        page = strategies_table.strategies_table(NETS, "Strategies")
        assert "| alexnet | fp16 | 1 | 0.300 (3.00x) |  |  | 0.100 (1.00x) | 2.0 |  |  | replay |" in page
        assert "<svg" in study_figure.study_figure(rows, "Study")
    if name == "scaling":
        assert "efficiency over GPUs" in scaling_figure.scaling_figure(rows, "Training")
        page = scaling_tables.scaling_table(rows, "Training")
        assert "| resnet50 x2 weak | fp32 | 128 | torch.ddp | 5120 | 99.0% | 50 |" in page


def test_what_a_comparison_took_is_said_where_it_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"subject": "net", "metric": "latency_ms", "p50": "1.0", "note": "inference"},
        {"subject": "net", "metric": "comparison_s", "p50": "98.07", "note": "batch 1,32 in one run"},
        {"subject": "net:training", "metric": "comparison_s", "p50": "108.85", "note": "batch 32 in one run"},
    ]
    words = "All of it took 207 s: net 98 s, net:training 109 s (batch 1,32 in one run; batch 32 in one run)."
    assert compare_tables.comparison_time(rows) == words
    assert not compare_tables.comparison_time(rows[:1])
