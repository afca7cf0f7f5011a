"""The difference of two runs: beyond the spread it is a regression, named with its layers and all other changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from convoy.cli.app import app
from convoy.compare.runs.difference import causes, difference
from convoy.compare.runs.difference_page import difference_sheet
from convoy.compare.runs.rows import Figure, Row
from convoy.compare.runs.runfile import Run, write
from convoy.errors import InputError
from convoy.report.sheet import render_sheet

MANIFEST: dict[str, Any] = {"versions": {"cudnn": "9.19.0", "torch": "2.13"}, "target": {"name": "H100"}, "commit": "a"}
LABEL = "resnet50 batch 1 fp32 inference, convoy"
NEWER: dict[str, Any] = {**MANIFEST, "versions": {"cudnn": "9.20.0", "torch": "2.13", "jax": "0.10"}}


def row(latency: float, spread: float = 0.1, **words: Any) -> Row:
    figures = (Figure(words.pop("metric", "latency_ms"), "ms", latency, latency - spread, latency + spread),)
    return Row(words.pop("subject", "resnet50"), words.pop("provider", "convoy"), figures=figures, **words)


def layers(**times: float) -> dict[str, Any]:
    return {"layers": [{"name": name, "median_us": us} for name, us in times.items()]}


def runs(old: Row, new: Row) -> tuple[Run, Run]:
    return Run("compare", MANIFEST, (old,)), Run("compare", NEWER, (new,))


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (row(10), row(11), "regression"),
        (row(10), row(9), "improvement"),
        (row(10), row(10.4), "same"),  # below the tolerance
        (row(10, 2), row(11.5), "same"),  # within the spread of the older
        (row(10), row(11.5, 2), "same"),  # and of the newer
        (row(10), Row("resnet50", "convoy", "crashed", "signal 11"), "broken"),
        (Row("resnet50", "convoy", "absent"), row(10), "mended"),
    ],
)
def test_verdicts(old: Row, new: Row, verdict: str) -> None:
    found = difference(*runs(old, new))
    assert [change.verdict for change in found.changes] == [verdict]
    assert bool(found.regressions) == (verdict in ("regression", "broken"))


def test_more_is_better_where_it_is() -> None:
    def at(rate: float) -> Row:
        return Row("n", "p", figures=(Figure.once("images_per_s", "1/s", rate),))

    (change,) = difference(*runs(at(100), at(50))).regressions
    assert change.worse == pytest.approx(2)
    assert not difference(*runs(at(50), at(100))).regressions


def test_a_regression_is_named_with_its_layer_and_its_cause() -> None:
    old = row(10, detail=layers(conv1=2000, conv3=1000))
    found = difference(*runs(old, row(11.1, detail=layers(conv1=2010, conv3=2100))))
    lines = found.lines()
    assert lines[0] == "changed: cudnn 9.19.0 -> 9.20.0, jax none -> 0.10"
    assert any("cudnn 9.19.0 -> 9.20.0" in line and "conv3: 2.10x slower" in line for line in lines)
    assert not any("conv1" in line for line in lines)
    assert lines[-1] == "2 regressions, 0 of 2 figures the same, rows gone: 0, rows new: 0"


def test_time_by_kind_is_named_where_there_are_no_layers() -> None:
    kinds = [row(t, detail={"kinds": {"conv": conv, "pool": 1.0}}) for t, conv in ((10, 5.0), (12, 7.0))]
    found = difference(*runs(kinds[0], kinds[1]))
    assert [change.name for change in found.regressions] == [f"{LABEL}: conv", LABEL]


def test_rows_that_come_and_go_are_told_and_counted_and_are_no_regression() -> None:
    names = (("convoy", "jax", "openvino"), ("convoy", "tvm"))
    old, new = (
        Run("compare", MANIFEST, tuple(row(1, provider=name, subject=name) for name in found)) for found in names
    )
    found = difference(old, new)
    assert sorted(change.verdict for change in found.changes) == ["gone", "gone", "new", "same"]
    assert not found.regressions
    assert found.lines()[-1] == "0 regressions, 1 of 1 figures the same, rows gone: 2, rows new: 1"
    assert "2 and 1" in render_sheet(difference_sheet(found, old, new))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            row(1, subject="resnet50"),
            row(99, subject="resnet50v1"),
            r"1 and 1 rows, 0 in both, 1 gone, 1 new.*Gone: .*New: ",
        ),
        (Row("n", "p", "crashed"), Row("n", "p", "absent"), "1 in both, 0 gone, 0 new"),
        (row(1), row(1, metric="step_ms"), "1 in both, 0 gone, 0 new"),
    ],
)
def test_runs_of_which_nothing_can_be_compared_are_an_error(old: Row, new: Row, words: str) -> None:
    with pytest.raises(InputError, match=words):
        difference(*runs(old, new))


def test_a_row_without_a_common_figure_is_told_where_others_are_judged() -> None:
    old, new = (
        Run("compare", MANIFEST, (row(1), row(1, provider="jax", metric=metric)))
        for metric in ("latency_ms", "step_ms")
    )
    found = difference(old, new)
    assert [change.verdict for change in found.changes] == ["unjudged", "same"]
    assert any("jax: has no figure that both runs have" in line for line in found.lines())
    assert "unjudged" in render_sheet(difference_sheet(found, old, new))


def memory(mib: float, latency: float = 10, **words: Any) -> Row:
    found = row(latency, **words)
    return replace(found, figures=(*found.figures, Figure.once("peak_memory_bytes", "B", mib * 2**20)))


@pytest.mark.parametrize(
    ("old", "new", "verdicts"),
    [
        (memory(100), memory(1000), ["regression", "same"]),
        (memory(100), memory(1000, 5), ["regression", "improvement"]),  # sooner does not pay for it
        (memory(100), memory(109), ["same", "same"]),  # below the tolerance
        (memory(2), memory(2.9), ["same", "same"]),  # below a MiB
        (memory(0), memory(0.9), ["same", "same"]),
        (memory(0), memory(1.1), ["regression", "same"]),
        (memory(100), memory(50, 20), ["regression", "improvement"]),
        (memory(100), row(10), ["same"]),  # one run does not tell
    ],
)
def test_memory_is_judged_beside_time(old: Row, new: Row, verdicts: list[str]) -> None:
    found = difference(*runs(old, new))
    assert [change.verdict for change in found.changes] == verdicts


def test_memory_has_a_threshold_of_its_own() -> None:
    old, new = runs(memory(100), memory(120, 11.5))
    assert {change.metric for change in difference(old, new).regressions} == {"latency_ms", "peak_memory_bytes"}
    assert [change.metric for change in difference(old, new, 0.05, 0.3).regressions] == ["latency_ms"]
    assert [change.metric for change in difference(old, new, 0.3, 0.05).regressions] == ["peak_memory_bytes"]
    (change,) = difference(old, new, 0.3).regressions
    assert change.words() == f"{LABEL}: 1.20x more memory (peak_memory_bytes from 1.049e+08 to 1.258e+08)"


def test_what_cannot_be_compared() -> None:
    old, new = runs(row(1), row(1))
    with pytest.raises(InputError, match="one kind"):
        difference(old, replace(new, kind="study"))
    with pytest.raises(InputError, match="--tolerance"):
        difference(old, new, -1)
    with pytest.raises(InputError, match="--memory-tolerance"):
        difference(old, new, 0.1, float("nan"))
    assert causes({}, {}) == []
    assert causes({"target": {"name": "A"}}, {"target": {"name": "B"}}) == ["device A -> B"]


def test_the_page_of_a_difference_holds_both_manifests() -> None:
    old, new = runs(row(10), row(12))
    text = render_sheet(difference_sheet(difference(old, new), old, new, ("old.json", "new.json")))
    assert "1.20x" in text
    assert "old.json → new.json" in text
    assert text.count("<dt>file</dt>") == 2
    assert "cudnn 9.19.0" in text
    assert "cudnn 9.20.0" in text


@pytest.mark.parametrize(("latency", "code"), [(10.0, 0), (12.0, 1)])
def test_the_command_exits_with_1_on_a_regression(tmp_path: Path, latency: float, code: int) -> None:
    for name, run in zip(("old", "new"), runs(row(10), row(latency)), strict=True):
        write(run, tmp_path / f"{name}.json")
    words = [
        "report",
        "--diff",
        str(tmp_path / "old.json"),
        str(tmp_path / "new.json"),
        "-o",
        str(tmp_path / "page.html"),
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == code
    assert "cudnn 9.19.0 -> 9.20.0" in done.output
    assert (tmp_path / "page.html").is_file()


def test_the_command_refuses_one_file(tmp_path: Path) -> None:
    write(runs(row(1), row(1))[0], tmp_path / "run.json")
    done = CliRunner().invoke(app, ["report", "--diff", str(tmp_path / "run.json")])
    assert isinstance(done.exception, InputError)


@pytest.mark.parametrize(
    ("old", "new", "words", "code"),
    [
        (row(10), row(10, subject="resnet50v1"), [], 2),  # a net that was renamed does not pass
        (memory(100), memory(1000), [], 1),
        (memory(100), memory(1000), ["--memory-tolerance", "10"], 0),
        (row(10), row(12), ["--tolerance", "0.5"], 0),
    ],
)
def test_the_commands_exit_code(tmp_path: Path, old: Row, new: Row, words: list[str], code: int) -> None:
    for name, run in zip(("old", "new"), runs(old, new), strict=True):
        write(run, tmp_path / f"{name}.json")
    done = CliRunner().invoke(app, ["report", "--diff", str(tmp_path / "old.json"), str(tmp_path / "new.json"), *words])
    assert (done.exception.exit_code if isinstance(done.exception, InputError) else done.exit_code) == code


def test_predicted_times_are_not_judged() -> None:
    def total(us: float, **detail: Any) -> Row:
        return Row("net", "exact", figures=(Figure.once("total_us", "us", us),), detail=detail)

    measured = total(100.0, predicted=3, problems=9, predicted_steps=0, steps=4)
    (change,) = difference(Run("study", MANIFEST, (measured,)), Run("study", NEWER, (total(200.0),))).changes
    assert change.verdict == "regression"
    for old, new in ((total(100.0, predicted_steps=1), total(200.0)), (total(100.0), total(200.0, predicted=1))):
        rows = (Row("other", "exact", figures=(Figure.once("total_us", "us", 1.0),)),)
        found = difference(Run("study", MANIFEST, (old, *rows)), Run("study", NEWER, (new, *rows)))
        assert [change.verdict for change in found.changes] == ["unjudged", "same"]
        assert "predicted, not measured" in found.changes[0].words()
    guessed = {"layers": [{"name": "conv", "median_us": 900.0, "predicted": True}], "kinds": {"conv": 0.9}}
    slower = difference(*runs(row(10, detail=layers(conv=100.0)), row(20, detail=guessed)))
    assert [change.name for change in slower.changes] == [LABEL]
