"""The example inputs of a .pt2 file, which torch stores as a pickle: read without unpickling.

Of pickle's instructions this reader knows those that build tuples, lists, dictionaries, numbers, text and tensors of raw
bytes. It imports nothing by name and calls nothing of the file's choice: a few names stand for fixed constructors here.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable
from typing import Any, Final

import torch

from convoy.narrowing import is_dict, is_list, is_tuple
from convoy.zoo.pt2.archive import Archive
from convoy.zoo.pt2.refusal import RefusedError, shown

MOST_INSTRUCTIONS: Final = 100_000
MOST_VALUES: Final = 10_000
"""Arguments of a program, those inside lists and dictionaries counted."""

_MARK: Final = object()
_DTYPES: Final = {
    f"torch {name}Storage": dtype
    for name, dtype in {
        "Float": torch.float32,
        "Double": torch.float64,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
        "ComplexFloat": torch.complex64,
        "ComplexDouble": torch.complex128,
    }.items()
}
_TENSOR: Final = "torch._utils _rebuild_tensor_v2"
_PARAMETER: Final = "torch._utils _rebuild_parameter"
_WITH_ATTRIBUTES: Final = "torch._tensor _rebuild_from_type_v2"
"""How a tensor with attributes is written, such as those by which torch.export marks dynamic sizes."""
_SETS: Final = ("__builtin__ set", "builtins set", "__builtin__ frozenset", "builtins frozenset")
_ORDERED: Final = "collections OrderedDict"
_DEVICE: Final = "torch device"


class _Name(str):
    """A name that the pickle would import."""

    __slots__ = ()


class _Storage:
    """Raw bytes with a type."""

    def __init__(self, dtype: torch.dtype, data: bytes, device: str) -> None:
        self.dtype, self.data, self.device = dtype, data, device


def read_sample_inputs(data: bytes) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments and keyword arguments that a program was exported with; None where the file has none.

    Raises:
        RefusedError: it holds anything but plain values and tensors.
    """
    if not data:
        return None
    archive = Archive(data)
    if archive.get("byteorder", b"little") != b"little":
        raise RefusedError("Its example inputs were written on a big-endian machine.", is_code=False)
    found = _Reader(archive).read()
    if not (is_tuple(found) and len(found) == 2 and is_tuple(found[0]) and is_dict(found[1])):
        raise RefusedError("Its example inputs are no arguments.", is_code=False)
    _count([found])
    return found[0], found[1]


def _count(level: list[Any]) -> None:
    """Refuse values that hold one another, or the same one so often that walking over them has no end."""
    total = 0
    for _ in range(32):
        level = [value for item in level for value in (item.values() if is_dict(item) else item)]
        total += len(level)
        level = [item for item in level if isinstance(item, (tuple, list, dict))]
        if not level:
            return
        if total > MOST_VALUES:
            break
    raise RefusedError("Its example inputs have too many values, or too deep ones.", is_code=False)


