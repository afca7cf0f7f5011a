"""The comparison with planted faults: a crash, a hang, wrong numbers or too much memory cost a row and nothing more."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from convoy.compare import case_run, child_processes, comparison
from convoy.compare.case import Case
from convoy.compare.case_input_folders import CaseInputFolders
from convoy.compare.case_inputs import make
from convoy.compare.case_run import CaseRun
from convoy.compare.child_session import MODULE, ChildFailedError, in_words
from convoy.compare.comparison import compare
from convoy.compare.frameworks import FRAMEWORKS, Entry, find
from convoy.compare.limits import Limits
from convoy.compare.process_memory import available_bytes, peak_bytes
from convoy.compare.progress import RunProgress
from convoy.compare.ready_frameworks import ReadyFrameworks
from convoy.compare.runs.rows import Row
from convoy.compare.runs.runfile import Run, read
from convoy.compare.samples import figure, rounds_for, with_samples
from convoy.errors import InputError
from convoy.measurement import detect_target
from convoy.measurement.processes.process import WorkerProcess

HERE = Path(__file__).parent
PLANTED = HERE / "planted_frameworks.py"
CASE = Case(f"{PLANTED}:tiny", batch=2, size=32, trust=True)
LIMITS = Limits(
    timeout_s=120.0, rounds=3
)  # a busy machine takes long to start a process; what hangs has limits of its own
REQUEST = {"command": "compare"}


@pytest.fixture(scope="module", autouse=True)
def importable() -> Any:
    """Children import from where their parent does."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(HERE))
    patch.setenv("CONVOY_COMMIT", "abc1234")  # or a commit between two tests makes the second another run's
    yield
    patch.undo()


def planted(*names: str) -> list[Entry]:
    return [find(f"{name}=tests.unit.compare.planted_frameworks:{name.upper()}") for name in names]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path, list[str]]:
    """One comparison with every fault that can be planted without waiting."""
    path = tmp_path_factory.mktemp("compare") / "run.json"
    said: list[str] = []
    entries = planted("right", "wrong", "crash", "exhausted", "later", "unsupported")
    entries += [
        Entry("gone", "no_such_module_here:X", ("no_such_module_here",), "pip install gone", "pip install gone-gpu")
    ]
    found = compare(
        [CASE], entries, path, request=REQUEST, limits=LIMITS, observer=lambda what, _done, _all: said.append(what)
    )
    return found, path, said


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data that a comparison gives its frameworks, made once, in this process."""
    folder = tmp_path_factory.mktemp("material")
    make(CASE, folder)
    return folder


@pytest.fixture
def ready(material: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons start with the material that is there."""

    def copy(_self: Any, _case: Case, folder: Path) -> Path:
        return Path(shutil.copytree(material, folder))

    monkeypatch.setattr(CaseInputFolders, "_make", copy)


@pytest.mark.parametrize(
    ("provider", "status", "reason"),
    [
        ("wrong", "wrong_result", "outputs: relative error 1.0e-03"),
        ("crash", "crashed", "SIGSEGV"),
        ("exhausted", "out_of_memory", "RESOURCE_EXHAUSTED"),
        ("later", "launch_error", "the seventh call"),
        ("unsupported", "unsupported", "no such operator here"),
        ("gone", "absent", "no_such_module_here not installed: pip install gone"),
    ],
)
def test_a_fault_is_a_row_with_its_status_and_reason(run: Any, provider: str, status: str, reason: str) -> None:
    row = next(row for row in run[0].rows if row.provider == provider)
    assert row.status == status
    assert reason in row.reason
    assert row.figures == ()


def test_the_framework_beside_them_is_measured_at_its_best_setting(run: Any) -> None:
    row = next(row for row in run[0].rows if row.provider == "right")
    assert row.ok
    assert row.setting == "fast"
    latency = row.figure("latency_ms")
    assert latency is not None
    assert 1.0 <= latency.p20 <= latency.p50 <= latency.p80
    assert row.figure("peak_memory_bytes").p50 == 123
    assert row.figure("rel_l2_error").p50 == 0
    assert row.figure("startup_s").p50 > 0
    assert row.detail["kinds"] == {"conv": 1.0}
    assert row.detail["own"] == 1
    assert row.notes == ("a note", "broken: ValueError: this way is not there")


