"""bench/shared/fair.py, its tables and bench/shared/quiet.py: like with like, one commit, spread, failures, and a busy host."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.inference.fair_tables import STALE, fair_table
from bench.pages import answers, papers
from bench.shared import quiet, timed_code
from bench.shared.fair import by_commit, fair_cases, means, newest_cases, newest_commit
from bench.shared.timed_code import digest, whole_net_code

Row = dict[str, str]


def row(provider: str, p50: float, metric: str = "replay_ms", **more: str) -> Row:
    return {
        "subject": "net", "dtype": "fp16", "batch": "1", "provider": provider, "metric": metric, "p50": f"{p50}",
        "p20": f"{p50 * 0.99}", "p80": f"{p50 * 1.01}", "ok": "true", "note": "", "commit": "aaaaaaa", "device": "a GPU",
        "date": "2026-01-02T00:00:00+00:00", "processes": "own", **more,
    }  # fmt: skip


def test_a_peer_counts_with_its_better_protocol_and_convoy_with_its_own_process() -> None:
    rows = [
        row("convoy", 1.0, processes="one"), row("convoy", 1.2), row("torch.graph", 3.0),
        row("torch.graph", 2.4, processes="one"), row("inductor.default", 2.6), row("convoy.serial", 0.5),
    ]  # fmt: skip
    (case,) = fair_cases(rows, "replay_ms").values()
    assert (case.ours["p50"], case.best["p50"], case.best["provider"]) == ("1.2", "2.4", "torch.graph")
    assert case.gain == pytest.approx(2.0)
    assert case.words == "2.00x"


def test_replays_are_never_compared_with_calls() -> None:
    rows = [row("convoy", 1.0), row("torch.graph", 9.0, "call_ms")]
    assert not fair_cases(rows, "replay_ms")
    assert not fair_cases(rows, "call_ms")


@pytest.mark.parametrize("bad", [{"ok": "false"}, {"p50": "nan"}])
def test_a_wrong_or_failed_peer_is_no_peer_and_is_named(bad: Row) -> None:
    rows = [row("convoy", 1.0), row("torch.graph", 2.0), {**row("jax", 0.1), "note": "wrong_result: far off", **bad}]
    (case,) = fair_cases(rows, "replay_ms").values()
    assert case.best["provider"] == "torch.graph"
    assert "- jax on net fp16 batch 1: wrong_result: far off" in fair_table(rows, "Nets")


def test_a_gain_within_the_spread_is_level() -> None:
    (case,) = fair_cases([row("convoy", 1.0), row("torch.graph", 1.005)], "replay_ms").values()
    assert case.level
    assert case.words.endswith("(level)")
    (case,) = fair_cases([row("convoy", 1.0), row("torch.graph", 1.05)], "replay_ms").values()
    assert not case.level


def test_rows_of_another_commit_stand_apart() -> None:
    old = [row("convoy", 1.0, commit="bbbbbbb", date="2026-01-01T00:00:00+00:00")]
    new = [row("convoy", 2.0), row("torch.graph", 4.0)]
    assert newest_commit([*old, *new]) == new
    page = fair_table([*old, *new], "Nets")
    assert "commit aaaaaaa" in page
    assert "2.000 / 4.000 torch.graph | 2.00x" in page
    assert "Rows of other commits are in the file and not in these tables: bbbbbbb." in page


def test_means_are_geometric_and_name_the_least() -> None:
    rows = [
        changed
        for net, peer in (("a", 2.0), ("b", 8.0))
        for changed in (row("convoy", 1.0, subject=net), row("torch.graph", peer, subject=net))
    ]
    (mean,) = means(fair_cases(rows, "replay_ms")).values()
    assert mean == (pytest.approx(4.0), pytest.approx(2.0), 2)


def test_cases_that_only_older_code_has_are_shown_apart() -> None:
    """The newest commit stands first, and a case stands in one table alone."""
    new = [
        row(name, time, code="c", date="2026-01-03T00:00:00+00:00") for name, time in (("convoy", 1.0), ("jax", 2.0))
    ]
    olds = [
        {**row(name, time, code=code, commit=commit, date=f"2026-01-0{day}T00:00:00+00:00"), "subject": subject}
        for day, commit, code, subjects in (
            (2, "bbbbbbb", "d", ("net", "other")),
            (1, "eeeeeee", "e", ("other", "third")),
        )
        for subject in subjects
        for name, time in (("convoy", 1.0), ("jax", 1.5))
    ]
    page = fair_table([*olds, *new], "Nets")
    first, second, third = page.split("Nets, a GPU, commit ")[1:]
    assert first.startswith("aaaaaaa")
    assert second.startswith(f"bbbbbbb{STALE}")
    assert third.startswith(f"eeeeeee{STALE}")
    shown = [
        [line.split(" | ")[0][2:] for line in part.splitlines() if "jax" in line] for part in (first, second, third)
    ]
    assert shown == [["net"], ["other"], ["third"]]
    assert "Rows of other commits" not in page


def test_without_replays_there_is_no_fair_table() -> None:
    assert fair_table([row("convoy", 1.0, "latency_ms")], "Nets") == ""


@pytest.mark.parametrize(("busy", "named"), [(0, ""), (50, ""), (300, "use 30% of the")])
def test_a_busy_host_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: int, named: str) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu 100 0 0 900 0 0 0 0 0 0\n")

    def later(_seconds: float) -> None:
        stat.write_text(f"cpu {100 + busy} 0 0 {1900 - busy} 0 0 0 0 0 0\n")

    monkeypatch.setattr(quiet.time, "sleep", later)
    found = quiet.busy_cores(stat=stat)
    assert (named in found) if named else not found


def test_where_the_system_does_not_tell_nobody_is_stopped(tmp_path: Path) -> None:
    assert quiet.busy_cores(0, tmp_path / "none") == ""


def test_comments_docstrings_and_names_of_files_are_not_code(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    (one / "a.py").write_text('"""About."""\n\ndef f(x):  # why\n    """Twice."""\n    return 2 * x\n')
    (two / "b.py").write_text("def f(x):\n    return (2 *\n            x)\n")
    (one / "k.cuh").write_text("// why\nint a;  /* what */ int b;\n")
    (two / "k.cuh").write_text("int a; int b;\n")
    assert digest(one.iterdir()) == digest(two.iterdir())
    (two / "b.py").write_text("def f(x):\n    return 3 * x\n")
    assert digest(one.iterdir()) != digest(two.iterdir())


def test_commits_with_the_same_code_have_a_table_each_and_their_cases_count_together() -> None:
    old = [row(name, time, commit="bbbbbbb", date="2026-01-01T00:00:00+00:00", code="c") for name, time in
           (("convoy", 1.0), ("torch.graph", 3.0))]  # fmt: skip
    other = [{**one, "batch": "32"} for one in old]
    new = [row("convoy", 2.0, code="c"), row("torch.graph", 4.0, code="c")]
    stale = [{**one, "commit": "ddddddd", "code": "d"} for one in other]
    rows = [*old, *other, *stale, *new]
    assert [found[0]["commit"] for found in by_commit(rows)] == ["aaaaaaa", "bbbbbbb"]
    assert {case[2]: found.gain for case, found in newest_cases(rows, "replay_ms").items()} == {"1": 2.0, "32": 3.0}
    page = fair_table(rows, "Nets")
    assert page.index("commit aaaaaaa") < page.index("commit bbbbbbb")
    assert "not in these tables: ddddddd." in page


def test_code_for_cpus_alone_does_not_count_for_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(timed_code, "ROOT", tmp_path)
    engines = tmp_path / "src" / "convoy" / "engines"
    (engines / "cpu").mkdir(parents=True)
    for path, cpu_alone in ((engines / "cpu" / "a.py", True), (engines / "b.c", True), (engines / "c.py", False)):
        before = [timed_code.whole_net_code.__wrapped__(device) for device in ("cpu", "cuda")]
        path.write_text("1 + 1\n")
        after = [timed_code.whole_net_code.__wrapped__(device) for device in ("cpu", "cuda")]
        assert [one != other for one, other in zip(before, after, strict=True)] == [True, not cpu_alone]
    gpu = {"code": whole_net_code("cuda"), "versions": "cuda=13.0 torch=2"}
    assert not timed_code.is_stale(gpu)
    assert timed_code.is_stale({**gpu, "versions": "torch=2"})


def test_a_listed_engine_for_cpus_does_not_count_for_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(timed_code, "ROOT", tmp_path)
    path = tmp_path / "src" / "convoy" / "engines" / "manifest.py"
    path.parent.mkdir(parents=True)
    digests = list[tuple[str, str]]()
    for more in ("", '"b": "convoy.engines.cpu.chains.b", ', '"c": "convoy.engines.gates.c", '):
        path.write_text(f'MANIFEST = {{{more}"a": "convoy.engines.gates.a"}}\n')
        digests.append((timed_code.whole_net_code.__wrapped__("cpu"), timed_code.whole_net_code.__wrapped__("cuda")))
    (cpu, gpu), (cpu_b, gpu_b), (cpu_c, gpu_c) = digests
    assert len({cpu, cpu_b, cpu_c}) == 3
    assert gpu == gpu_b != gpu_c


def test_the_digest_of_code_is_the_same_under_every_python(tmp_path: Path) -> None:
    """A GPU's machine has another version than this one; the syntax trees of versions have other fields."""
    path = tmp_path / "a.py"
    path.write_text("def f(x: int) -> None:\n    return [None, f'{x}', *()]\n\n\nclass A:\n    y = 1\n")
    assert digest([path]) == "b791eb47d1db"


