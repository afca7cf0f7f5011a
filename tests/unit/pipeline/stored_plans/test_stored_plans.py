"""A finished search's plan is used by the next call for the same net; any change of what it depends on leads to a new search."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from convoy.errors import CompileError
from convoy.measurement import Peaks
from convoy.perfdb import Database
from convoy.pipeline import OptimizeResult, optimize_model, whole_model
from convoy.pipeline.check import end_to_end
from convoy.pipeline.stored_plans import plan_key, start, start_inference
from convoy.pipeline.stored_plans.plan_record import PlanRecord
from convoy.pipeline.stored_plans.plan_store import FROM_DATABASE, NOT_USED
from convoy.problem import EngineConfig
from convoy.settings import Settings

X = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def net(channels: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, channels, 3), nn.ReLU(), nn.MaxPool2d(2)).eval()


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is not busy, on which every plan is faster than PyTorch."""
    monkeypatch.setattr(whole_model, "ceilings_of", lambda *_: Peaks(1e9, {"fp32": 1e9}))
    monkeypatch.setattr(end_to_end, "is_faster", lambda *_: True)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the nets that were searched for."""
    found: list[str] = []
    search = whole_model.tune_in_time

    def counted(net: Any, *rest: Any) -> Any:
        found.append(net.name)
        return search(net, *rest)

    monkeypatch.setattr(whole_model, "tune_in_time", counted)
    return found


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(effort="none", db=tmp_path / "perf.db")


def tuned(model: nn.Module, settings: Settings, x: torch.Tensor = X, name: str = "net") -> OptimizeResult:
    return optimize_model(model, (x,), name=name, settings=settings)


def test_the_next_call_runs_the_same_plan_and_says_so(settings: Settings, searches: list[str]) -> None:
    model = net()
    first, second = tuned(model, settings), tuned(model, settings, name="again")
    assert searches == ["net"]
    assert second.plan.steps == first.plan.steps
    assert not second.plan.baseline
    assert second.plan.notes[:-1] == first.plan.notes
    assert second.plan.notes[-1].startswith(FROM_DATABASE)
    assert torch.equal(second.program(X), first.program(X))
    assert second.plan.model == second.summary.model == "again"


def test_the_report_has_the_figures_of_the_search(settings: Settings) -> None:
    model = net()
    first, second = tuned(model, settings).summary, tuned(model, settings).summary
    changed = {"tuning", "notes", "selection"}
    for field in dataclasses.fields(first):
        if field.name not in changed:
            assert getattr(second, field.name) == getattr(first, field.name), field.name
    assert second.notes[-1].startswith(FROM_DATABASE)
    assert second.tuning.measured == 0
    others = tuple(one for one in first.selection.strategies if one.strategy in ("baseline", "exact"))
    assert len(first.selection.strategies) > len(others) == 2  # a first answer computes the rest when it is asked
    stored = dataclasses.replace(first.selection, strategies=others, greedy_us=0.0)
    assert second.selection == stored


def test_other_weights_of_the_same_net_start_from_the_plan(settings: Settings, searches: list[str]) -> None:
    tuned(net(), settings)
    other = net()
    with torch.no_grad():
        other[0].weight.mul_(-1.5)
    found = tuned(other, settings)
    assert searches == ["net"]
    torch.testing.assert_close(found.program(X), other(X))


@pytest.mark.parametrize(
    "change",
    [
        {"numerics": "strict"},
        {"effort": "quick"},
        {"solver": "greedy"},
        {"layout": "nchw"},
        {"memory_budget_bytes": 1 << 30},
        {"deterministic": True},
        {"deny_engines": ("inductor",)},
    ],
)
def test_another_setting_is_another_search(settings: Settings, searches: list[str], change: dict[str, Any]) -> None:
    model = net()
    tuned(model, settings)
    fast = {"only_engines": ("aten",), "isolate": False} if "effort" in change else {}
    tuned(model, dataclasses.replace(settings, **change, **fast))
    assert len(searches) == 2


def test_settings_without_influence_do_not_matter(settings: Settings, searches: list[str], tmp_path: Path) -> None:
    model = net()
    tuned(model, settings)
    tuned(model, dataclasses.replace(settings, isolate=False, time_s=60.0, check="contents", profile=tmp_path / "p"))
    assert len(searches) == 1


def test_every_setting_either_matters_or_is_listed(settings: Settings) -> None:
    names = {field.name for field in dataclasses.fields(settings)}
    assert names >= plan_key.WITHOUT_INFLUENCE


def test_another_graph_input_format_or_mask_is_another_search(settings: Settings, searches: list[str]) -> None:
    tuned(net(), settings)
    tuned(net(5), settings)
    tuned(net(), settings, torch.cat([X, X]))
    tuned(net(), settings, X.to(memory_format=torch.channels_last))
    pruned = net()
    with torch.no_grad():
        pruned[0].weight[:2] = 0
    tuned(pruned, settings)
    assert len(searches) == 5


def test_the_positions_of_zeros_count_where_no_engine_counts_them(settings: Settings, searches: list[str]) -> None:
    plain = dataclasses.replace(settings, only_engines=("pruned.channels",))
    for zeros in ((), (0, 1), (2, 3)):
        model = net()
        with torch.no_grad():
            model[0].weight[list(zeros)] = 0
        tuned(model, plain)
    assert len(searches) == 3


def test_another_flag_of_pytorch_is_another_search(
    settings: Settings, searches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    tuned(model, settings)
    with monkeypatch.context() as flags:
        flags.setattr(torch.backends.mkldnn, "deterministic", True)
        tuned(model, settings)
    torch.use_deterministic_algorithms(True)
    try:
        tuned(model, settings)
    finally:
        torch.use_deterministic_algorithms(False)
    with monkeypatch.context() as flags:
        flags.setattr(torch.backends.mkldnn.conv, "fp32_precision", "bf16")
        tuned(model, settings)
    assert len(searches) == 4


def test_new_code_or_another_engine_version_is_another_search(
    settings: Settings, searches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    tuned(model, settings)
    monkeypatch.setattr(plan_key, "code_digest", lambda: "another")
    tuned(model, settings)
    assert len(searches) == 2
    tuned(model, settings)
    assert len(searches) == 2  # the new one took the place of the old one
    with Database.open(settings.db) as database:
        assert len(database.plans.keys()) == 1


def test_a_row_that_was_added_replaced_or_deleted_is_another_search(tmp_path: Path, searches: list[str]) -> None:
    settings = Settings(effort="quick", db=tmp_path / "perf.db", only_engines=("aten",), isolate=False)
    model = net()
    tuned(model, settings)
    tuned(model, settings)
    assert len(searches) == 1
    with Database.open(settings.db, shipped=False) as database:
        own = database.rows()[0]
        database.put([dataclasses.replace(own, config=EngineConfig("onednn", 99, own.config.knobs))])
    tuned(model, settings)
    with Database.open(settings.db, shipped=False) as database:
        database.put([dataclasses.replace(own, median_us=own.median_us * 2)])
    tuned(model, settings)
    with Database.open(settings.db, shipped=False) as database:
        database.clear(engine="onednn")
    tuned(model, settings)
    assert len(searches) == 4
    tuned(net(6), settings)  # whose rows are of other problems
    tuned(model, settings)
    assert len(searches) == 5


@pytest.mark.parametrize(
    "fault", [CompileError("cpu.direct", "there is no compiler", ""), KeyError("there is no compiler")]
)
def test_a_plan_that_cannot_be_built_is_searched_again_and_the_note_says_why(
    settings: Settings, searches: list[str], monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    model = net()
    tuned(model, settings)

    def fails(*_: Any) -> Any:
        raise fault

    with monkeypatch.context() as broken:
        broken.setattr(start, "build_program", fails)
        found = tuned(model, settings)
    assert len(searches) == 2
    (note,) = [note for note in found.plan.notes if note.startswith(NOT_USED)]
    assert "there is no compiler" in note
    assert not any(note.startswith(NOT_USED) for note in tuned(model, settings).plan.notes)
    assert len(searches) == 2


def test_wrong_results_are_found_and_searched_again(
    settings: Settings, searches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    tuned(model, settings)
    build = start.build_program

    def wrong(*given: Any) -> Any:
        program = build(*given)
        run = program.runnable
        return dataclasses.replace(program, runnable=lambda inputs: [tensor + 1 for tensor in run(inputs)])

    with monkeypatch.context() as broken:
        broken.setattr(start, "build_program", wrong)
        found = tuned(model, settings)
    assert len(searches) == 2
    assert any(note.startswith(NOT_USED) and "error" in note for note in found.plan.notes)
    torch.testing.assert_close(found.program(X), model(X))


def test_float64_decides_where_the_results_are_not_near_to_pytorchs(
    settings: Settings, searches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    tuned(model, settings)
    monkeypatch.setattr(start_inference, "agrees", lambda *_: False)
    found = tuned(model, settings)
    assert len(searches) == 1
    torch.testing.assert_close(found.program(X), model(X))


def test_an_error_that_is_no_rounding_vouches_for_no_other_weights(settings: Settings, searches: list[str]) -> None:
    """PyTorch was far from float64 with the weights of the search: the results of these are compared with float64."""
    model = net()
    tuned(model, settings)
    with Database.open(settings.db) as database:
        (key,) = database.plans.keys()
        record = PlanRecord.from_text(str(database.plans.get(key)))
        database.plans.put(key, dataclasses.replace(record, baseline_error=1.0).to_text())
    assert not start.agrees([X], [X], dataclasses.replace(record, baseline_error=1.0), 1e-3)
    found = tuned(model, settings)
    assert len(searches) == 1
    torch.testing.assert_close(found.program(X), model(X))


def test_what_was_cut_short_or_timed_on_a_busy_machine_as_slower_is_not_stored(
    settings: Settings, searches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    monkeypatch.setattr(end_to_end, "is_faster", lambda *_: False)
    monkeypatch.setattr(whole_model, "ceilings_of", lambda *_: Peaks(1e9, {"fp32": 1e9}, settled=False))
    assert tuned(model, settings).plan.baseline
    with pytest.warns(UserWarning, match="longer than its limit"):
        tuned(model, dataclasses.replace(settings, time_s=1e-3, effort="quick"))
    with Database.open(settings.db) as database:
        assert database.plans.keys() == []
    assert len(searches) == 2


def test_a_baseline_is_stored_too(settings: Settings, searches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    monkeypatch.setattr(end_to_end, "is_faster", lambda *_: False)
    tuned(model, settings)
    found = tuned(model, settings)
    assert searches == ["net"]
    assert found.plan.baseline
    assert torch.equal(found.program(X), model(X))


def test_a_damaged_or_foreign_record_is_no_plan(settings: Settings, searches: list[str]) -> None:
    model = net()
    tuned(model, settings)
    with Database.open(settings.db) as database:
        (key,) = database.plans.keys()
        text = database.plans.get(key)
        for bad in ("{}", "[]", text.replace('"plan": "', '"plan": "AAAA'), text[:-1] + ', "more": 1}'):
            database.plans.put(key, bad)
            tuned(model, settings)
    assert len(searches) == 5
