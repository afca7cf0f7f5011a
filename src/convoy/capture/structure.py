"""Structure: how a call's arguments and results nest, so that a graph of flat tensors can stand in for the module.

With `structure_data`, the one module that uses `torch.utils._pytree`: torch 2.11 to 2.13 have no public name for it, and
the specs that `torch.export` gives are its classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from convoy.errors import InputError


@dataclass(frozen=True, slots=True)
class ConstantLeaf:
    """An argument or result that is no tensor: its value at capture is part of the graph."""

    value: Any


Leaf = ConstantLeaf | None
"""None stands for a tensor."""


class Structure:
    """The nesting of arguments or results, and which leaves are tensors.

    Args:
        spec: the exporter's spec.
        leaves: in the spec's order: None for a tensor, `ConstantLeaf` for anything else.
        plain: whether this is a call with tensors as arguments and nothing else, which needs no search.
    """

    def __init__(self, spec: pytree.TreeSpec, leaves: Sequence[Leaf], *, plain: bool = False) -> None:
        self._spec = spec
        self._leaves = tuple(leaves)
        self._plain = plain
        positions: dict[str, int] = (
            pytree.tree_unflatten(range(len(self._leaves)), spec)[1] if plain else dict[str, int]()
        )
        self._names = sorted(positions, key=positions.__getitem__)
        self._count = len(self._leaves) - len(self._names)
        self._single = spec.is_leaf() and list(leaves) == [None]
        self._tensors_alone = plain and not self._names and all(leaf is None for leaf in leaves)

    @classmethod
    def of_results(cls, spec: pytree.TreeSpec, leaves: Sequence[Leaf]) -> Structure:
        """The nesting of results. A `torch.Size` of numbers becomes one constant: PyTorch would nest it as a plain tuple."""
        rest, kept, leaf = iter(leaves), list[Leaf](), pytree.tree_structure(0)

        def with_sizes(nested: pytree.TreeSpec) -> pytree.TreeSpec:
            if nested.is_leaf():
                kept.append(next(rest))
                return leaf
            if nested.type is torch.Size:
                sides = [next(rest) for _ in nested.children()]
                if None not in sides:
                    kept.append(ConstantLeaf(torch.Size(side.value for side in sides if side is not None)))
                    return leaf
                kept.extend(sides)
                return nested
            return pytree.TreeSpec(nested.type, nested.context, [with_sizes(child) for child in nested.children()])

        return cls(with_sizes(spec), kept)

    @property
    def spec(self) -> pytree.TreeSpec:
        """The exporter's spec."""
        return self._spec

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The leaves in the spec's order."""
        return self._leaves

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call, in the graph's order.

        Raises:
            InputError: another structure than at capture, or another value for something that is no tensor.
        """
        if self._tensors_alone and not kwargs and len(args) == self._count and all(map(_is_tensor, args)):
            return list(args)
        if self._plain and len(args) == self._count and len(kwargs) == len(self._names):
            found: list[Any] = [*args, *self._values(kwargs)] if kwargs else list(args)
        else:
            try:
                found = self._spec.flatten_up_to((tuple(args), kwargs))
            except (ValueError, TypeError, AssertionError) as error:
                raise InputError(
                    "args, kwargs", str(error), "the structure that the model was captured with"
                ) from error
        return [tensor for value, leaf in zip(found, self._leaves, strict=True) for tensor in _tensor(value, leaf)]

    def _values(self, kwargs: dict[str, Any]) -> list[Any]:
        """The values of a plain call's keyword arguments.

        Raises:
            InputError: other names than at capture.
        """
        try:
            return [kwargs[name] for name in self._names]
        except KeyError as error:
            raise InputError("kwargs", list(kwargs), f"the names {self._names}, which were captured") from error

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Nest tensors in the graph's order as the model nests its results."""
        if self._single:
            return tensors[0]
        rest = iter(tensors)
        leaves = [next(rest) if leaf is None else leaf.value for leaf in self._leaves]
        return pytree.tree_unflatten(leaves, self._spec)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _tensor(value: Any, leaf: Leaf) -> list[torch.Tensor]:
    if leaf is None:
        if not isinstance(value, torch.Tensor):
            raise InputError("args, kwargs", value, "a tensor here, as when the model was captured")
        return [value]
    same = value is leaf.value or (type(value) is type(leaf.value) and value == leaf.value)
    if not same:
        raise InputError("args, kwargs", value, f"{leaf.value!r}, which the model was captured with")
    return []
