"""Magnitude masks: exact counts, the right weights, as torch.nn.utils.prune chooses them where it has the same pattern."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

from convoy.errors import InputError
from convoy.prune.magnitude import PrunableLayer, Recipe, check_finite, magnitude_mask, magnitude_masks, prunable_layers
from convoy.prune.patterns import group_ids, group_scores, parse_pattern


class Net(nn.Module):
    """A stem with three channels, a grouped and a depthwise convolution, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.grouped = nn.Conv2d(8, 12, 3, groups=2)
        self.depthwise = nn.Conv2d(12, 12, 3, groups=12)
        self.body = nn.Sequential(nn.Conv2d(12, 16, (1, 3)), nn.ReLU(), nn.Conv2d(16, 20, 1))
        self.head = nn.Linear(20, 7)


@pytest.fixture
def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return Net()


def masks_of(net: nn.Module, *words: object, **named: object) -> dict[str, torch.Tensor]:
    recipe = Recipe.of(*words, **named)  # type: ignore[arg-type]
    return magnitude_masks(prunable_layers(net, recipe), recipe)


def weights(net: nn.Module) -> dict[str, torch.Tensor]:
    return {n: m.weight.detach() for n, m in net.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))}


@pytest.mark.parametrize("sparsity", [0.1, 0.37, 0.5, 0.9, 0.98])
def test_each_layer_gets_its_share_and_loses_its_smallest(net: nn.Module, sparsity: float) -> None:
    for name, mask in masks_of(net, "unstructured", sparsity).items():
        weight = weights(net)[name].abs().view(mask.shape)
        assert int((~mask).sum()) == round(sparsity * mask.numel())
        assert float(weight[mask].min()) >= float(weight[~mask].max())


@pytest.mark.parametrize("sparsity", [0.2, 0.5, 0.75])
def test_the_same_weights_go_as_with_torch(net: nn.Module, sparsity: float) -> None:
    layer, every = copy.deepcopy(net), copy.deepcopy(net)
    modules = [m for m in layer.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    for module in modules:
        torch_prune.l1_unstructured(module, "weight", sparsity)
    for name, mask in masks_of(net, "unstructured", sparsity).items():
        assert torch.equal(mask.flatten(), layer.get_submodule(name).weight_mask.flatten().bool())
    pairs = [(m, "weight") for m in every.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    torch_prune.global_unstructured(pairs, torch_prune.L1Unstructured, amount=sparsity)
    for name, mask in masks_of(net, "unstructured", sparsity, "global").items():
        assert torch.equal(mask.flatten(), every.get_submodule(name).weight_mask.flatten().bool())


def test_the_same_filters_go_as_with_torch(net: nn.Module) -> None:
    found = masks_of(net, "channel", 0.25)
    for name, mask in found.items():
        module = copy.deepcopy(net.get_submodule(name))
        torch_prune.ln_structured(module, "weight", 0.25, n=2, dim=0)
        assert torch.equal(mask.flatten(), module.weight_mask.flatten().bool())
    assert {name: int((~mask.flatten(1).any(1)).sum()) for name, mask in found.items()} == {
        "stem": 2,
        "grouped": 3,
        "depthwise": 3,
        "body.0": 4,
        "body.2": 5,
        "head": 2,
    }


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_blocks_go_whole(net: nn.Module, scope: str) -> None:
    found = masks_of(net, "block:2x8", 0.6, scope)
    for name, mask in found.items():
        matrix = mask.view(mask.shape[0], -1)
        rows = 1 if name == "depthwise" else 2  # a group of the convolution has no more
        for row in range(0, matrix.shape[0], rows):
            for column in range(0, matrix.shape[1], 8):
                block = matrix[row : row + rows, column : column + 8]
                assert bool(block.all()) or not bool(block.any())
        if scope == "layer":
            assert abs(int((~mask).sum()) - 0.6 * mask.numel()) <= 8
    total = sum(mask.numel() for mask in found.values())
    assert abs(sum(int((~mask).sum()) for mask in found.values()) - 0.6 * total) <= 8 * (1 if scope == "global" else 6)


def test_n_of_m_counts_and_leaves_what_it_does_not_fit(net: nn.Module) -> None:
    recipe = Recipe.of("2:4")
    layers = prunable_layers(net, recipe)
    found = magnitude_masks(layers, recipe)
    assert {layer.name: layer.reason for layer in layers if layer.reason} == {
        "stem": "its 3 input channels a group are no multiple of 4",
        "depthwise": "its 1 input channels a group are no multiple of 4",
    }
    for mask in found.values():
        assert int(mask.sum()) * 2 == mask.numel()
        assert mask.shape[1] % 4 == 0
        assert bool((mask.unfold(1, 4, 4).sum(-1) == 2).all())
    assert found.keys() == {"grouped", "body.0", "body.2", "head"}
    everywhere = masks_of(net, "2:4", scope="global")
    assert all(torch.equal(found[name], everywhere[name]) for name in found)


def test_global_shares_differ_between_layers(net: nn.Module) -> None:
    with torch.no_grad():
        net.stem.weight.mul_(10)  # type: ignore[union-attr,operator]
    found = masks_of(net, "unstructured", 0.5, "global")
    total = sum(mask.numel() for mask in found.values())
    assert sum(int((~mask).sum()) for mask in found.values()) == round(0.5 * total)
    assert float(found["stem"].float().mean()) > 0.9


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("pattern", ["unstructured", "channel", "block:64x64"])
def test_no_layer_loses_all_its_weights(net: nn.Module, scope: str, pattern: str) -> None:
    with torch.no_grad():
        net.head.weight.mul_(1e-6)  # type: ignore[union-attr,operator]
    for mask in masks_of(net, pattern, 0.999, scope).values():
        assert bool(mask.any())


def test_zeros_that_are_there_go_first_and_count() -> None:
    layer = nn.Conv2d(2, 4, 3)
    with torch.no_grad():
        layer.weight[:2] = 0
    recipe = Recipe.of("unstructured", 0.75)
    (mask,) = magnitude_masks([PrunableLayer(("conv",), layer)], recipe).values()
    assert not mask[:2].any()
    assert int((~mask).sum()) == 54


def test_ties_go_in_order() -> None:
    layer = nn.Linear(4, 2)
    with torch.no_grad():
        layer.weight.fill_(1)
    (mask,) = magnitude_masks([PrunableLayer(("fc",), layer)], Recipe.of("unstructured", 0.5)).values()
    assert mask.flatten().tolist() == [True, False, False, False, False, True, True, True]  # the first is the strongest


def test_shared_weights_are_one_layer(net: nn.Module) -> None:
    net.again = nn.Conv2d(16, 20, 1)  # type: ignore[assignment]
    net.again.weight = net.body[2].weight  # type: ignore[index,union-attr]
    names = [layer.names for layer in prunable_layers(net, Recipe.of("unstructured", 0.5))]
    assert ("body.2", "again") in names
    assert len(names) == 6


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        (("first", "last"), {"grouped", "depthwise", "body.0", "body.2"}),
        (("body.*", "stem"), {"grouped", "depthwise", "head"}),
        (("head",), {"stem", "grouped", "depthwise", "body.0", "body.2"}),
    ],
)
def test_layers_can_be_skipped(net: nn.Module, skip: tuple[str, ...], left: set[str]) -> None:
    assert masks_of(net, "unstructured", 0.5, skip=skip).keys() == left


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"skip": ("lst",)}, "Did you mean last"),
        ({"skip": ("xyz*",)}, "It has: stem, grouped"),
        ({"skip": ("*",)}, "a layer that it fits. stem: skipped, as asked."),
        ({"pattern": "2:5", "sparsity": None}, "a layer that it fits. stem: its 3 input channels"),
        ({"scope": "net"}, "one of layer, global"),
    ],
)
def test_what_cannot_be_is_refused(net: nn.Module, words: dict[str, object], expected: str) -> None:
    if words.get("pattern") == "2:5":
        net.head = nn.Linear(9, 2)
    with pytest.raises(InputError) as caught:
        masks_of(net, **{"pattern": "unstructured", "sparsity": 0.5} | words)
    assert expected in str(caught.value)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(InputError, match="a model with Conv2d or Linear layers"):
        prunable_layers(nn.Sequential(nn.ReLU()), Recipe.of("unstructured", 0.5))