class _Reader:
    """A stack machine for the instructions that are allowed."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, _Storage] = {}

    def read(self) -> Any:
        if "data.pkl" not in self.archive:
            raise RefusedError("Its example inputs lack data.pkl.", is_code=False)
        try:
            for count, (code, argument, _) in enumerate(pickletools.genops(self.archive["data.pkl"])):
                if count > MOST_INSTRUCTIONS:
                    raise RefusedError("Its example inputs are too many.", is_code=False)
                if code.name == "STOP":
                    break
                self.step(code.name, argument)
            (found,) = self.stack
        except RefusedError:
            raise
        except Exception as error:  # everything: damaged instructions find an empty stack, a wrong type, bad bytes
            raise RefusedError(f"Its example inputs are damaged: {shown(str(error))}.", is_code=False) from error
        return found

    def step(self, name: str, argument: Any) -> None:
        if name in _PLAIN:
            self.stack.append(_PLAIN[name])
        elif name in _VALUES:
            if isinstance(argument, int) and abs(argument) >= 2**63:
                raise RefusedError("Its example inputs have an integer beyond 64 bits.", is_code=False)
            self.stack.append(argument)
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self.memo[len(self.memo) if argument is None else argument] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[argument])
        elif name == "GLOBAL":
            self.stack.append(_Name(argument))
        elif name in _ACTIONS:
            _ACTIONS[name](self)
        elif name not in ("PROTO", "FRAME"):
            raise RefusedError(f"Its example inputs are a pickle with the instruction {name}.")

    def tuple_of(self, count: int) -> None:
        items = tuple(self.stack[len(self.stack) - count :])
        if len(items) != count:
            raise ValueError("a tuple of values that are not there")
        self.stack[len(self.stack) - count :] = [items]

    def marked(self) -> list[Any]:
        at = max(i for i, item in enumerate(self.stack) if item is _MARK)
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not is_list(target):
            raise ValueError("a value appended to something that is no list")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not is_dict(target) or len(items) % 2 or not all(isinstance(k, (str, int)) for k in items[::2]):
            raise ValueError("a key that is no text or number")
        target.update(zip(items[::2], items[1::2], strict=True))

    def storage(self) -> None:
        kind, dtype, key, device, _ = self.stack.pop()
        if kind != "storage" or str(dtype) not in _DTYPES or not isinstance(dtype, _Name):
            raise RefusedError(f"Its example inputs have a storage of the type {shown(dtype)}.")
        if key not in self.storages:
            self.storages[key] = _Storage(_DTYPES[str(dtype)], self.archive[f"data/{key}"], device)
        self.stack.append(self.storages[key])

    def call(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, _Name) or not is_tuple(arguments):
            raise RefusedError(f"Its example inputs call {shown(name)}.")
        if name == _ORDERED and not arguments:
            self.stack.append({})
        elif name == _TENSOR:
            self.stack.append(_tensor(*arguments[:4]))
        elif name == _WITH_ATTRIBUTES and arguments[0] in (_TENSOR, _PARAMETER):
            self.stack += arguments[0], arguments[2]  # the attributes are left out
            self.call()
        elif name == _PARAMETER:
            self.stack.append(arguments[0])
        elif name in _SETS and len(arguments) == 1 and is_list(arguments[0]):
            self.stack.append(tuple(arguments[0]))
        elif name == _DEVICE and arguments in (("cpu",), ("cuda",), *(("cuda", i) for i in range(16))):
            self.stack.append(torch.device(*arguments))
        else:
            raise RefusedError(f"Its example inputs call {shown(str(name))}.")


def _tensor(storage: Any, offset: Any, sizes: Any, strides: Any) -> torch.Tensor:
    numbers = (offset, *sizes, *strides)
    if not isinstance(storage, _Storage) or any(type(n) is not int or not 0 <= n < 2**40 for n in numbers):
        raise ValueError("a tensor with odd sizes")
    if len(sizes) != len(strides) or len(sizes) > 64 or math.prod(sizes) >= 2**40:
        raise ValueError("a tensor with odd sizes")
    if 0 in sizes:
        return torch.empty(sizes, dtype=storage.dtype)
    base = torch.frombuffer(bytearray(storage.data), dtype=storage.dtype)
    return base.as_strided(sizes, strides, offset)  # which refuses what does not lie inside


_PLAIN: Final[dict[str, Any]] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "MARK": _MARK}
_VALUES: Final = ["BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"]
_ACTIONS: Final[dict[str, Callable[[_Reader], None]]] = {
    "EMPTY_DICT": lambda r: r.stack.append({}),
    "EMPTY_LIST": lambda r: r.stack.append([]),
    "TUPLE1": lambda r: r.tuple_of(1),
    "TUPLE2": lambda r: r.tuple_of(2),
    "TUPLE3": lambda r: r.tuple_of(3),
    "TUPLE": lambda r: r.stack.append(tuple(r.marked())),
    "APPEND": lambda r: r.append([r.stack.pop()]),
    "APPENDS": lambda r: r.append(r.marked()),
    "SETITEM": lambda r: r.set_items([*map(r.stack.pop, (-2, -1))]),
    "SETITEMS": lambda r: r.set_items(r.marked()),
    "BINPERSID": lambda r: r.storage(),
    "REDUCE": lambda r: r.call(),
}
