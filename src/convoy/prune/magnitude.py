"""Magnitude pruning: which weights of which layers become zero."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import parametrize

from convoy.errors import InputError, unknown_name
from convoy.prune.patterns import (
    Pattern,
    as_filters,
    group_ids,
    group_scores,
    misfit,
    nm_mask,
    parse_pattern,
    parse_sparsity,
)
from convoy.typed_torch import named_modules, split

SCOPES = ("layer", "global")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to prune.

    Attributes:
        pattern: where zeros may lie.
        sparsity: fraction, between 0 and 1, of weights that become zero: of each layer (scope `layer`) or of all together.
        scope: whether layers are ranked each by itself or all together.
        skip: layers that keep their weights: names, patterns with `*`, `first` and `last`.
    """

    pattern: Pattern
    sparsity: float
    scope: str = "layer"
    skip: tuple[str, ...] = ()

    @staticmethod
    def of(
        pattern: str = "unstructured", sparsity: float | None = None, scope: str = "layer", skip: Sequence[str] = ()
    ) -> Recipe:
        """A recipe from command-line values; raises InputError that names the wrong one."""
        wanted = parse_pattern(pattern)
        share = parse_sparsity(wanted, sparsity)
        if scope not in SCOPES:
            raise unknown_name("scope", scope, SCOPES)
        return Recipe(wanted, share, scope, tuple(skip))


@dataclass(frozen=True, slots=True)
class PrunableLayer:
    """A convolution or linear layer of a model, by its weight.

    Attributes:
        names: paths of the modules that have this weight; several if they share it.
        module: the first of them.
        reason: why it is not pruned; empty if it is.
    """

    names: tuple[str, ...]
    module: nn.Conv2d | nn.Linear
    reason: str = ""

    @property
    def name(self) -> str:
        """Path of the first module."""
        return self.names[0]

    @property
    def groups(self) -> int:
        """Groups of the convolution; 1 for a linear layer."""
        return self.module.groups if isinstance(self.module, nn.Conv2d) else 1

    @property
    def weight(self) -> torch.Tensor:
        """[k, c / groups, r, s], detached."""
        return as_filters(self.module.weight.detach())


def prunable_layers(model: nn.Module, recipe: Recipe) -> list[PrunableLayer]:
    """The model's Conv2d and Linear layers in order of registration; those that are not pruned have a reason.

    Raises:
        InputError: the model has no such layer, `skip` names none of them, or no layer is left to prune.
    """
    names: dict[int, list[str]] = {}
    modules: dict[int, nn.Conv2d | nn.Linear] = {}
    # Each access to a parametrized weight makes a new tensor, which must stay alive while its id is in use.
    held: list[torch.Tensor] = []
    for name, module in named_modules(model):
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            held.append(module.weight)
            names.setdefault(id(held[-1]), []).append(name)
            modules.setdefault(id(held[-1]), module)
    if not modules:
        raise InputError("model", type(model).__name__, "a model with Conv2d or Linear layers")
    layers = [PrunableLayer(tuple(names[key]), module) for key, module in modules.items()]
    skipped = _skipped(layers, recipe.skip)
    found = [PrunableLayer(x.names, x.module, _reason(x, recipe.pattern, skipped)) for x in layers]
    if all(layer.reason for layer in found):
        raise InputError("pattern", str(recipe.pattern), "a layer that it fits", f"{found[0].name}: {found[0].reason}.")
    return found


def _skipped(layers: Sequence[PrunableLayer], skip: Sequence[str]) -> set[str]:
    known = [name for layer in layers for name in layer.names]
    found: set[str] = set()
    for word in skip:
        ends = {"first": layers[0].names, "last": layers[-1].names}
        hits = fnmatch.filter(known, word) or list(ends.get(word, ()))
        if not hits:
            near = difflib.get_close_matches(word, [*known, *ends], n=3, cutoff=0.5)
            todo = f"Did you mean {', '.join(near)}?" if near else f"It has: {', '.join(known[:8])}."
            raise InputError("skip", word, "first, last, or the name of a convolution or linear layer", todo)
        found.update(hits)
    return found


def _reason(layer: PrunableLayer, pattern: Pattern, skipped: set[str]) -> str:
    if skipped & set(layer.names):
        return "skipped, as asked"
    if any(parametrize.is_parametrized(layer.module, name) for name in ("weight", "bias")):
        return "its weight is computed by a parametrization"
    return misfit(pattern, layer.weight)


