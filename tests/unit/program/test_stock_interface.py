"""An optimized module offers what its stock module offers: items, length, attributes, and results that are its own tensors."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import convoy
from convoy.program.optimized_module import OptimizedModule
from tests.unit.program.fast_net import always_kept

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Named(nn.ModuleDict):
    """A container whose layers have names."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.values():
            x = layer(x)
        return x


class Listed(nn.ModuleList):
    """A container whose layers run one after the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x


class ReturnsItsOwn(nn.Module):
    """Returns parameters, a buffer, a plain tensor, its input and a constant as they are, and a view of a parameter."""

    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.table = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.ones(3))
        self.register_buffer("unsaved", torch.ones(2), persistent=False)
        self.plain = torch.arange(3.0)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        own = {"table": self.table, "weight": self.conv.weight, "seen": self.seen, "unsaved": self.unsaved}
        return {"y": self.scale * self.conv(x), **own, "plain": self.plain, "x": x, "new": torch.ones(2)}


def layers() -> list[nn.Module]:
    return [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1)]


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stock_interface") / "perf.db"


def optimized(model: nn.Module, db: Path) -> OptimizedModule:
    with always_kept(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return convoy.optimize(model.eval(), (X,), settings=convoy.Settings(effort="none", db=db))


@pytest.mark.parametrize("kind", [nn.Sequential, Listed])
def test_layers_are_items(kind: type[nn.Module], db: Path):
    model = kind(*layers()) if kind is nn.Sequential else kind(layers())
    fast = optimized(model, db)
    assert len(fast) == 3
    assert fast[0] is model[0]
    assert fast[-1] is model[-1]
    assert list(fast) == list(model)
    assert list(reversed(fast)) == list(reversed(list(model)))
    assert type(fast[1:]) is type(model[1:])
    assert list(fast[1:]) == list(model[1:])
    assert model[1] in fast
    assert bool(fast)
    with pytest.raises(IndexError):
        fast[3]


def test_names_of_a_dictionary_of_layers_are_items(db: Path):
    model = Named(dict(zip(("first", "act", "last"), layers(), strict=True)))
    fast = optimized(model, db)
    assert list(fast) == list(fast.keys()) == ["first", "act", "last"]
    assert "act" in fast
    assert "other" not in fast
    assert fast["last"] is model["last"]
    assert dict(fast.items()) == dict(model.items())


def test_a_replaced_item_replaces_the_stock_modules_layer(db: Path):
    model = nn.Sequential(*layers())
    fast = optimized(model, db)
    fast[2] = nn.Conv2d(4, 5, 1)
    assert model[2] is fast[2]
    with pytest.warns(UserWarning, match="the stock module runs; call .refresh"):
        assert fast(X).shape == (2, 5, 8, 8)
    del fast[2]
    assert len(model) == 2


def test_a_module_that_is_no_container_is_none_when_optimized(db: Path):
    fast = optimized(ReturnsItsOwn(), db)
    assert bool(fast)
    for ask in (len, iter, lambda one: one[0], lambda one: 0 in one):
        with pytest.raises(TypeError, match="ReturnsItsOwn"):
            ask(fast)


def test_attributes_are_set_and_deleted_on_the_stock_module(db: Path):
    model = ReturnsItsOwn().eval()
    fast = optimized(model, db)
    fast.note = "the optimized module's own"
    assert not hasattr(model, "note")
    assert {"scale", "conv", "note", "explain"} <= set(dir(fast))
    fast.scale = 3.0
    fast.conv = nn.Conv2d(3, 2, 3)
    assert model.scale == fast.scale == 3.0
    with pytest.warns(UserWarning, match="the stock module runs"):
        assert torch.equal(fast(X)["y"], model(X)["y"])
    fast.refresh()
    torch.testing.assert_close(fast(X)["y"], model(X)["y"])
    del fast.scale
    assert model.scale == 2.0
    del fast.note
    assert not hasattr(fast, "note")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_tensors_of_the_model_come_back_as_themselves(mode: type, db: Path):
    model = ReturnsItsOwn().eval()
    fast = optimized(model, db)
    with mode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):  # the second call is a known one
            made = fast(X)
            expected = model(X)
            for name in ("table", "weight", "seen", "unsaved", "plain", "x"):
                assert made[name] is expected[name], name
            assert isinstance(made["weight"], nn.Parameter)
            assert made["weight"].requires_grad
            torch.testing.assert_close(made["y"], expected["y"].detach())
            assert torch.equal(made["new"], expected["new"])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_returns_its_own_tensors(copied, db: Path):
    fast = optimized(ReturnsItsOwn(), db)
    twin = copied(fast)
    assert twin(X)["table"] is twin.model.table
    assert twin.model.table is not fast.model.table


def test_a_new_parameter_comes_back_after_refresh(db: Path):
    model = ReturnsItsOwn().eval()
    fast = optimized(model, db)
    model.table = nn.Parameter(torch.zeros(4))
    with pytest.warns(UserWarning, match="the stock module runs"):
        assert fast(X)["table"] is model.table
    fast.refresh()
    assert fast(X)["table"] is model.table
