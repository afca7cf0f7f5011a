"""Arguments of optimize: wrong kinds are refused by name, and a model that no graph can hold runs in PyTorch, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import convoy
from convoy.errors import InputError


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()


X = torch.ones(1, 3, 8, 8)


@pytest.fixture
def settings(tmp_path) -> convoy.Settings:
    return convoy.Settings(effort="none", db=tmp_path / "perf.db")


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(1, 3, 8, 8)


def fake_net() -> nn.Module:
    with FakeTensorMode():
        return net()


REFUSED: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "a name": ("model", lambda: {"model": "resnet18"}),
    "a function": ("model", lambda: {"model": lambda x: x}),
    "a class": ("model", lambda: {"model": nn.Conv2d}),
    "nothing": ("model", lambda: {"model": None}),
    "no arguments": ("args", lambda: {"args": None}),
    "a word for arguments": ("args", lambda: {"args": "x"}),
    "no tensor": ("args", lambda: {"args": ()}),
    "keywords as a list": ("kwargs", lambda: {"kwargs": [1]}),
    "keywords that are no words": ("kwargs", lambda: {"kwargs": {1: X}}),
    "settings as a dict": ("settings", lambda: {"settings": {"effort": "none"}}),
    "a number for a name": ("name", lambda: {"name": 3}),
    "a model without numbers": ("device", lambda: {"model": net().to("meta"), "args": X.to("meta")}),
    "two devices": ("args", lambda: {"args": X.to("meta")}),
    "a fake tensor": ("args", lambda: {"args": fake()}),
    "a fake model": ("model", lambda: {"model": fake_net()}),
    "a lazy model": ("model", lambda: {"model": nn.Sequential(nn.LazyConv2d(4, 3))}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_kinds_are_refused_by_name(name: str, settings: convoy.Settings) -> None:
    argument, make = REFUSED[name]
    given = {"model": net(), "args": X, "settings": settings} | make()
    with pytest.raises(InputError) as caught:
        convoy.optimize(**given)
    assert caught.value.argument == argument


def test_forms_of_a_model_that_are_no_module_say_what_to_give(settings: convoy.Settings) -> None:
    with pytest.raises(InputError, match=r"model: got 'ExportedProgram'.*Give the program's \.module\(\)"):
        convoy.optimize(torch.export.export(net(), (X,)), X, settings=settings)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        frozen = torch.jit.freeze(torch.jit.trace(net(), X))
    with pytest.raises(InputError, match=r"with a training flag.*Give the module before torch\.jit\.freeze"):
        convoy.optimize(frozen, X, settings=settings)


def test_what_the_model_itself_refuses_it_says_itself(settings: convoy.Settings) -> None:
    with pytest.raises(RuntimeError, match="expected input"):
        convoy.optimize(net(), X[:, :2], settings=settings)
    with pytest.raises(TypeError, match="positional arguments"):
        convoy.optimize(net(), (X, X), settings=settings)


class Selects(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0]


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.seen = nn.Conv2d(3, 4, 3), []
        self.conv.register_forward_hook(lambda *_: self.seen.append(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(net())


STOCK: dict[str, tuple[str, Callable[[], nn.Module], torch.Tensor]] = {
    "complex numbers": ("complex64", lambda: nn.Conv2d(3, 4, 3, dtype=torch.complex64), X.to(torch.complex64)),
    "TorchScript": ("ScriptModule", scripted, X),
    "a sparse argument": ("sparse", lambda: nn.Linear(4, 4), torch.eye(4).to_sparse()),
    "a shape that depends on data": ("depends on data", Selects, X),
    "a hook": (r"conv \(Conv2d\) has a forward hook.*remove it", Hooked, X),
}


@pytest.mark.parametrize("name", STOCK)
def test_what_a_graph_cannot_hold_runs_as_pytorch_runs_it(name: str, settings: convoy.Settings) -> None:
    reason, make, x = STOCK[name]
    model = make().eval()
    with pytest.warns(UserWarning, match="(?s)^convoy: .*" + reason + ".*PyTorch runs .* as it is$") as caught:
        fast = convoy.optimize(model, x, settings=settings)
    ours = [w for w in caught if str(w.message).startswith("convoy: ")]
    assert [(w.filename) for w in ours] == [__file__]
    assert fast.plan.baseline
    assert "PyTorch runs" in fast.explain()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(fast(x), model(x))


def test_a_hook_fires_once_a_call_and_never_while_tuning(settings: convoy.Settings) -> None:
    model = Hooked().eval()
    with pytest.warns(UserWarning, match="has a forward hook"):
        fast = convoy.optimize(model, X, settings=settings)
    assert model.seen == []
    fast(X)
    assert model.seen == [1]


def test_a_plan_for_a_model_with_hooks_runs_as_pytorch_runs_it(settings: convoy.Settings, tmp_path) -> None:
    model = net()
    (path,) = convoy.optimize(model, X, settings=settings).save(tmp_path / "net.plan.json")
    model[0].register_forward_hook(lambda _, __, y: y * 2)
    with pytest.warns(UserWarning, match="has a forward hook"):
        fast = convoy.load(model, path, X, settings=settings)
    assert torch.equal(fast(X), model(X))


def test_the_module_of_an_exported_program_is_captured(settings: convoy.Settings) -> None:
    model = torch.export.export(net(), (X,)).module()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="convoy")
        fast = convoy.optimize(model, X, settings=settings)
    assert fast.plan.graph_digest != "0" * 16
    torch.testing.assert_close(fast(X), model(X))


def test_wrappers_are_looked_into(settings: convoy.Settings) -> None:
    model = net()
    fast = convoy.optimize(torch.compile(model, backend="eager"), X, settings=settings)
    assert fast.model is model
    assert convoy.optimize(fast, X, settings=settings).model is model


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)

    def forward(self, a: torch.Tensor, rest: list[torch.Tensor]) -> torch.Tensor:
        return (self.first(a) - self.second(rest[0])).relu()


@pytest.mark.parametrize(
    "second", [lambda x: x, lambda x: x[:], lambda x: x.view(1, 3, 8, 8)], ids=["same", "slice", "view"]
)
def test_a_tensor_given_twice_is_two_arguments(settings: convoy.Settings, monkeypatch, second) -> None:
    from convoy.pipeline.check import end_to_end

    monkeypatch.setattr(end_to_end, "is_faster", lambda *_: True)
    model, x = Siamese().eval(), torch.randn(1, 3, 8, 8)
    fast = convoy.optimize(model, (x, [second(x)]), settings=settings)
    assert not fast.plan.baseline
    with torch.no_grad():
        for a, b in ((x, torch.flip(x, (3,))), (x, x)):
            torch.testing.assert_close(fast(a, [b]), model(a, [b]), rtol=1e-4, atol=1e-5)


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if float(x.sum()) > 0 else x - 1


def test_the_exporter_prints_nothing_where_it_fails(
    settings: convoy.Settings, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(UserWarning, match="cannot be exported") as caught:
        convoy.optimize(Branches(), X, settings=settings)
    assert capfd.readouterr() == ("", "")
    (told,) = [str(w.message) for w in caught if str(w.message).startswith("convoy: ")]
    assert len(told.splitlines()) == 1
