"""Channel pruning: a pruned filter's channel is zero for everybody who reads it, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import hardtanh, sigmoid

from convoy.capture.export import export_inference
from convoy.errors import CaptureError, InputError
from convoy.prune import Recipe, prune_model
from convoy.prune.channels import FINAL


def net(kind: type[nn.Module]) -> nn.Module:
    """Random everywhere: batch norms that are no identities, biases that are not zero."""
    with torch.random.fork_rng():
        torch.manual_seed(8)
        model = kind().eval()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                for tensor in (module.weight.data, module.bias.data, module.running_mean, module.running_var):
                    tensor.uniform_(0.5, 1.5)
    return model


class Chain(nn.Module):
    """Convolution, batch norm and activation; depthwise; pooling; a linear layer behind a flattening."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, bias=True)
        self.norm = nn.BatchNorm2d(8)
        self.b = nn.Conv2d(8, 8, 3, groups=8)
        self.c = nn.Conv2d(8, 6, 1)
        self.fc = nn.Linear(6 * 4, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.silu(self.norm(self.a(x)))
        x = nn.functional.max_pool2d(hardtanh(self.c(self.b(x)), 0.0, 6.0), 2)
        return self.last(torch.relu(self.fc(x.flatten(1))))


class Branches(nn.Module):
    """A sum, a concatenation, a mean over pixels; a batch norm that two layers share; an activation that is 1/2 at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)
        self.c, self.d = nn.Conv2d(4, 4, 1), nn.Conv2d(3, 4, 1)
        self.shared = nn.BatchNorm2d(4)
        self.e, self.f = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 4, 1)
        self.g = nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.c(self.a(x) + self.b(x))
        both = self.e(torch.cat([torch.relu(self.d(x)), total], 1))
        both = self.shared(self.f(self.shared(both)))
        return self.head(self.g(sigmoid(both)).mean((2, 3)))


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def values(model: nn.Module, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The results of modules, by name."""
    found: dict[str, torch.Tensor] = {}
    hooks = [
        model.get_submodule(name).register_forward_hook(lambda _m, _i, y, name=name: found.__setitem__(name, y))
        for name in names
    ]
    with torch.no_grad():
        model(X)
    for hook in hooks:
        hook.remove()
    return found


def test_channels_are_zero_all_the_way() -> None:
    model = net(Chain)
    done = prune_model(model, Recipe.of("channel", 0.5), (X,))
    gone = {name: ~done.masks[f"{name}.weight"].flatten(1).any(1) for name in ("a", "c", "fc")}
    assert {name: int(mask.sum()) for name, mask in gone.items()} == {"a": 4, "c": 3, "fc": 2}
    found = values(model, ("a", "norm", "c", "fc"))
    for name, of in (("a", "a"), ("norm", "a"), ("c", "c"), ("fc", "fc")):
        assert not found[name][:, gone[of]].any()
        assert found[name][:, ~gone[of]].abs().sum(0).flatten(1).any(1).all() if of != "fc" else True
    assert torch.equal(done.masks["norm.weight"], ~gone["a"])
    assert torch.equal(done.masks["norm.bias"], ~gone["a"])
    assert torch.equal(done.masks["a.bias"], ~gone["a"])
    assert not model.b.weight[gone["a"]].any()  # type: ignore[union-attr,index]
    assert not model.fc.weight.view(5, 6, 4)[:, gone["c"]].any()  # type: ignore[union-attr,operator]
    assert not model.last.weight[:, gone["fc"]].any()  # type: ignore[union-attr,index]
    rows = {row.name: row for row in done.layers}
    assert rows["last"].reason == FINAL
    assert rows["last"].zeros_after == 2 * 3
    assert [row.name for row in done.layers if row.reason] == ["last"]


def test_weights_that_read_zeros_change_nothing_when_they_go() -> None:
    """The same filters, biases and norms zeroed by hand give the same outputs: what else went was read by nobody."""
    model, other = net(Chain), net(Chain)
    done = prune_model(model, Recipe.of("channel", 0.5), (X,))
    chosen = {name: (model.get_parameter(f"{name}.weight") != 0).flatten(1).any(1) for name in ("a", "c", "fc", "b")}
    with torch.no_grad():
        for name, kept in chosen.items():
            if name == "b":
                kept = done.masks["b.bias"]  # a depthwise filter may be chosen, or have lost its input
            other.get_parameter(f"{name}.weight")[~kept] = 0
            other.get_parameter(f"{name}.bias")[~kept] = 0
        for name in ("norm.weight", "norm.bias"):
            other.get_parameter(name)[~chosen["a"]] = 0
        torch.testing.assert_close(model(X), other(X), rtol=1e-5, atol=1e-6)
        assert (model(X) - net(Chain)(X)).abs().max() > 1e-3


def test_sums_concatenations_and_what_stops_zeros() -> None:
    model = net(Branches)
    done = prune_model(model, Recipe.of("channel", 0.5), (X,))
    gone = {name: ~done.masks[f"{name}.weight"].flatten(1).any(1) for name in "abcdefg"}
    both = gone["a"] & gone["b"]
    assert torch.equal(~(model.c.weight != 0)[~gone["c"]].any(0).flatten(), both)  # type: ignore[union-attr,index]
    read = torch.cat([gone["d"], gone["c"]])
    assert torch.equal(~(model.e.weight != 0)[~gone["e"]].any(0).flatten(), read)  # type: ignore[union-attr,index]
    assert not {"shared.weight", "shared.bias"} & done.masks.keys()
    assert (model.f.weight != 0)[~gone["f"]].all()  # type: ignore[union-attr,index]
    assert (model.g.weight != 0)[~gone["g"]].all()  # type: ignore[union-attr,index]
    assert torch.equal(~(model.head.weight != 0).any(0), gone["g"])  # type: ignore[union-attr]


def test_skipped_layers_are_not_touched() -> None:
    model, before = net(Chain), net(Chain)
    done = prune_model(model, Recipe.of("channel", 0.5, skip=("b", "last")), (X,))
    for name in ("b.weight", "b.bias", "last.weight", "last.bias"):
        assert torch.equal(model.get_parameter(name), before.get_parameter(name))
        assert name not in done.masks


def test_no_layer_but_the_last_is_nothing_to_prune() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    with pytest.raises(InputError, match="not the model's outputs"):
        prune_model(model, Recipe.of("channel", 0.5), (X,))


def test_a_model_that_cannot_be_exported_says_so() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x) if float(x.sum()) > 0 else x

    with pytest.raises(CaptureError):
        prune_model(Fickle(), Recipe.of("channel", 0.5), (X,))


def test_exported_operators_are_those_that_are_known() -> None:
    """Zeros end where an operator is not known: the ones that ordinary nets have must be."""
    from convoy.prune.channels import KEEP_ZERO, LAYERS, NORMS, RESHAPES

    seen = {node.target for node in export_inference(net(Chain), (X,), {}).graph.nodes if node.op == "call_function"}
    known = KEEP_ZERO | LAYERS | NORMS | RESHAPES
    left = {str(target) for target in seen - known}
    assert left <= {"aten.hardtanh.default", "<built-in function getitem>"}
