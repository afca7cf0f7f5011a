"""Structures as JSON: how a packaged net's arguments and results nest, in containers of Python itself and of PyTorch."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final, cast

import torch
from torch.utils import _pytree as pytree

from convoy.capture.structure import ConstantLeaf, Leaf, Structure
from convoy.errors import InputError

MOST_DEPTH: Final = 20
MOST_LEAVES: Final = 10_000

_CONSTANTS: Final = (bool, int, float, str, type(None))


_DICTS: Final[dict[type, str]] = {dict: "dict", OrderedDict: "ordered_dict"}

_RETURN_TYPES: Final[dict[str, type]] = {kind.__name__: kind for kind in torch.return_types.all_return_types}
"""Named tuples of PyTorch's operators, such as `topk`'s."""


class _Tensor:
    """Stands for a tensor among nested containers."""


_TENSOR: Final = _Tensor()


def structure_data(structure: Structure, what: str) -> Any:
    """A structure as JSON types.

    A tensor is `"tensor"`; the rest are `["tuple", ...]`, `["list", ...]`, `["dict", [key, value], ...]`, the same with
    `ordered_dict`, `["return_type", name, ...]` for one of `torch.return_types`, `["none"]` and `["constant", value]`. A
    `torch.Size` is a tuple.

    Raises:
        InputError: naming `what`, for containers and constants of other types.
    """
    leaves = [_TENSOR if leaf is None else leaf for leaf in structure.leaves]
    return _data(pytree.tree_unflatten(leaves, structure.spec), what)


def structure_from_data(data: object, what: str, error: type[InputError] = InputError) -> Structure:
    """Inverse of `structure_data`.

    Raises:
        InputError: or `error`, naming `what`, for anything else.
    """
    nested = _nested(data, what, error, 0)
    leaves, spec = pytree.tree_flatten(nested)
    if len(leaves) > MOST_LEAVES:
        raise error(what, len(leaves), f"at most {MOST_LEAVES} values")
    found: list[Leaf] = [None if leaf is _TENSOR else cast("ConstantLeaf", leaf) for leaf in leaves]
    return Structure(spec, found, plain=_is_plain(nested))


def _data(value: object, what: str) -> Any:
    if isinstance(value, _Tensor):
        return "tensor"
    if isinstance(value, ConstantLeaf):
        if isinstance(value.value, torch.Size):
            return ["tuple", *(["constant", side] for side in value.value)]
        if type(value.value) not in _CONSTANTS:
            raise InputError(what, value.value, "tensors, numbers, texts and None", "A package holds nothing else.")
        return ["constant", value.value]
    if value is None:
        return ["none"]
    if type(value) in (tuple, list):
        items = cast("tuple[object, ...] | list[object]", value)
        return [type(items).__name__, *(_data(item, what) for item in items)]
    if _RETURN_TYPES.get(type(value).__name__) is type(value):
        return ["return_type", type(value).__name__, *(_data(item, what) for item in cast("tuple[object, ...]", value))]
    kind = _DICTS.get(type(value))
    if kind is not None:
        pairs = cast("dict[object, object]", value)
        if all(isinstance(key, str) for key in pairs):
            return [kind, *([key, _data(item, what)] for key, item in pairs.items())]
    todo = "Return tuples, lists or dicts with texts as keys: a package holds nothing else."
    raise InputError(what, type(value).__name__, "a tuple, list or dict", todo)


def _is_plain(nested: Any) -> bool:
    """Whether arguments are tensors by position and by name, and nothing else."""
    if not isinstance(nested, tuple):
        return False
    parts = cast("tuple[Any, ...]", nested)
    if len(parts) != 2 or not isinstance(parts[0], tuple) or not isinstance(parts[1], dict):
        return False
    items = (*cast("tuple[Any, ...]", parts[0]), *cast("dict[str, Any]", parts[1]).values())
    return all(item is _TENSOR for item in items)


def _nested(data: object, what: str, error: type[InputError], depth: int) -> Any:
    if data == "tensor":
        return _TENSOR
    parts = cast("list[Any]", data) if isinstance(data, list) and depth <= MOST_DEPTH else []
    kind, items = (parts[0], parts[1:]) if parts else (None, [])
    if kind == "none" and not items:
        return None
    if kind == "constant" and len(items) == 1 and type(items[0]) in _CONSTANTS:
        return ConstantLeaf(items[0])
    if kind in ("tuple", "list"):
        found = [_nested(item, what, error, depth + 1) for item in items]
        return tuple(found) if kind == "tuple" else found
    if kind == "return_type" and items and isinstance(items[0], str) and items[0] in _RETURN_TYPES:
        made = [_nested(item, what, error, depth + 1) for item in items[1:]]
        if len(made) == cast("Any", _RETURN_TYPES[items[0]]).n_sequence_fields:
            return _RETURN_TYPES[items[0]](made)
    if kind in _DICTS.values() and all(map(_is_pair, items)):
        named: dict[str, Any] = {pair[0]: _nested(pair[1], what, error, depth + 1) for pair in items}
        if len(named) == len(items):
            return OrderedDict(named) if kind == "ordered_dict" else named
    raise error(what, cast("object", data), "a structure of tensors")


def _is_pair(item: object) -> bool:
    pair = cast("list[object]", item) if isinstance(item, list) else []
    return len(pair) == 2 and isinstance(pair[0], str)
