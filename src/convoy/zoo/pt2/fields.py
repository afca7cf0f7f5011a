"""JSON of a .pt2 file, checked against torch's own export schema: known fields of the right type, and no others."""

from __future__ import annotations

import dataclasses
import enum
import math
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from convoy.errors import InputError
from convoy.untrusted import parse_json
from convoy.zoo.pt2.refusal import RefusedError, shown

MOST_BYTES: Final = 256 << 20
"""Of one JSON text; a net of 1,000 layers has 5 MiB."""
MOST_VALUES: Final = 20_000_000
"""Of one JSON text."""
DEEPEST: Final = 64
"""Nested values; graphs inside a graph add about ten each."""
NOT_FINITE: Final = ("Infinity", "-Infinity", "NaN")
"""How the format writes such numbers: as text."""


def read_json(data: bytes, name: str) -> Any:
    """A JSON value; raises RefusedError where the text is too long or too deep, or is not JSON."""
    if len(data) > MOST_BYTES:
        raise RefusedError(f"Its {shown(name)} has {len(data)} bytes, more than {MOST_BYTES}.", is_code=False)
    try:
        return parse_json(data, name, most_depth=DEEPEST, most_values=MOST_VALUES)
    except InputError as error:
        raise RefusedError(f"It is damaged: {error}", is_code=False) from error


@cache
def _hints(kind: type) -> dict[str, Any]:
    from torch._export.serde import schema

    return typing.get_type_hints(kind, globalns=dict(vars(schema)))


Rule = Callable[[Any, str], Any]
"""Of one class of the schema: takes a checked JSON object and its path; gives the object that stands in its place."""


def checked(kind: Any, value: Any, where: str, rules: Mapping[str, Rule], depth: int = 0) -> Any:
    """A JSON value, checked against a type of torch's schema; a new value, in which the rules may have replaced objects.

    Args:
        kind: a data class, union, enumeration, container or plain type of the schema.
        value: of the field in the JSON.
        where: path of the field, for messages.
        rules: by the class's name; called after the object's own fields were checked.
        depth: how deep it lies.

    Raises:
        RefusedError: a field that the schema does not have, that is missing or of another type, or what a rule refuses.
    """
    if depth > DEEPEST:
        raise RefusedError(f"Its {where} is nested more than {DEEPEST} deep.", is_code=False)
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        return checked(typing.get_args(kind)[0], value, where, rules, depth)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        inner = next(k for k in typing.get_args(kind) if k is not type(None))
        return checked(inner, value, where, rules, depth)
    if origin is list:
        (inner,) = typing.get_args(kind)
        return [checked(inner, item, where, rules, depth + 1) for item in _typed(value, list, where)]
    if origin is dict:
        inner = typing.get_args(kind)[1]
        items = _typed(value, dict, where).items()
        return {key: checked(inner, item, f"{where}.{shown(key)}", rules, depth + 1) for key, item in items}
    if dataclasses.is_dataclass(kind):
        found = _object(typing.cast("type", kind), _typed(value, dict, where), where, rules, depth)
        rule = rules.get(typing.cast("type", kind).__name__)
        return found if rule is None else rule(found, where)
    return _plain(kind, value, where)


def _object(kind: type, value: dict[str, Any], where: str, rules: Mapping[str, Rule], depth: int) -> dict[str, Any]:
    required, known, is_union = _fields(kind)
    for name in value:
        if name not in known:
            raise RefusedError(f"Its {where} has a field {shown(name)}, which this PyTorch does not know.")
    if is_union and len(value) != 1:
        raise RefusedError(f"Its {where} has {len(value)} values where one is meant.", is_code=False)
    lacking = () if is_union else required - set(value)
    if lacking:
        raise RefusedError(f"Its {where} lacks {min(lacking)}.", is_code=False)
    if is_union and next(iter(value.values())) is None:
        raise RefusedError(f"Its {where} has no value.", is_code=False)
    hints = _hints(kind)
    return {name: checked(hints[name], item, f"{where}.{name}", rules, depth + 1) for name, item in value.items()}


@cache
def _fields(kind: type) -> tuple[frozenset[str], frozenset[str], bool]:
    """Required and known fields, and whether it is a union."""
    fields = dataclasses.fields(kind)
    none = dataclasses.MISSING
    required = frozenset(f.name for f in fields if f.default is none and f.default_factory is none)
    return required, frozenset(f.name for f in fields), hasattr(kind, "create")


def _plain(kind: Any, value: Any, where: str) -> Any:
    if isinstance(kind, enum.EnumType) and issubclass(kind, enum.IntEnum):
        if type(value) is not int or value not in list(kind):
            raise RefusedError(f"Its {where} is {shown(value)}, which is none of {kind.__name__}.", is_code=False)
        return value
    if kind is float:
        return value if isinstance(value, str) and value in NOT_FINITE else _typed(value, (int, float), where)
    return _typed(value, kind, where)


def _typed(value: Any, kind: type | tuple[type, ...], where: str) -> Any:
    wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
    if wrong or (type(value) is int and abs(value) >= 2**63) or (type(value) is float and not math.isfinite(value)):
        raise RefusedError(f"Its {where} is {shown(value)}, which is of another type.", is_code=False)
    return value