def test_the_file_holds_the_run(run: Any) -> None:
    found, path, said = run
    assert read(path) == found
    assert {row.provider for row in found.rows} == {
        "right",
        "wrong",
        "crash",
        "exhausted",
        "later",
        "unsupported",
        "gone",
    }
    assert found.manifest["request"] == REQUEST
    assert any("exact results" in words for words in said)


def test_a_run_goes_on_where_it_was_interrupted(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, path, _ = run
    again = tmp_path / "run.json"
    again.write_text(path.read_text())
    monkeypatch.setattr(child_processes, "ChildSession", None)  # nothing is started
    entries = planted("right", "wrong", "crash")
    assert compare([CASE], entries, again, request=REQUEST, limits=LIMITS).rows == found.rows
    with pytest.raises(InputError, match="--again"):
        compare([CASE], entries, again, request={"command": "compare", "batch": 3}, limits=LIMITS)


@pytest.mark.usefixtures("ready")
def test_an_interruption_keeps_the_rows_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    monkeypatch.setattr(CaseRun, "time_in_turn", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        compare([CASE], planted("right"), path, request=REQUEST, limits=LIMITS)
    (row,) = read(path).rows
    assert row.ok
    assert row.detail["timed"] == "alone"


@pytest.mark.usefixtures("ready")
def test_rows_that_were_not_timed_in_turn_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    with monkeypatch.context() as patch:
        patch.setattr(CaseRun, "time_in_turn", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            compare([CASE], planted("right"), path, request=REQUEST, limits=LIMITS)
    assert read(path).rows[0].detail["provisional"]
    (row,) = compare([CASE], planted("right"), path, request=REQUEST, limits=LIMITS).rows
    assert row.ok
    assert "provisional" not in row.detail


def at(**locations: str) -> list[Entry]:
    """Planted frameworks under other names."""
    return [find(f"{name}=tests.unit.compare.planted_frameworks:{location}") for name, location in locations.items()]


@pytest.mark.usefixtures("ready")
def test_failures_that_may_have_passed_and_what_was_absent_are_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    gone = Entry(
        "gone", "tests.unit.compare.planted_frameworks:RIGHT", ("no_such_module_here", "nor_this"), "pip install it"
    )
    first = [*at(a="EXHAUSTED", b="LATER", c="CRASH", d="WRONG", e="UNSUPPORTED"), gone]
    before = compare([CASE], first, path, request=REQUEST, limits=LIMITS)
    half = replace(gone, needs=("nor_this",))
    now = compare([CASE], [half], path, request=REQUEST, limits=LIMITS)
    reasons = {row.provider: row.reason for row in now.rows}
    assert reasons["gone"] == "nor_this not installed: pip install it"  # one of two is there
    second = [*at(a="RIGHT", b="RIGHT", c="RIGHT", d="RIGHT", e="RIGHT"), replace(gone, needs=())]
    now = compare([CASE], second, path, request=REQUEST, limits=LIMITS)
    found = {row.provider: row.status for row in now.rows}
    assert found == {"a": "ok", "b": "ok", "c": "crashed", "d": "wrong_result", "e": "unsupported", "gone": "ok"}
    assert {row.detail["timed"] for row in now.rows if row.ok} == {"in turn"}
    assert [row.provider for row in now.rows] == [row.provider for row in before.rows]


def compile_s(run: Run) -> dict[str, float]:
    return {row.provider: row.figure("compile_s").p50 for row in run.rows}


@pytest.mark.usefixtures("ready")
def test_those_that_are_compared_were_timed_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"

    def timed(entries: list[Entry]) -> dict[str, str]:
        runs.append(compare([CASE], entries, path, request=REQUEST, limits=LIMITS))
        return {row.provider: row.detail["timed"] for row in runs[-1].rows}

    runs: list[Run] = []
    one, two, three = at(a="RIGHT"), at(b="RIGHT"), at(a="RIGHT", b="RIGHT", c="RIGHT")
    assert timed(one) == {"a": "alone"}
    assert timed(two) == {"a": "alone", "b": "alone"}
    assert timed([*one, *two]) == {"a": "in turn", "b": "in turn"}
    assert timed(three) == {"a": "in turn", "b": "in turn", "c": "in turn"}
    # What was measured of each by itself stands: a database or a cache would make a second build look fast.
    assert compile_s(runs[2]) == compile_s(runs[1])
    assert compile_s(runs[3]).items() >= compile_s(runs[1]).items()
    monkeypatch.setattr(child_processes, "ChildSession", None)  # nothing is started
    assert timed(three) == timed([*one, *two])


@pytest.mark.usefixtures("ready")
def test_one_that_fails_beside_new_ones_keeps_its_figures(tmp_path: Path) -> None:
    path, said = tmp_path / "run.json", []
    before = compare([CASE], at(a="RIGHT"), path, request=REQUEST, limits=LIMITS).rows
    now = compare(
        [CASE],
        at(a="LATER", b="RIGHT", c="CRASH"),
        path,
        request=REQUEST,
        limits=LIMITS,
        observer=lambda what, *_: said.append(what),
    ).rows
    assert now[0] == before[0]
    assert [(row.provider, row.status) for row in now] == [("a", "ok"), ("b", "ok"), ("c", "crashed")]
    assert any("a keeps its figures and was not timed in turn: launch_error" in what for what in said)


@pytest.mark.usefixtures("ready")
def test_those_that_memory_is_too_short_for_are_left_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    monkeypatch.setattr(ReadyFrameworks, "exceeds_memory_share", lambda *_: True)
    entries = at(a="RIGHT", b="RIGHT")
    found = compare([CASE], entries, path, request=REQUEST, limits=LIMITS)
    assert [(row.detail["timed"], row.detail["short_of_memory"]) for row in found.rows] == [("alone", True)] * 2
    monkeypatch.setattr(child_processes, "ChildSession", None)  # nothing is started
    assert compare([CASE], entries, path, request=REQUEST, limits=LIMITS).rows == found.rows


def test_what_waits_in_another_case_is_not_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = with_samples(Row(CASE.model, "a", batch=2, axes={"size": 32}), samples(1.0), in_turn=False)
    rows = tuple(replace(alone, batch=n, detail={**alone.detail, "provisional": True}) for n in (2, 3))
    progress = RunProgress(Run("compare", {}, rows), tmp_path / "r.json")
    waiting = ReadyFrameworks(LIMITS, SimpleNamespace(end=lambda _: None), progress)  # type: ignore[arg-type]
    waiting.add("a", SimpleNamespace())  # type: ignore[arg-type]
    waiting.release(CASE)
    assert [row.detail.get("provisional", False) for row in progress.run.rows] == [False, True]


def test_cases_that_were_never_tried_go_before_those_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = Row(CASE.model, "a", "timeout", "hangs", batch=2, axes={"size": 32})
    ran: list[int] = []
    monkeypatch.setattr(comparison.Comparison, "run_together", lambda _self, cases, *_: ran.append(cases[0].batch))
    target = detect_target("cpu")
    one = comparison.Comparison(Run("compare", {}, (failed,)), tmp_path / "r.json", target, LIMITS, lambda *_: None)
    one.run_cases([CASE, replace(CASE, batch=3)], at(a="RIGHT"))
    assert ran == [3, 2]


@pytest.mark.usefixtures("ready")
def test_frameworks_are_built_side_by_side_and_choose_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, log = tmp_path / "run.json", tmp_path / "log"
    monkeypatch.setenv("PLANTED_LOG", str(log))
    entries = planted("one_log", "two_log", "crash", "free_log")
    found = compare([CASE], entries, path, request=REQUEST, limits=replace(LIMITS, jobs=4))
    assert {row.provider: row.status for row in found.rows} == {
        "one_log": "ok",
        "two_log": "ok",
        "crash": "crashed",
        "free_log": "ok",
    }
    assert {row.detail["timed"] for row in found.rows if row.ok} == {"in turn"}
    spans = {name: (float(a), float(b)) for name, a, b in (line.split() for line in log.read_text().splitlines())}
    one, two = sorted((spans["one"], spans["two"]))
    assert one[1] <= two[0]  # those that choose by the clock do so one after the other
    assert spans["free"][0] < two[0]  # the one that does not waits for nobody


def test_exact_results_that_failed_beside_others_are_made_again(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def make(_self: Any, case: Case, folder: Path) -> Path:
        made.append(case.batch)
        if made.count(case.batch) == 1 and case.batch == 3:
            raise ChildFailedError("out_of_memory", "beside others")
        return Path(shutil.copytree(material, folder, dirs_exist_ok=True))

    monkeypatch.setattr(CaseInputFolders, "_make", make)
    monkeypatch.setattr(ReadyFrameworks, "exceeds_memory_share", lambda *_: False)
    path, cases = tmp_path / "run.json", [CASE, replace(CASE, batch=3)]
    run, target = Run("compare", {}), detect_target("cpu")
    with comparison.Comparison(run, path, replace(target, device="cuda"), LIMITS, lambda *_: None) as one:
        one.limits = replace(one.limits, jobs=1)
        one.run_cases(cases, planted("right"))
        found = one.run.rows
    assert made == [2, 3, 3]
    assert [(row.batch, row.status) for row in found] == [(2, "ok"), (3, "ok")]


@pytest.mark.usefixtures("ready")
def test_an_exception_ends_all_that_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case_run, "ready_row", lambda *_: (_ for _ in ()).throw(InputError("size", 1, "2")))
    path = tmp_path / "run.json"
    with pytest.raises(InputError):
        compare([CASE], planted("right", "hang"), path, request=REQUEST, limits=replace(LIMITS, jobs=2, timeout_s=600))
    assert not path.exists()  # the one that was ended is no row: nobody knows what it would have done


@pytest.mark.usefixtures("ready")
def test_what_there_was_no_time_for_is_no_row(tmp_path: Path) -> None:
    path, said = tmp_path / "run.json", []
    limits = replace(LIMITS, seconds=3.0, timeout_s=600)
    cases = [CASE, replace(CASE, batch=3)]
    found = compare(
        cases,
        planted("right", "hang"),
        path,
        request=REQUEST,
        limits=limits,
        observer=lambda what, *_: said.append(what),
    )
    assert [(row.provider, row.batch, row.status) for row in found.rows] == [("right", 2, "ok")]
    assert "provisional" not in found.rows[0].detail
    assert "no time was left for" in said[-1]
    assert "batch 2 inference in hang" in said[-1]
    assert "batch 3 inference" in said[-1]


@pytest.mark.skipif(available_bytes() == 0, reason="needs Linux to count memory")
@pytest.mark.usefixtures("ready")
def test_a_child_ends_with_its_parent(material: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = dataclasses.asdict(planted("hang")[0])
    hello = {"role": "framework", "case": CASE.to_dict(), "folder": str(material), "entry": entry}
    worker = WorkerProcess(hello, {}, MODULE)
    try:
        while "setting" not in worker.receive(20):
            pass
        assert worker._process.stdin is not None
        worker._process.stdin.close()  # as the system does for a parent that died
        assert worker._process.wait(10) == 0
    finally:
        worker.end()


@pytest.mark.usefixtures("ready")
def test_hangs_and_greed_end_at_their_limits(tmp_path: Path) -> None:
    limits = replace(LIMITS, memory_bytes=600 << 20)
    (greedy,) = compare([CASE], planted("greedy"), tmp_path / "1.json", request=REQUEST, limits=limits).rows
    limits = replace(LIMITS, timeout_s=5.0)
    (hang,) = compare([CASE], planted("hang"), tmp_path / "2.json", request=REQUEST, limits=limits).rows
    assert greedy.status == "out_of_memory"
    assert "limit of 600 MiB" in greedy.reason
    assert hang.status == "timeout"
    assert "build one: took longer than 5 s" in hang.reason


def test_the_users_own_mistake_is_no_frameworks_fault(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no_such_file"):
        compare(
            [replace(CASE, model="no_such_file.py:net")],
            [*planted("right"), Entry("gone", "no:X", ("no_such_module_here",), "pip install gone")],
            tmp_path / "r.json",
            request=REQUEST,
            limits=LIMITS,
        )
    assert not list(tmp_path.iterdir())


def test_a_limit_in_words() -> None:
    sizes = (512, 10 << 10, 300 << 20, (1 << 30) - 1, 3 << 29)
    assert [in_words(size) for size in sizes] == ["512 B", "10 KiB", "300 MiB", "1024 MiB", "1.5 GiB"]


def samples(*values: float) -> dict[str, list[float]]:
    return {"latency_ms": list(values), "call_ms": list(values), "single_ms": list(values)}


def test_noise_is_flagged_and_throughput_follows_from_latency() -> None:
    row = with_samples(Row("net", "torch", batch=8), samples(2.0, 2.0, 2.0), in_turn=True)
    assert not row.noisy
    assert row.figure("images_per_s").p50 == 4000
    noisy = with_samples(row, samples(1.0, 2.0, 4.0), in_turn=True)
    assert noisy.noisy
    rate = noisy.figure("images_per_s")
    assert rate.p20 < rate.p50 < rate.p80
    assert [f.metric for f in noisy.figures] == ["latency_ms", "call_ms", "images_per_s"]


def test_the_99th_percentile_is_of_single_calls_and_the_captured_graph_has_a_figure_of_its_own() -> None:
    taken = {**samples(2.0, 2.0), "replay_ms": [1.0, 1.5], "single_ms": [1.0] * 98 + [9.0] * 2}
    row = with_samples(Row("net", "torch", batch=8), taken, in_turn=True)
    assert [f.metric for f in row.figures] == ["latency_ms", "call_ms", "replay_ms", "images_per_s", "latency_p99_ms"]
    assert row.figure("replay_ms").p50 == 1.25
    assert row.figure("latency_p99_ms").p50 == 9.0
    assert with_samples(row, samples(1.0, 1.0), in_turn=True).figure("latency_p99_ms") is None


def test_noisy_rounds_are_taken_again_and_the_quiet_ones_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    rounds = iter([samples(1.0, 2.0, 4.0), samples(2.0, 2.1, 2.0), samples(9.0, 9.0, 9.0)])
    run = Run(
        "compare", {}, (with_samples(Row(CASE.model, "a", batch=2, axes={"size": 32}), samples(1.0), in_turn=False),)
    )
    tools = SimpleNamespace(limits=LIMITS, children=None, progress=RunProgress(run, path))
    one = CaseRun(CASE, tools)  # type: ignore[arg-type]
    one.waiting.alive = {"a": SimpleNamespace(deadline=0.0)}  # type: ignore[dict-item]
    monkeypatch.setattr(one, "_rounds", lambda: {"a": next(rounds)})
    one.time_in_turn()
    (row,) = tools.progress.run.rows
    assert row.figure("latency_ms").p50 == 2.0
    assert not row.noisy
    assert next(rounds) == samples(9.0, 9.0, 9.0)


def test_slow_calls_get_fewer_rounds_and_one_sample_has_no_spread() -> None:
    assert rounds_for(0.001, 15) == 15
    assert rounds_for(3.0, 15) == 5
    assert rounds_for(100.0, 15) == 3
    assert figure("latency_ms", "ms", [3.0]).spread == 0
    assert peak_bytes() > 1 << 20


def test_frameworks_are_found_by_name() -> None:
    assert list(FRAMEWORKS) == ["torch", "inductor", "jax", "tensorflow", "onnxruntime", "openvino", "convoy"]
    assert find("torch").absence("cpu") == ""
    needs = Entry("x", "x:X", ("json",), "pip install x", "pip install x-gpu", cuda=("no-such-plugin", "none-such"))
    assert needs.absence("cpu") == ""
    assert needs.absence("cuda") == "no-such-plugin or none-such not installed: pip install x-gpu"
    assert "pip install" in Entry("x", "x:X", ("no_such",), "pip install x", "pip install x-gpu").absence("cuda")
    with pytest.raises(InputError, match="caffe"):
        find("caffe")
