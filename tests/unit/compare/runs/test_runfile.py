"""Run files: what is written is read back, whatever is wrong in a file is named, and old rows stand only in the same run."""

from __future__ import annotations

import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from convoy.compare.frameworks import FRAMEWORKS
from convoy.compare.runs import manifest
from convoy.compare.runs.manifest import PACKAGES, cpu_clocks, make_manifest
from convoy.compare.runs.rows import STATUSES, Figure, Row
from convoy.compare.runs.runfile import Run, from_dict, read, resumed, to_dict, write
from convoy.errors import InputError

MANIFEST = {
    "date": "2026-01-02T03:04:05Z",
    "request": {"command": "compare"},
    "target": {},
    "protocol": "p",
    "commit": "",
}
GOOD = Row(
    "resnet50",
    "torch",
    mode="training",
    batch=32,
    dtype="bf16",
    axes={"gpus": 2, "scaling": "weak", "share": 0.5},
    setting="channels_last",
    figures=(Figure("latency_ms", "ms", 2.0, 1.5, 3.0), Figure.once("compile_s", "s", 7)),
    noisy=True,
    notes=("a note",),
    detail={"kinds": {"conv": 1.5}},
)
FAILED = Row("resnet50", "jax", "crashed", "signal 11 (SIGSEGV)", mode="training")
RUN = Run("compare", MANIFEST, (GOOD, FAILED))


def test_a_run_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write(RUN, path)
    assert read(path) == RUN
    assert json.loads(path.read_text())["schema"] == 1


def test_what_a_row_says() -> None:
    assert GOOD.ok
    assert not FAILED.ok
    assert GOOD.key != replace(GOOD, provider="jax").key
    assert GOOD.question == replace(GOOD, provider="jax").question
    assert GOOD.key != replace(GOOD, axes={**GOOD.axes, "gpus": 4}).key
    assert GOOD.key == replace(GOOD, axes=dict(reversed(GOOD.axes.items())), figures=(), status="timeout").key
    latency = GOOD.figure("latency_ms")
    assert latency is not None
    assert latency.spread == 0.75
    assert GOOD.figure("energy_j") is None
    assert GOOD.label() == "resnet50 batch 32 bf16 training, gpus 2, scaling weak, share 0.5"


def test_a_row_of_the_same_key_takes_the_older_ones_place() -> None:
    again = replace(GOOD, status="timeout", figures=())
    assert RUN.with_row(again).rows == (again, FAILED)
    other = replace(FAILED, provider="onnxruntime")
    assert RUN.with_row(other).rows == (GOOD, FAILED, other)
    assert RUN.row(FAILED.key) is FAILED
    assert RUN.row(other.key) is None


def test_what_was_installed_since_is_no_other_run_and_another_version_is() -> None:
    def at(**versions: str) -> Run:
        return replace(RUN, manifest={**MANIFEST, "versions": versions})

    assert at(torch="2.13", onnx="1.20").resumes(at(torch="2.13"))
    assert not at(torch="2.14", onnx="1.20").resumes(at(torch="2.13"))
    assert not at(onnx="1.20").resumes(at(torch="2.13"))
    assert not at(torch="2.13").resumes(RUN)  # a file that names no versions


def test_failures_that_may_have_passed() -> None:
    passing = {status for status in STATUSES if replace(FAILED, status=status).passing}
    assert passing == {"timeout", "out_of_memory", "launch_error"}


@pytest.mark.parametrize("name", ["request", "target", "versions", "protocol", "commit"])
def test_rows_of_another_request_or_device_are_not_taken_over(name: str) -> None:
    assert RUN.resumes(replace(RUN, rows=(), manifest={**MANIFEST, "date": "later"}))
    assert not RUN.resumes(replace(RUN, manifest={**MANIFEST, name: "other"}))
    assert not RUN.resumes(replace(RUN, kind="study"))


