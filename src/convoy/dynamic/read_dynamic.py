"""Reads `optimize(dynamic=...)`: ranges by dimension, or `dynamic_shapes` as torch.export takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import torch

from convoy.dynamic.dims import DynamicDims
from convoy.errors import InputError
from convoy.plan import SizeRange
from convoy.program.calls import tensors_of

MOST_SIZE: Final = 65_536
"""Largest size of a range."""

MOST_IMAGES: Final = 4096
"""Largest batch: the cheapest split of it is found in some 50 ms."""

_FORMS: Final = "a range by dimension, such as {0: (1, 64)}, or `dynamic_shapes` as torch.export takes them"
_RANGE: Final = "a range of sizes, such as (1, 64) or torch.export.Dim('batch', min=1, max=64)"

# With these types, a checker narrows a value to Any after `isinstance`, not to a container of unknown items.
_MAPPING: Final = cast("type[Any]", Mapping)
_SEQUENCES: Final = cast("tuple[type[Any], ...]", (tuple, list))
_DICT: Final[type[Any]] = dict


def read_dynamic(
    dynamic: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> DynamicDims:
    """Read `optimize(dynamic=...)`.

    Args:
        dynamic: `{dimension: range}`, for every input whose size there is that of the first input that has the dimension; or
            `dynamic_shapes` as torch.export takes them: by position or by the names of the parameters, and in each entry by
            dimension. A range is (least, most), or a `torch.export.Dim` with both.
        forward: the model's forward, for the names of its parameters.
        args: the example's positional arguments.
        kwargs: the example's keyword arguments.

    Raises:
        InputError: naming the entry.
    """
    shapes = tuple(tuple(tensor.shape) for tensor in tensors_of((args, kwargs)))
    if isinstance(dynamic, _MAPPING) and dynamic and all(map(_is_integer, dynamic)):
        found = [_by_dimension(dim, given, shapes) for dim, given in dynamic.items()]
    else:
        found = _by_input(dynamic, forward, args, kwargs, shapes)
    if not found:
        raise InputError("dynamic", dynamic, "at least one range", f"Give {_FORMS}.")
    return DynamicDims(tuple(sorted(found, key=lambda one: not one.is_batch)), shapes)


def _by_dimension(dim: int, given: object, shapes: Sequence[tuple[int, ...]]) -> SizeRange:
    having = [index for index, shape in enumerate(shapes) if 0 <= dim < len(shape)]
    if not having:
        raise InputError("dynamic", dim, "a dimension of an input, counted from 0")
    size = shapes[having[0]][dim]
    places = tuple((index, dim) for index in having if shapes[index][dim] == size)
    return _size_range(f"dynamic[{dim}]", given, size, places)


def _by_input(
    dynamic: Any,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shapes: Sequence[tuple[int, ...]],
) -> list[SizeRange]:
    """Ranges from torch.export's form. Entries of one Dim, and all of dimension 0, are one range."""
    whole: tuple[Any, ...] = (*args, *kwargs.values())
    if isinstance(dynamic, _MAPPING) and dynamic and all(isinstance(name, str) for name in dynamic):
        names = (*_names_by_position(forward, len(args)), *kwargs)
        unknown = [name for name in dynamic if name not in names]
        if unknown:
            raise InputError("dynamic", unknown[0], "names of the inputs: " + ", ".join(filter(None, names)))
        entries: list[Any] = [dynamic.get(name) for name in names]
    elif isinstance(dynamic, _SEQUENCES) and len(dynamic) == len(whole):
        entries = list(dynamic)
    else:
        raise InputError("dynamic", dynamic, _FORMS)
    groups: dict[object, SizeRange] = {}
    given = (entry for pair in zip(entries, whole, strict=True) for entry in _entries(*pair))
    for index, (entry, shape) in enumerate(zip(given, shapes, strict=True)):
        for dim, value in _by_dim(entry, shape):
            name = f"dynamic: dimension {dim} of input {index}"
            one = _size_range(name, value, shape[dim], ((index, dim),))
            key = "batch" if dim == 0 else getattr(value, "__name__", (index, dim))
            known = groups.get(key)
            if known is not None and (known.least, known.most, known.example) != (one.least, one.most, one.example):
                raise InputError(name, (one.least, one.most, one.example), f"least, most and size as {known.name}")
            places = one.places if known is None else (*known.places, *one.places)
            groups[key] = SizeRange((known or one).name, one.least, one.most, one.example, places)
    return list(groups.values())


def _names_by_position(forward: Callable[..., Any], count: int) -> list[str]:
    try:
        names = list(inspect.signature(forward).parameters)
    except (TypeError, ValueError):  # some functions in C have no signature
        names = []
    return (names + [""] * count)[:count]


def _entries(entry: Any, value: Any) -> Iterator[Any]:
    """The entry of each tensor in an argument, nested as the argument is; None for all where the whole has None."""
    if isinstance(value, torch.Tensor):
        yield entry
    elif isinstance(value, (*_SEQUENCES, _DICT)):
        items: Any = value.items() if isinstance(value, _DICT) else enumerate(value)
        for key, item in items:
            try:
                yield from _entries(None if entry is None else entry[key], item)
            except (KeyError, IndexError, TypeError) as error:
                raise InputError("dynamic", entry, f"entries nested as the argument, with one for {key!r}") from error


def _by_dim(entry: Any, shape: tuple[int, ...]) -> Iterator[tuple[int, Any]]:
    """The ranges of one tensor by dimension, those that are None or the size itself left out."""
    if entry is None:
        return
    if isinstance(entry, _MAPPING):
        pairs: Any = entry.items()
    elif isinstance(entry, _SEQUENCES) and len(entry) == len(shape):
        pairs = enumerate(entry)
    else:
        raise InputError(
            "dynamic", entry, f"ranges by dimension, for an input of shape {list(shape)}", f"Give {_FORMS}."
        )
    for dim, value in pairs:
        if not _is_integer(dim) or not 0 <= dim < len(shape):
            raise InputError("dynamic", dim, f"a dimension of an input of shape {list(shape)}, counted from 0")
        if value is not None and not (_is_integer(value) and value == shape[dim]):
            yield dim, value


def _size_range(name: str, given: Any, size: int, places: tuple[tuple[int, int], ...]) -> SizeRange:
    ends: Any = (getattr(given, "min", None), getattr(given, "max", None))
    if isinstance(given, _SEQUENCES):
        ends = tuple(given)
    if len(ends) != 2 or not all(map(_is_integer, ends)):
        raise InputError(name, given, _RANGE)
    least, most = int(ends[0]), int(ends[1])
    largest = MOST_IMAGES if places[0][1] == 0 else MOST_SIZE
    if not 1 <= least <= most <= largest:
        raise InputError(name, given, f"sizes of at least 1 and at most {largest}, the smaller one first")
    if not least <= size <= most:
        raise InputError(name, given, f"a range with the example's size, {size}")
    return SizeRange(name, least, most, size, places)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