def check_finite(layers: Sequence[PrunableLayer]) -> None:
    """Raise InputError, which names the layer, if a layer has weights that are NaN or infinite."""
    for layer in layers:
        bad = int((~torch.isfinite(layer.weight)).sum())
        if bad:
            raise InputError(
                "weights", layer.name, "finite numbers alone", f"{bad} of its weights are NaN or infinite."
            )


def magnitude_masks(layers: Sequence[PrunableLayer], recipe: Recipe) -> dict[str, torch.Tensor]:
    """Masks by magnitude: for each pruned layer, True where its weight [k, c / groups, r, s] is kept.

    Groups of weights (see `patterns.group_ids`) are ranked by their root mean square, and the lowest are pruned; of equal
    groups, the first one is pruned first. The number of pruned groups is the one nearest to the sparsity asked for. The
    largest group of each layer is always kept, because a layer of zeros alone would cut the net in two.

    Args:
        layers: the result of `prunable_layers`; weights are finite.
        recipe: pattern, sparsity and scope.
    """
    chosen = [layer for layer in layers if not layer.reason]
    if recipe.scope == "layer" or recipe.pattern.kind == "nm":
        return {x.name: magnitude_mask(x.weight, x.groups, recipe.pattern, recipe.sparsity) for x in chosen}
    kept = _ranked_together([(x.weight, x.groups) for x in chosen], recipe.pattern, recipe.sparsity)
    return {layer.name: mask for layer, mask in zip(chosen, kept, strict=True)}


def magnitude_mask(weight: torch.Tensor, groups: int, pattern: Pattern, sparsity: float) -> torch.Tensor:
    """Mask, bool, of one weight [k, c / groups, r, s] by the rules of `magnitude_masks`; True is kept. The pattern must fit."""
    return (
        nm_mask(pattern, weight) if pattern.kind == "nm" else _ranked_together([(weight, groups)], pattern, sparsity)[0]
    )


def _ranked_together(
    weights: Sequence[tuple[torch.Tensor, int]], pattern: Pattern, sparsity: float
) -> list[torch.Tensor]:
    """Masks of several weights, each given with its convolution's groups, that are ranked as one weight."""
    if pattern.kind == "unstructured":
        return _kept_weights([weight for weight, _ in weights], sparsity)
    ids = [group_ids(pattern, weight, groups) for weight, groups in weights]
    kept = _kept_groups([group_scores(weight, i) for (weight, _), i in zip(weights, ids, strict=True)], sparsity)
    return [groups[i] for groups, i in zip(kept, ids, strict=True)]


def _kept_weights(weights: Sequence[torch.Tensor], sparsity: float) -> list[torch.Tensor]:
    """`_kept_groups` for single weights, without a sort, since one layer of VGG-16 has 100 million weights."""
    counts = [weight.numel() for weight in weights]
    sizes = torch.cat([weight.detach().abs().reshape(-1) for weight in weights])
    for part in split(sizes, counts):
        part[part.argmax()] = torch.inf
    wanted = min(round(sparsity * len(sizes)), len(sizes) - len(weights))  # as torch.nn.utils.prune rounds
    kept = torch.ones_like(sizes, dtype=torch.bool)
    if wanted:
        last = sizes.kthvalue(wanted).values
        kept[sizes < last] = False
        ties = (sizes == last).nonzero().flatten()
        kept[ties[: wanted - int((~kept).sum())]] = False
    return [part.view(weight.shape) for part, weight in zip(split(kept, counts), weights, strict=True)]


def _kept_groups(ranked: Sequence[tuple[torch.Tensor, torch.Tensor]], sparsity: float) -> list[torch.Tensor]:
    """Which groups are kept, one bool mask for each layer. A layer is the (scores, sizes) of its groups; all rank together."""
    scores, sizes = (torch.cat([pair[i] for pair in ranked]) for i in (0, 1))
    counts = [len(pair[0]) for pair in ranked]
    safe = torch.zeros_like(scores, dtype=torch.bool)
    start = 0
    for count in counts:
        safe[start + int(scores[start : start + count].argmax())] = True
        start += count
    order = torch.argsort(scores, stable=True)
    order = order[~safe[order]]
    wanted = round(sparsity * int(sizes.sum()))  # as torch.nn.utils.prune rounds
    gone = torch.cat([torch.zeros(1, dtype=torch.int64, device=sizes.device), sizes[order].cumsum(0)])
    kept = torch.ones_like(safe)
    kept[order[: int((gone - wanted).abs().argmin())]] = False
    return list(split(kept, counts))
