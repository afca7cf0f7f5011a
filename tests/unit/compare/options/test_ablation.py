"""The options search over a made-up machine: interactions are found, useless options left out, faults are rows, runs go on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from convoy.compare.case import Case
from convoy.compare.child_session import ChildFailedError
from convoy.compare.limits import Limits
from convoy.compare.options.ablation import search_options
from convoy.compare.options.option_advice import Headline, advice, gains
from convoy.compare.options.option_search import OptionSearch
from convoy.compare.options.setting_bench import DEFAULTS, Setting, SettingBench
from convoy.compare.options.torch_options import OPTIONS, added, arithmetic_of, choose, words_of
from convoy.compare.runs.rows import Figure
from convoy.compare.runs.run_page import sheet_of
from convoy.compare.runs.runfile import Run, read
from convoy.errors import InputError


class Machine:
    """A bench whose times are a function of the setting."""

    def __init__(
        self, cost: Callable[[Setting], float], mode: str = "inference", faults: dict[str, str] | None = None
    ) -> None:
        self.case = Case("net", batch=4, mode=mode, threads=2)
        self.cost, self.faults, self.timed, self.opened = cost, faults or {}, 0, 0
        self.errors: dict[Setting, float] = {}
        self.facts: dict[str, Any] = {
            "bf16": True,
            "compiler": True,
            "threads": True,
            "more_cores": "there are no more cores",
        }

    def open(self) -> None:
        self.opened += 1
        if self.opened > 1:
            raise ChildFailedError("out_of_memory", "planted in a second child")

    def keep(self, *settings: Setting) -> None:
        pass

    def time(self, *settings: Setting) -> list[Figure]:
        self.timed += 1
        for setting in settings:
            for name, status in self.faults.items():
                if name in setting:
                    raise ChildFailedError(status, f"planted in {name}")
            self.errors[setting] = 3e-3 if "bf16" in setting else 1e-7
        return [Figure("latency_ms", "ms", *(self.cost(s) * share for share in (1, 0.99, 1.01))) for s in settings]

    def fed_by(self, setting: Setting, workers: int) -> Figure:
        return Figure.once("latency_ms", "ms", self.cost(setting) + 50 / (workers or 0.5))


def searched(machine: Machine, path: Path, words: str = "all", run: Run | None = None) -> OptionSearch:
    search = OptionSearch(run or Run("options", {}), path, machine, words, lambda *_: None)  # type: ignore[arg-type]
    search.search()
    return search


def interacting(setting: Setting) -> float:
    """channels_last hurts alone and helps under bf16; threads hurt; compile takes 2x; no_grad is worth nothing."""
    time = 100.0
    if "bf16" in setting:
        time *= 0.4 if "channels_last" in setting else 0.7
    elif "channels_last" in setting:
        time *= 1.2
    if "half_threads" in setting:
        time *= 1.8
    if setting & {"compile", "compile_freezing"}:
        time *= 0.5 if "compile_freezing" in setting else 0.6
    if "-onednn" in setting:
        time *= 3
    return time


def test_what_helps_only_together_is_found_and_what_does_not_is_left_out(tmp_path: Path) -> None:
    search = searched(Machine(interacting), tmp_path / "run.json")
    assert search.best == {"bf16", "compile_freezing", "channels_last"}
    rows = {row.provider: row for row in search.run.rows}
    best = rows["best"]
    assert best.detail["gain"] == pytest.approx(5.0)
    assert best.detail["options"] == ["channels_last", "bf16", "compile_freezing"]
    advised = (
        "5.00x from options alone, in bf16 (100.000 to 20.000 ms): bf16, compile_freezing, channels_last (error 3.0e-03); "
        "no more from "
    )
    assert best.detail["advice"].startswith(advised)
    assert best.detail["advice"].endswith("; alternatives to what was kept: compile (1.7x alone)")
    assert "half_threads" in best.detail["advice"].partition("no more from")[2].partition(";")[0]
    assert best.figure("rel_l2_error").p50 == 3e-3
    assert rows["defaults"].figure("rel_l2_error").p50 == 1e-7
    steps = {row.detail["option"]: row.detail["kept"] for row in search.run.rows if row.detail["role"] == "forward"}
    assert steps["+ bf16, kept"] is True
    assert steps["+ no_grad"] is False
    assert all(kept == option.endswith(", kept") for option, kept in steps.items())
    assert rows["alone: channels_last"].detail["gain"] == pytest.approx(1 / 1.2)
    assert rows["without: compile_freezing"].detail["worth"] == pytest.approx(2.0)
    assert rows["without: channels_last"].detail["worth"] == pytest.approx(0.7 / 0.4)
    assert rows["without: onednn"].detail["worth"] == pytest.approx(3.0)
    assert read(tmp_path / "run.json") == search.run
    assert search.done


def test_alternatives_never_stand_together(tmp_path: Path) -> None:
    search = searched(Machine(interacting), tmp_path / "run.json")
    for row in search.run.rows:
        groups = [
            OPTIONS[name].group for name in row.detail.get("options", []) if name in OPTIONS and OPTIONS[name].group
        ]
        assert len(groups) == len(set(groups))


def test_an_option_that_others_made_needless_goes(tmp_path: Path) -> None:
    def cost(setting: Setting) -> float:
        return 40.0 if "compile" in setting else 50.0 if "fuse_conv_bn" in setting else 100.0

    # fuse_conv_bn is worth most when it is tried first, and nothing once the compiler is there.
    search = searched(Machine(cost), tmp_path / "run.json", "fuse_conv_bn,compile")
    assert search.best == {"compile"}


def test_an_option_that_fails_is_a_row(tmp_path: Path) -> None:
    faults = {"compile_freezing": "crashed", "bf16": "wrong_result", "-onednn": "timeout"}
    search = searched(Machine(interacting, faults=faults), tmp_path / "run.json")
    rows = {row.provider: row for row in search.run.rows}
    assert rows["alone: compile_freezing"].status == "crashed"
    assert rows["alone: bf16"].reason == "planted in bf16"
    assert rows["without: onednn"].status == "timeout"
    assert search.best == {"compile"}


def test_what_may_have_passed_is_tried_again_and_what_broke_is_not(tmp_path: Path) -> None:
    path, faults = tmp_path / "run.json", {"bf16": "timeout", "compile_freezing": "crashed"}
    search = searched(Machine(interacting, faults=faults), path)
    assert not search.done
    again = searched(Machine(interacting), path, run=read(path))
    rows = {row.provider: row for row in again.run.rows}
    assert rows["alone: bf16"].ok
    assert rows["alone: compile_freezing"].status == "crashed"
    assert again.best == {"bf16", "channels_last", "compile"}
    assert again.done


def test_worker_counts_that_hung_are_tried_again(tmp_path: Path) -> None:
    class Hanging(Machine):
        def fed_by(self, setting: Setting, workers: int) -> Figure:
            raise ChildFailedError("timeout", "no batch")

    search = searched(Hanging(lambda _: 10.0, "training"), tmp_path / "run.json", "compile")
    again = searched(Machine(lambda _: 10.0, "training"), tmp_path / "run.json", "compile", search.run)
    assert {row.provider: row.status for row in again.run.rows if row.detail["role"] == "loader"} == {
        f"loader: {n} workers": "ok" for n in (0, 1, 2)
    }


@pytest.mark.parametrize("stage", ["material", "facts", "build"])
def test_defaults_that_fail_are_a_row_and_the_next_case_is_tried(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[Child] = []

    class Failing(Child):
        def wait_for(self, name: str) -> Any:
            if name == stage:
                raise ChildFailedError("out_of_memory", f"{name}: used more than the limit")
            return super().wait_for(name)

        def ask(self, message: dict[str, Any], name: str) -> Any:
            raise ChildFailedError("timeout", "build: took longer than 2 s")

    def start(_bench: SettingBench, role: str) -> Child:
        children.append(Failing(role))
        return children[-1]

    said: list[str] = []
    monkeypatch.setattr(SettingBench, "_start", start)
    cases = [Case("net", batch=1), Case("net", batch=2)]
    path, limits = tmp_path / "run.json", Limits()
    run = search_options(
        cases,
        "channels_last",
        path,
        request={},
        limits=limits,
        again=False,
        observer=lambda what, *_: said.append(what),
    )
    assert run == read(path)
    status = "timeout" if stage == "build" else "out_of_memory"
    assert [(row.provider, row.batch, row.status) for row in run.rows] == [("defaults", n, status) for n in (1, 2)]
    assert all(row.reason for row in run.rows)
    assert sum("the defaults failed" in what for what in said) == 2
    assert all(child.ended for child in children)
    assert sheet_of([run]).sections


def test_defaults_that_only_the_time_ended_are_no_row(tmp_path: Path) -> None:
    class Late(Machine):
        def time(self, *settings: Setting) -> list[Figure]:
            raise ChildFailedError("timeout", "the limit")

    search = OptionSearch(Run("options", {}), tmp_path / "r.json", Late(interacting), "all", lambda *_: None, 0.0)  # type: ignore[arg-type]
    search.search()
    assert search.run.rows == ()
    assert search.left == ["defaults"]


def test_defaults_that_are_best_are_said_to_be(tmp_path: Path) -> None:
    search = searched(Machine(lambda _: 10.0), tmp_path / "run.json")
    assert search.best == DEFAULTS
    (best,) = [row for row in search.run.rows if row.provider == "best"]
    assert "defaults are the best setting" in best.detail["advice"]


def test_training_is_also_fed_by_a_loader_and_costs_that_change_the_result_are_told(tmp_path: Path) -> None:
    def cost(setting: Setting) -> float:
        return 100.0 * (0.8 if "fused_optimizer" in setting else 1) * (0.5 if "-bias_gradient" in setting else 1)

    search = searched(Machine(cost, "training"), tmp_path / "run.json")
    rows = {row.provider: row for row in search.run.rows}
    assert search.best == {"fused_optimizer"}
    assert [rows[f"loader: {n} workers"].figure("latency_ms").p50 for n in (0, 1, 2)] == [180, 130, 105]
    assert rows["without: bias_gradient"].detail["worth"] == pytest.approx(0.5)
    assert rows["without: bias_gradient"].notes
    assert "without: set_to_none" in rows
    assert "alone: inference_mode" not in rows


def test_an_interrupted_search_goes_on(tmp_path: Path) -> None:
    whole = searched(Machine(interacting), tmp_path / "whole.json")
    half = Run("options", {}, whole.run.rows[: len(whole.run.rows) // 2])
    machine = Machine(interacting)
    again = searched(machine, tmp_path / "half.json", run=half)
    assert {row.provider for row in again.run.rows} == {row.provider for row in whole.run.rows}
    assert again.best == whole.best
    assert 0 < machine.timed < len(whole.run.rows)


def test_compilers_come_last_and_only_those_that_may_win_are_tried_step_by_step(tmp_path: Path) -> None:
    def cost(setting: Setting) -> float:
        return 100.0 * (0.5 if "compile" in setting else 0.8 if "compile_freezing" in setting else 1.0)

    search = searched(Machine(cost), tmp_path / "run.json")
    names = [row.provider for row in search.run.rows]
    alone = [name for name in names if name.startswith("alone")]
    assert alone[-2:] == ["alone: compile", "alone: compile_freezing"]
    steps = [name for name in names if name.startswith("step")]
    assert sum(name.endswith("compile_freezing") for name in steps) == 0
    assert search.best == {"compile"}


def test_what_there_was_no_time_for_is_named_and_the_next_run_goes_on(tmp_path: Path) -> None:
    whole = searched(Machine(interacting), tmp_path / "whole.json")
    path = tmp_path / "run.json"
    late = OptionSearch(Run("options", {}), path, Machine(interacting), "all", lambda *_: None, 0.0)  # type: ignore[arg-type]
    late.search()
    assert "compile alone" in late.left
    assert not late.done
    (best,) = [row for row in late.run.rows if row.provider == "best"]
    assert "no time was left for" in best.detail["advice"]
    again = searched(Machine(interacting), path, run=read(path))
    assert again.done
    assert again.best == whole.best


def test_a_build_that_only_the_time_ended_is_no_row_and_a_best_setting_that_fails_is_one(tmp_path: Path) -> None:
    clock = iter([0.0] + [10.0] * 1000)
    slow = Machine(interacting, faults={"bf16": "timeout"})
    late = OptionSearch(Run("options", {}), tmp_path / "a.json", slow, "bf16", lambda *_: None, 5.0)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("convoy.compare.options.option_search.time.monotonic", lambda: next(clock))
        late.search()
    assert {row.provider for row in late.run.rows} == {"defaults", "best"}
    assert late.left
    assert slow.deadline == float("inf")
    broken = Machine(interacting)
    search = OptionSearch(Run("options", {}), tmp_path / "b.json", broken, "compile", lambda *_: None)  # type: ignore[arg-type]
    conclude = search._conclude

    def fail(candidates: Any) -> None:
        broken.faults["compile"] = "crashed"
        conclude(candidates)

    search._conclude = fail  # type: ignore[method-assign]
    search.search()
    (best,) = [row for row in search.run.rows if row.provider == "best"]
    assert best.status == "crashed"
    assert not search.done
    assert sheet_of([search.run]).sections


class Child:
    """The answer of a child."""

    def __init__(self, role: str) -> None:
        self.role, self.asked, self.timeout_s, self.ended = role, [], 0.0, False  # type: ignore[var-annotated]

    def wait_for(self, name: str) -> Any:
        return {} if name == "facts" else {"shape": []}

    def ask(self, message: dict[str, Any], name: str) -> Any:
        self.asked.append(message["do"])
        if message["do"] == "build":
            return {"call_s": 0.001, "error": 2e-6}
        return [[1.0 + len(own)] * message["rounds"] for own in message["names"]]

    def tell(self, message: dict[str, Any]) -> None:
        self.asked.append(message["do"])

    def end(self) -> None:
        self.ended = True


def test_settings_in_which_cudnn_searches_have_a_process_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[Child] = []
    bench = SettingBench(Case("net"), tmp_path, Limits(rounds=5))
    (tmp_path / "facts.json").write_text("{}")

    def start(role: str) -> Child:
        children.append(Child(role))
        return children[-1]

    monkeypatch.setattr(bench, "_start", start)
    searching = frozenset({"cudnn_benchmark"})
    both = bench.time(DEFAULTS, searching)
    assert [child.role for child in children] == ["options", "options"]
    assert [figure.p50 for figure in both] == [1.0 + len("defaults"), 1.0 + len("cudnn_benchmark")]
    assert [child.asked for child in children] == [["build"] + ["rounds"] * 5] * 2  # a round of each in turn
    bench.time(DEFAULTS, frozenset({"tf32"}))
    assert children[0].asked[6:] == ["build", "rounds"]
    bench.keep(DEFAULTS)
    assert children[0].asked[-1] == children[1].asked[-1] == "drop"
    assert bench.errors == dict.fromkeys([DEFAULTS, searching, frozenset({"tf32"})], 2e-6)
    bench.close()
    assert all(child.ended for child in children)


def test_only_what_the_device_has_is_tried() -> None:
    facts = {"bf16": "the CPU has no bf16 instructions", "compiler": True, "threads": True, "more_cores": True}
    tried, refused = choose("all", "inference", "cpu", lambda: facts)
    names = {option.id for option in tried}
    assert {"channels_last", "compile", "onednn"} <= names
    assert not names & {"bf16", "autocast_bf16", "cudnn_benchmark", "tf32", "fused_optimizer", "cuda_graph"}
    assert refused == []
    tried, refused = choose("bf16,cuda_graph,fused_optimizer,compile", "inference", "cpu", lambda: facts)
    assert [option.id for option in tried] == ["compile"]
    assert [(option.id, why) for option, why in refused] == [
        ("bf16", "the CPU has no bf16 instructions"),
        ("cuda_graph", "of no use on the device cpu"),
        ("fused_optimizer", "of no use in inference"),
    ]
    for words in ("", "all,compile", "turbo"):
        with pytest.raises(InputError, match="--options"):
            choose(words, "inference", "cpu", dict)


def test_words() -> None:
    assert words_of(DEFAULTS) == "defaults"
    assert words_of(frozenset({"compile", "channels_last", "-onednn"})) == "channels_last + compile + without onednn"
    assert added(frozenset({"no_grad", "compile"}), OPTIONS["inference_mode"]) == {"inference_mode", "compile"}
    tried = {"compile": 2.0, "bf16": 1.7, "cudnn": 1.0}
    plain, narrow = Headline(3.44, 1.0, "fp32"), Headline(3.44, 1.0, "bf16")
    said = "3.44x from options alone, in {} (3.440 to 1.000 ms): "
    assert advice(plain, ["compile"], {"compile": 2.0}, 1e-7) == said.format("fp32") + "compile"
    told = advice(narrow, ["compile", "bf16"], tried, 3.14e-3)
    assert told == said.format("bf16") + "compile, bf16 (error 3.1e-03); no more from cudnn"
    # One that helped alone and lost to an alternative, one that did not, and one that helped and adds nothing.
    tried |= {"autocast_bf16": 2.5, "fp16": 1.01, "fuse_conv_bn": 1.3}
    assert advice(narrow, ["compile", "bf16"], tried).endswith(
        "; no more from cudnn, fp16, fuse_conv_bn; alternatives to what was kept: autocast_bf16 (2.5x alone)"
    )


def test_the_headline_names_the_type_that_the_best_setting_computes_in() -> None:
    types = {
        ("channels_last", "compile"): "fp32",
        ("bf16", "compile"): "bf16",
        ("autocast_fp16",): "fp16 by autocast",
        ("tf32", "cudnn_benchmark"): "TF32",
        ("tf32", "bf16"): "TF32 and bf16",
        (): "fp32",
    }
    assert {setting: arithmetic_of(setting, "fp32") for setting in types} == types
    assert {option.id for option in OPTIONS.values() if option.arithmetic} == {
        option.id for option in OPTIONS.values() if option.rougher
    }


class Warming(Machine):
    """Every measurement after the first takes a third less, as on a machine that another job has left."""

    def time(self, *settings: Setting) -> list[Figure]:
        share = 1.0 if self.timed == 0 else 0.67
        return [
            dataclasses.replace(f, p50=f.p50 * share, p20=f.p20 * share, p80=f.p80 * share)
            for f in super().time(*settings)
        ]


def test_each_factor_follows_from_the_latencies_beside_it(tmp_path: Path) -> None:
    run = searched(Warming(interacting), tmp_path / "run.json").run
    rows = {row.provider: row for row in run.rows}
    before, after = rows["defaults"].figure("latency_ms"), rows["best"].figure("latency_ms")
    assert before.p50 == pytest.approx(67.0)  # timed again beside the best, not as it was first
    assert before.p50 / after.p50 == pytest.approx(rows["best"].detail["gain"])
    factor = f"{before.p50 / after.p50:.2f}x"
    assert rows["best"].detail["advice"].startswith(f"{factor} from options alone, in bf16 (67.000 to 13.400 ms)")
    sheet = sheet_of([run])
    assert [card.figure for card in sheet.cards] == [factor]
    assert "in bf16 (67.000 to 13.400 ms)" in sheet.cards[0].words
    for table in (table for section in sheet.sections for table in section.tables):
        for row in table.rows:
            cells = dict(zip(table.heads, row, strict=True))
            if cells["over defaults"].text:
                shown = float(cells["defaults ms"].text) / float(cells["latency ms"].text)
                assert f"{shown:.2f}x" == cells["over defaults"].text


def test_a_gain_is_one_beyond_spread_and_noise() -> None:
    def at(p50: float, spread: float) -> Figure:
        return Figure("latency_ms", "ms", p50, p50 - spread, p50 + spread)

    assert gains(at(10, 0.1), at(9, 0.1))
    assert not gains(at(10, 0.1), at(9.8, 0.1))
    assert not gains(at(10, 2), at(9, 0.1))
    assert not gains(at(9, 0.1), at(10, 0.1))
