"""FunctionState: the values that functions read besides their arguments, and whether they are still the same."""

from __future__ import annotations

import dis
import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, cast

import torch
from torch import nn

from convoy.narrowing import is_dict, is_tuple

MOST: Final = 1000
"""Values that are watched at most, and items of a collection that are compared."""

DEEPEST: Final = 4
"""How many functions, objects and collections deep values are looked for."""

_PLAIN: Final = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
_LIBRARIES: Final = frozenset({"torch", "torchvision", "timm", "numpy", "math", "builtins", "functools", "convoy"})
_MISSING: Final = object()

Read = tuple[Callable[[], object], Callable[[object], None], object, str]
"""How a value is read and written, what it was, and its name."""


class FunctionState:
    """What a loss function reads from closures, globals, partial arguments and the attributes of its object.

    A captured step holds these values as constants, but for tensors' contents. Tensors and objects count as changed when others
    are in their places; numbers, words, small arrays, and lists and dictionaries of such, when they are no longer equal.

    Args:
        functions: functions, methods, or objects that can be called.
        skip: modules that something else watches.
        objects: further objects that the functions may reach, with their names.

    Attributes:
        modules: modules that were found, without those in `skip`.
    """

    def __init__(
        self, functions: Iterable[Any], skip: Iterable[nn.Module] = (), objects: Iterable[tuple[str, Any]] = ()
    ) -> None:
        functions, objects = list(functions), list(objects)
        skipped = {id(module) for module in skip}
        self._names: set[str] = set()
        for _ in range(2):  # the first walk finds the names of all attributes that are read, the second the values
            self.modules: list[nn.Module] = []
            self._seen = set(skipped)
            self._reads: list[Read] = []
            self._collections: list[tuple[Any, Any, str]] = []
            for function in functions:
                self._walk(function, getattr(function, "__name__", type(function).__name__), 0)
            for name, value in objects:
                self._walk(value, name, 1)

    def changed(self) -> str:
        """The name of a value that has changed; empty where none has."""
        return next(self._changes(), ("", None))[0]

    def restore(self) -> None:
        """Put everything back as it was."""
        for _, write_back in list(self._changes()):
            if write_back is not None:
                write_back()

    def _changes(self) -> Iterator[tuple[str, Callable[[], None] | None]]:
        for read, write, value, name in self._reads:
            if not _same(read(), value):
                yield name, functools.partial(write, value)
        for live, kept, name in self._collections:
            if not _equal_collections(live, kept):
                yield name, functools.partial(_refill, live, kept)

    def _walk(self, value: Any, name: str, depth: int) -> None:
        if id(value) in self._seen or depth > DEEPEST or len(self._reads) > MOST:
            return
        if isinstance(value, (*_PLAIN, torch.Tensor, types.ModuleType, type)):
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            self.modules.append(value)
            self._seen |= {id(module) for module in value.modules()}
        elif isinstance(value, types.MethodType):
            self._walk(value.__func__, name, depth)
            self._walk(value.__self__, name, depth)
        elif isinstance(value, types.FunctionType):
            self._walk_function(value, depth)
        elif isinstance(value, functools.partial):
            for index, item in enumerate((value.func, *value.args, *value.keywords.values())):
                self._walk(item, f"{name}'s argument {index}", depth + 1)
        elif isinstance(value, (list, dict, set, tuple, deque)):
            self._walk_collection(value, name, depth)
        elif type(value).__module__ == "numpy" and hasattr(value, "__setitem__"):
            self._add_array(value, name)
        else:
            self._walk_object(value, name, depth)

    def _walk_function(self, function: types.FunctionType, depth: int) -> None:
        if function.__module__.partition(".")[0] in _LIBRARIES:
            return
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._add(
                functools.partial(_contents, cell), functools.partial(setattr, cell, "cell_contents"), name, depth
            )
        read_globals = set(_globals_of(code))
        self._names |= set(_attributes_of(code))
        for name in read_globals & function.__globals__.keys():
            scope = function.__globals__
            self._add(
                functools.partial(scope.get, name, _MISSING), functools.partial(scope.__setitem__, name), name, depth
            )
        for index, value in enumerate((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())):
            self._walk(value, f"{function.__name__}'s default {index}", depth + 1)

    def _walk_object(self, value: Any, name: str, depth: int) -> None:
        """An object that is called, or that a function reads attributes of: those attributes that some code here names."""
        kind = cast("type[Any]", type(value))
        if kind.__module__.partition(".")[0] in _LIBRARIES:
            return
        call = kind.__dict__.get("__call__")
        if isinstance(call, types.FunctionType):
            self._walk(call, name, depth)
        for attribute in list(self._names):
            method = getattr(kind, attribute, None)
            if isinstance(method, types.FunctionType):
                self._walk(method, attribute, depth + 1)
        held = getattr(value, "__dict__", None)
        if is_dict(held):
            for attribute in self._names & held.keys():
                read = functools.partial(held.get, attribute, _MISSING)
                write = functools.partial(held.__setitem__, attribute)
                self._add(read, write, f"{name}.{attribute}", depth)

    def _walk_collection(self, value: Any, name: str, depth: int) -> None:
        if len(value) > MOST:
            return
        if not is_tuple(value):
            self._collections.append(
                (value, type(value)(value) if type(value) in (list, dict, set) else list(value), name)
            )
        for item in list(value.values()) if is_dict(value) else list(value):
            self._walk(item, name, depth + 1)

    def _add_array(self, array: Any, name: str) -> None:
        if array.size <= MOST and array.dtype.kind != "O":
            write = functools.partial(_put_array, array, array.copy())
            self._reads.append((array.tobytes, write, array.tobytes(), name))

    def _add(self, read: Callable[[], object], write: Callable[[object], None], name: str, depth: int) -> None:
        value = read()
        if isinstance(value, (types.ModuleType, type, types.BuiltinFunctionType)):
            return
        self._reads.append((read, write, value, name))
        self._walk(value, name, depth + 1)


def _contents(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return _MISSING


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _globals_of(code: types.CodeType) -> Iterator[str]:
    for inner in _codes(code):
        yield from (one.argval for one in dis.get_instructions(inner) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"))


def _attributes_of(code: types.CodeType) -> Iterator[str]:
    for inner in _codes(code):
        yield from inner.co_names


def _same(one: object, other: object) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and one == other)


def _equal_collections(live: Any, kept: Any) -> bool:
    if len(live) != len(kept):
        return False
    if is_dict(live):
        return all(_same(live.get(key, _MISSING), value) for key, value in kept.items())
    if isinstance(live, set):
        return live == set(kept)
    return all(map(_same, live, kept))


def _refill(live: Any, kept: Any) -> None:
    live.clear()
    if isinstance(live, (list, deque)):
        live += kept
    else:
        live.update(kept)


def _put_array(array: Any, kept: Any, _: object) -> None:
    array[...] = kept
