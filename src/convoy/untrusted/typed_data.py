"""Dataclasses from JSON of untrusted origin: every field must have the type that the class declares."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from convoy.errors import InputError

_T = TypeVar("_T")


def read_dataclass(kind: type[_T], data: object, where: str) -> _T:
    """A value of a dataclass from JSON's types, as `dataclasses.asdict` gives them.

    Fields may be numbers, texts, booleans, None, dataclasses, tuples of one type and dictionaries by text. A field with a default
    may be missing; a field that the class does not have is an error.

    Args:
        kind: the dataclass.
        data: the JSON value.
        where: its name in errors.

    Raises:
        InputError: naming the field.
    """
    if not isinstance(data, dict):
        raise InputError(where, data, "an object of JSON")
    given = cast("dict[str, object]", data)
    hints = _hints(kind)
    unknown = given.keys() - hints.keys()
    if unknown:
        raise InputError(f"{where}.{min(unknown)}", min(unknown), "no such field")
    read = {name: _value(hints[name], value, f"{where}.{name}") for name, value in given.items()}
    for field in dataclasses.fields(cast("Any", kind)):
        without_default = field.default is field.default_factory is dataclasses.MISSING
        if without_default and field.name not in read:
            raise InputError(f"{where}.{field.name}", None, "a value")
    return kind(**read)


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _value(hint: Any, value: object, where: str) -> Any:
    if hint is Any:
        return value
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        if value is None and type(None) in inner:
            return None
        (hint,) = (one for one in inner if one is not type(None))
        return _value(hint, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise InputError(where, value, "a list")
        items = cast("list[object]", value)
        return tuple([_value(inner[0], item, where) for item in items])
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            raise InputError(where, value, "an object of JSON")
        return {name: _value(inner[1], item, where) for name, item in cast("dict[str, object]", value).items()}
    if dataclasses.is_dataclass(hint):
        return read_dataclass(cast("type[Any]", hint), value, where)
    return _plain(hint, value, where)


def _plain(kind: type[Any], value: object, where: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise InputError(where, value, f"a value of type {kind.__name__}")
    return value
