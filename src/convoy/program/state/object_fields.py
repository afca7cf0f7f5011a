"""ObjectFields: one machine word of each of many Python objects, compared with former ones in a single step.

A call of an optimized module looks at hundreds of dicts. Asking a function about each takes 50 ns and more. A memoryview with
suboffsets (PEP 3118) follows a list of pointers in CPython's own code, which takes 2 ns an object.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

WORD: Final = ctypes.sizeof(ctypes.c_void_p)

OBJECT_TYPE: Final = WORD
"""Offset of an object's type in CPython (`PyObject.ob_type`)."""

DICT_VERSION: Final = 3 * WORD
"""Offset of a dict's counter of writes (PEP 509) in CPython 3.11 and 3.12 (`PyDictObject.ma_version_tag`)."""

_FORMAT: Final = ctypes.c_char_p(b"Q")
_OneSize: Final = ctypes.c_ssize_t * 1


class _Buffer(ctypes.Structure):
    """`Py_buffer` of Python's stable ABI."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    )


class ObjectFields:
    """Remembers the word at one offset of each object. Use it only where `can_read` allows that offset.

    Args:
        objects: the objects, which are kept alive: their addresses are followed.
        offset: bytes from an object's address.
    """

    def __init__(self, objects: Sequence[object], offset: int) -> None:
        self._objects = list(objects)
        self._addresses = (ctypes.c_void_p * len(self._objects))(*map(id, self._objects))
        self._now = _words_behind(self._addresses, offset)
        self.renew()

    def renew(self) -> None:
        """Remember the words as they are now."""
        self._before = memoryview(self._now.tobytes()).cast("Q")

    def unchanged(self) -> bool:
        """Whether all words are as they were."""
        return self._now == self._before


def _words_behind(addresses: ctypes.Array[ctypes.c_void_p], offset: int) -> memoryview:
    """A view of the words at `offset` behind each address. It does not keep the array of addresses alive."""
    count = len(addresses)
    buffer = _Buffer(
        ctypes.addressof(addresses), None, count * WORD, WORD, 1, 1, _FORMAT, _OneSize(count), _OneSize(WORD),
        _OneSize(offset), None,
    )  # fmt: skip
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.POINTER(_Buffer))(("PyMemoryView_FromBuffer", ctypes.pythonapi))
    return cast("memoryview", make(ctypes.byref(buffer)))


class _Plain:
    """An object with attributes, for `_counts_writes`."""

    value: int


def can_read(offset: int) -> bool:
    """Whether this Python has, at this offset, the word that its name promises; tried out once."""
    return offset in _READABLE


def _has_known_layout() -> bool:
    return sys.implementation.name == "cpython" and sys.version_info[:2] in ((3, 11), (3, 12)) and WORD == 8


def _reads_types() -> bool:
    one: Any = _Plain()
    fields = ObjectFields([one, {}], OBJECT_TYPE)
    same = fields.unchanged() and list(fields._before) == [id(_Plain), id(dict)]
    one.__class__ = type("_Other", (_Plain,), {})
    return same and not fields.unchanged()


def _counts_writes() -> bool:
    """Whether each kind of write to a dict changes its counter, and reading does not."""
    written: dict[str, int] = {"a": 1}
    one = _Plain()
    attributes = vars(one)
    writes: list[Callable[[], object]] = [
        lambda: written.update(a=2),
        lambda: written.__setitem__("b", 3),
        lambda: written.pop("b"),
        lambda: written.setdefault("c", 4),
        written.popitem,
        written.clear,
        # Python writes attributes in other ways after some runs of the same code.
        *(lambda number=number: setattr(one, "value", number) for number in range(1000, 1064)),
        lambda: delattr(one, "value"),
    ]
    fields = ObjectFields([written, attributes], DICT_VERSION)
    for write in writes:
        if not fields.unchanged():
            return False
        write()
        if fields.unchanged():
            return False
        fields.renew()
    return written.get("a") is None and fields.unchanged()


def _readable() -> frozenset[int]:
    tries = {OBJECT_TYPE: _reads_types, DICT_VERSION: _counts_writes}
    try:
        return frozenset(offset for offset, works in tries.items() if _has_known_layout() and works())
    except Exception:  # everything: this Python was built without ctypes' access to itself
        return frozenset()


_READABLE: Final = _readable()