def broken(change: dict[str, Any], row: dict[str, Any] | None = None, figure: dict[str, Any] | None = None) -> Any:
    data = json.loads(json.dumps(to_dict(RUN)))
    data["rows"][0].update(row or {})
    data["rows"][0]["figures"][0].update(figure or {})
    return {**data, **change}


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ([], "an object"),
        (broken({"schema": 2}), "schema"),
        (broken({"kind": "other"}), "kind"),
        (broken({"rows": {}}), "rows"),
        (broken({"rows": [1]}), r"rows\[0\]"),
        (broken({"manifest": None}), "manifest"),
        (broken({"rows": [to_dict(RUN)["rows"][1]] * 2}), "each row once"),
        (broken({}, {"status": "fine"}), r"rows\[0\].status"),
        (broken({}, {"batch": 0}), r"rows\[0\].batch"),
        (broken({}, {"batch": True}), r"rows\[0\].batch"),
        (broken({}, {"subject": 3}), r"rows\[0\].subject"),
        (broken({}, {"mode": "two words"}), r"rows\[0\].mode"),
        (broken({}, {"noisy": 1}), r"rows\[0\].noisy"),
        (broken({}, {"axes": {"gpus": [1]}}), r"rows\[0\].axes.gpus"),
        (broken({}, {"notes": "one"}), r"rows\[0\].notes"),
        (broken({}, {"detail": 1}), r"rows\[0\].detail"),
        (broken({}, {"surprise": 1}), "surprise"),
        (broken({}, {"reason": "x" * 30_000}), r"rows\[0\].reason"),
        (broken({}, None, {"p50": "1"}), r"figures\[0\].p50"),
        (broken({}, None, {"p80": math.nan}), r"figures\[0\].p80"),
        (broken({}, None, {"metric": "compile_s"}), "each metric once"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(data: object, named: str) -> None:
    with pytest.raises(InputError, match=named):
        from_dict(data)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"schema": NaN}'])
def test_a_file_that_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"run\.json"):
        read(path)


def test_no_file_and_numbers_that_json_has_not(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a file that can be read"):
        read(tmp_path / "none.json")
    endless = replace(GOOD, figures=(Figure.once("latency_ms", "ms", math.inf),))
    with pytest.raises(InputError, match="finite"):
        write(replace(RUN, rows=(endless,)), tmp_path / "run.json")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_run_goes_on_with_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    fresh = replace(RUN, rows=(), manifest={**MANIFEST, "date": "later"})
    assert resumed(path, fresh) is fresh
    write(RUN, path)
    assert resumed(path, fresh) == replace(RUN, manifest={**RUN.manifest, "notes": []})
    assert resumed(path, fresh, again=True) is fresh
    with pytest.raises(InputError, match="--again"):
        resumed(path, replace(fresh, manifest={**MANIFEST, "commit": "other"}))


def test_what_was_doubtful_before_an_interruption_stays_noted(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write(replace(RUN, manifest={**MANIFEST, "notes": ["another run", "busy"]}), path)
    fresh = replace(RUN, rows=(), manifest={**MANIFEST, "notes": ["busy", "hot"]})
    assert resumed(path, fresh).manifest["notes"] == ["another run", "busy", "hot"]


def test_the_manifest_names_device_versions_and_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVOY_COMMIT", "abc123")
    found = make_manifest(device="cpu", protocol="wall", request={"command": "compare", "batch": [1]}, notes=["busy"])
    assert found["commit"] == "abc123"
    assert found["request"] == {"command": "compare", "batch": [1]}
    assert found["target"]["device"] == "cpu"
    assert {"convoy", "python", "torch"} <= set(found["versions"])
    assert json.loads(json.dumps(found)) == found


def test_the_manifest_knows_every_distribution_that_a_framework_needs() -> None:
    needed = {name for entry in FRAMEWORKS.values() for name in (*entry.needs, *entry.cuda)}
    assert needed <= set(PACKAGES)


def test_clocks_are_what_the_system_says_or_nothing(tmp_path: Path) -> None:
    assert cpu_clocks(tmp_path) == {}
    (tmp_path / "scaling_governor").write_text("performance\n")
    (tmp_path / "scaling_max_freq").write_text("3700000\n")
    (tmp_path / "scaling_min_freq").write_text("unknown\n")
    assert cpu_clocks(tmp_path) == {"governor": "performance", "most_mhz": "3700"}


def test_the_commit_of_a_checkout_is_gits(monkeypatch: pytest.MonkeyPatch):
    """Rows that are recorded later, from another state of the tree, name the commit that was run."""
    root = Path(__file__).parents[4]
    if not (root / ".git").exists():
        pytest.skip("no checkout with its history")
    monkeypatch.delenv("CONVOY_COMMIT", raising=False)
    head = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    found = manifest.commit()
    assert len(found) >= 12
    assert head.stdout.startswith(found)


def test_without_its_history_a_tree_names_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CONVOY_COMMIT", raising=False)
    monkeypatch.setattr(manifest, "__file__", str(tmp_path / "src" / "convoy" / "compare" / "runs" / "manifest.py"))
    assert manifest.commit() == ""