def test_a_parametrized_weight_is_left_alone(net: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(net.head)  # type: ignore[arg-type]
    layers = prunable_layers(net, Recipe.of("unstructured", 0.5))
    assert [layer.reason for layer in layers if layer.name == "head"] == ["its weight is computed by a parametrization"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_without_a_magnitude_are_refused_by_layer(net: nn.Module, value: float) -> None:
    with torch.no_grad():
        net.body[2].weight[3, 2] = value  # type: ignore[index,union-attr]
    with pytest.raises(InputError, match=r"weights: got 'body.2', .* 1 of its weights are NaN or infinite"):
        check_finite(prunable_layers(net, Recipe.of("unstructured", 0.5)))


@pytest.mark.parametrize("seed", range(40))
def test_random_layers_and_shares(seed: int) -> None:
    """The count comes as near to the share as groups allow, groups go whole, and what goes is weaker than what stays."""
    rng = random.Random(seed)
    groups = rng.choice([1, 1, 2, 3])
    layer = nn.Conv2d(
        groups * rng.randint(1, 5), groups * rng.randint(1, 7), (rng.randint(1, 3), rng.randint(1, 3)), groups=groups
    )
    weight = layer.weight.detach()
    weight.copy_(torch.randint(-4, 5, weight.shape, generator=torch.Generator().manual_seed(seed)).float())  # many ties
    pattern = parse_pattern(rng.choice(["unstructured", "channel", f"block:{rng.randint(1, 4)}x{rng.randint(1, 9)}"]))
    sparsity = rng.uniform(0.01, 0.99)
    mask = magnitude_mask(weight, groups, pattern, sparsity)
    ids = group_ids(pattern, weight, groups)
    scores, sizes = group_scores(weight, ids)
    kept = torch.zeros(len(sizes)).index_add_(0, ids.flatten(), mask.flatten().float())
    assert bool(((kept == 0) | (kept == sizes)).all())
    gone = kept == 0
    assert not bool(gone[scores.argmax()])
    if bool(gone.any()):
        assert float(scores[gone].max()) <= float(scores[~gone].min())
    count, wanted = int((~mask).sum()), sparsity * mask.numel()
    room = mask.numel() - int(sizes[scores.argmax()])
    assert abs(count - min(wanted, room)) <= int(sizes.max()) / 2 + 0.5 or count == room


def test_blocks_of_one_are_single_weights(net: nn.Module) -> None:
    """Two ways to the same masks: sorted groups, and a threshold with the first of equals."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_((parameter * 40).round())
    for sparsity in (0.3, 0.55, 0.8):
        for scope in ("layer", "global"):
            one, other = (masks_of(net, pattern, sparsity, scope) for pattern in ("unstructured", "block:1x1"))
            assert all(torch.equal(one[name], other[name]) for name in one)