def test_a_row_of_other_code_is_marked_and_is_no_headline(monkeypatch: pytest.MonkeyPatch) -> None:
    code = whole_net_code("cpu")
    fresh = [row("convoy", 1.0, code=code), row("torch.graph", 2.0, code=code)]
    stale = [{**one, "code": "0" * 12} for one in fresh]
    fresh, stale = ([{**one, "versions": "torch=2"} for one in rows] for rows in (fresh, stale))
    assert STALE not in fair_table(fresh, "Nets")
    assert STALE in fair_table(stale, "Nets")
    for rows, words in ((fresh, "**2.00x** as fast"), (stale, "Not measured since the last change")):
        monkeypatch.setattr(answers, "rows_of", lambda _question, rows=rows: [rows])
        assert answers.headline().startswith(words)


def test_a_headline_of_few_nets_names_the_further_cases_of_older_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a new run of the nets with the largest gains alone would be all that is said."""
    code = whole_net_code("cpu")
    rows = [
        {
            **row(name, time, commit=commit, code=own, date=f"2026-01-0{day}T00:00:00+00:00"),
            "subject": net,
            "versions": "v",
        }
        for day, commit, own, nets in ((2, "aaaaaaa", code, "a"), (1, "bbbbbbb", "0" * 12, "abc"))
        for net in nets
        for name, time in (("convoy", 1.0), ("jax", {"a": 4.0, "b": 1.2, "c": 1.0}[net]))
    ]
    monkeypatch.setattr(answers, "rows_of", lambda _question: [rows])
    words = answers.headline()
    assert words.startswith("**4.00x**")
    assert ". By older code (bbbbbbb), in 2 further cases: 1.10x, from 1.00x to 1.20x." in words


def test_each_paper_has_its_figures_or_says_that_it_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    page = papers.RESULTS_PAGE.read_text(encoding="utf-8")
    for name, write in papers.PAPERS.items():
        assert f"<!-- results: {name} -->\n{write()}\n<!-- end -->" in page
    monkeypatch.setattr(papers, "rows_of", lambda _question: [])
    assert {write() for write in papers.PAPERS.values()} == {papers.NONE}


def test_streams_are_held_against_one_stream_of_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        row(provider, time, "step_ms", subject=net)
        for net, serial, streams in (("a", 4.0, 2.0), ("b", 2.0, 1.0), ("c", 9.0, 0.0))
        for provider, time in (("convoy.serial", serial), ("convoy.streams", streams), ("convoy", 0.5))
        if time
    ]
    monkeypatch.setattr(papers, "rows_of", lambda _question: [rows])
    assert "geometric mean **2.00x**" in papers.streams()
    assert "| c |" not in papers.streams()
