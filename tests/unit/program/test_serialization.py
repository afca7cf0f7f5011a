"""Copies and pickles work by themselves: bound to their own stock module, or running it where they cannot be bound."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

import convoy
from convoy.errors import InputError, PlanError
from convoy.pipeline.replay import program_of_plan
from convoy.program.optimized_module import OptimizedModule
from convoy.training.step import TrainingStep
from tests.unit.program.fast_net import Classifier, X, Y, always_kept, classifier, sgd


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> convoy.Settings:
    return convoy.Settings(effort="none", db=tmp_path_factory.mktemp("saved") / "perf.db")


@pytest.fixture(scope="module")
def tuned(settings: convoy.Settings) -> OptimizedModule:
    with always_kept():
        return convoy.optimize(classifier(), (X,), settings=settings)


@pytest.fixture(scope="module")
def tuned_step(settings: convoy.Settings) -> TrainingStep:
    model = classifier().train()
    with always_kept():
        return convoy.training_step(model, cross_entropy, sgd(model), (X, Y), settings=settings)


def pickled(value: object) -> object:
    return pickle.loads(pickle.dumps(value))


def saved(value: object) -> object:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"deepcopy": copy.deepcopy, "pickle": pickled, "torch.save": saved}


@pytest.mark.parametrize("way", WAYS)
def test_a_copied_module_works_by_itself(tuned: OptimizedModule, way: str):
    fast = copy.deepcopy(tuned)
    fast.note = "mine"
    twin = WAYS[way](fast)
    assert type(twin) is OptimizedModule
    assert type(twin.model) is Classifier
    assert twin.note == "mine"
    assert twin.plan == fast.plan
    assert not twin.plan.baseline
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = fast(X)
        assert_close(twin(X), wanted, rtol=1e-5, atol=1e-6)
        fast.model.head.bias.add_(1)
        assert twin.stale() is None
        assert_close(twin(X), wanted, rtol=1e-5, atol=1e-6)
        twin.model.head.bias.add_(2)
        with pytest.warns(UserWarning, match=r"head\.bias was changed in place"):
            assert torch.equal(twin(X), twin.model(X))
        twin.refresh()
        assert_close(twin(X), wanted + 2, rtol=1e-4, atol=1e-5)


def test_a_copy_of_a_stale_module_is_stale_and_a_pickle_of_one_is_not(tuned: OptimizedModule):
    fast = copy.deepcopy(tuned)
    with torch.no_grad():
        fast.model.head.bias.add_(1)
        twin = copy.deepcopy(fast)
        assert "head.bias" in str(twin.stale())
        with pytest.warns(UserWarning, match="refresh"):
            assert torch.equal(twin(X), twin.model(X))
        loaded = pickled(fast)
        assert loaded.stale() is None
        assert_close(loaded(X), fast.model(X), rtol=1e-4, atol=1e-5)


def test_a_pickle_falls_back_on_another_machine(tuned: OptimizedModule, monkeypatch: pytest.MonkeyPatch):
    data = pickle.dumps(tuned)

    def refuse(*_: object) -> None:
        raise PlanError("plan.target", "another machine", "this machine")

    with monkeypatch.context() as patch:
        patch.setattr(program_of_plan, "check_target", refuse)
        with pytest.warns(UserWarning, match=r"cannot be bound here.*another machine"):
            twin = pickle.loads(data)
    assert twin.plan.baseline
    assert torch.equal(twin(X), twin.model(X))
    with always_kept():
        twin.refresh()
    assert not twin.plan.baseline
    assert_close(twin(X), twin.model(X).detach(), rtol=1e-4, atol=1e-5)


def test_an_optimised_module_is_a_drop_in(tuned: OptimizedModule, settings: convoy.Settings):
    fast, stock = copy.deepcopy(tuned), classifier()
    assert fast.num_classes == 5
    with pytest.raises(AttributeError, match="no_such"):
        fast.no_such  # noqa: B018
    assert list(fast.state_dict()) == list(stock.state_dict())
    assert list(nn.Sequential(fast).state_dict()) == list(nn.Sequential(stock).state_dict())
    doubled = {name: value * 2 for name, value in stock.state_dict().items()}
    for found in (doubled, {f"model.{name}": value for name, value in doubled.items()}):
        twin = copy.deepcopy(fast)
        assert twin.load_state_dict(found) == stock.load_state_dict(doubled)
        twin.refresh()
        assert_close(twin(X), stock(X).detach(), rtol=1e-3, atol=1e-4)
    outer = nn.Sequential(copy.deepcopy(fast))
    outer.load_state_dict({f"0.{name}": value for name, value in doubled.items()})
    assert torch.equal(outer[0].model.head.bias, doubled["head.bias"])
    with pytest.raises(RuntimeError, match="Missing key"):
        fast.load_state_dict({})
    assert fast.load_state_dict({"other": X}, strict=False).unexpected_keys == ["other"]
    assert convoy.optimize(fast, (X,), settings=settings).model is fast.model


def test_a_model_with_a_child_called_model_keeps_its_names():
    inner = nn.Sequential()
    inner.model = nn.Linear(2, 2)
    from convoy.program.state.stock_interface import stock_names

    assert list(stock_names(inner.state_dict(), inner)) == ["model.weight", "model.bias"]
    wrapped = {f"model.{name}": value for name, value in inner.state_dict().items()}
    assert list(stock_names(wrapped, inner)) == ["model.weight", "model.bias"]


@pytest.mark.parametrize("way", WAYS)
def test_a_copied_step_trains_a_model_of_its_own(tuned_step: TrainingStep, way: str):
    twin = WAYS[way](tuned_step)
    assert twin.plan == tuned_step.plan
    assert not twin.plan.baseline
    assert twin.program.runnable is not None
    stock = copy.deepcopy(tuned_step.model)
    optimizer = sgd(stock)
    before = copy.deepcopy(tuned_step.model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            loss = twin(X, Y)
            optimizer.zero_grad()
            wanted = cross_entropy(stock(X), Y)
            wanted.backward()
            optimizer.step()
            assert_close(loss, wanted.detach(), rtol=1e-4, atol=1e-5)
    for name, value in stock.state_dict().items():
        assert_close(twin.model.state_dict()[name], value, rtol=1e-4, atol=1e-5)
        assert torch.equal(tuned_step.model.state_dict()[name], before[name])


def test_a_step_of_a_process_group_is_not_pickled(tuned_step: TrainingStep):
    from dataclasses import replace

    twin = copy.deepcopy(tuned_step)
    twin.options = replace(twin.options, group=object())
    with pytest.raises(InputError, match="process group"):
        pickle.dumps(twin)


def test_a_program_alone_is_its_plan(tuned: OptimizedModule):
    (program,) = tuned.programs
    assert copy.deepcopy(program) is program
    assert pickled(program).plan == program.plan
