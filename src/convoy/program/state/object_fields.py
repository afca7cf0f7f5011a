"""MemoryWords: one machine word of each of many objects, compared with former ones in a single step.

A call of an optimized module looks at hundreds of dicts. Asking a function about each takes 50 ns and more. A memoryview with
suboffsets (PEP 3118) follows a list of pointers in CPython's own code, which takes 2 ns an object.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, cast

WORD: Final = ctypes.sizeof(ctypes.c_void_p)

OBJECT_TYPE: Final = WORD
"""Offset of an object's type in CPython (`PyObject.ob_type`)."""

DICT_VERSION: Final = 3 * WORD
"""Offset of a dict's counter of writes (PEP 509) in CPython 3.11 and 3.12 (`PyDictObject.ma_version_tag`)."""

_FORMAT: Final = ctypes.c_char_p(b"Q")


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


class MemoryWords:
    """Remembers one word behind each of many addresses. Use it only where that word is known to be there.

    Args:
        addresses: where to begin.
        path: offset, bytes, of the word; with further offsets, that word is a pointer, and the next offset counts from where it
            points.
        owner: what keeps the memory at the addresses alive, and all that the pointers lead to.
    """

    def __init__(self, addresses: Iterable[int], path: Sequence[int], owner: object) -> None:
        self._owner = owner
        found = list(addresses)
        self._addresses = (ctypes.c_void_p * len(found))(*found)
        self._shape = (len(found), *[1] * (len(path) - 1))
        self._now = _words_behind(self._addresses, path)
        self.renew()

    @staticmethod
    def of(objects: Iterable[object], *path: int) -> MemoryWords:
        """The words of Python objects, which are kept alive."""
        kept = list(objects)
        return MemoryWords(map(id, kept), path, kept)

    def renew(self) -> None:
        """Remember the words as they are now."""
        self._before = memoryview(self._now.tobytes()).cast("Q", self._shape) if self._shape[0] else self._now

    def unchanged(self) -> bool:
        """Whether all words are as they were."""
        return self._now == self._before

    def words(self) -> list[int]:
        """The words now."""
        return memoryview(self._now.tobytes()).cast("Q").tolist()


def _words_behind(addresses: ctypes.Array[ctypes.c_void_p], path: Sequence[int]) -> memoryview:
    """A view of the words that a path leads to from each address. It does not keep the array of addresses alive."""
    count, levels = len(addresses), len(path)
    sizes = ctypes.c_ssize_t * levels
    shape = sizes(count, *[1] * (levels - 1))
    buffer = _Buffer(
        ctypes.addressof(addresses), None, count * WORD, WORD, 1, levels, _FORMAT, shape, sizes(*[WORD] * levels),
        sizes(*path), None,
    )  # fmt: skip
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.POINTER(_Buffer))(("PyMemoryView_FromBuffer", ctypes.pythonapi))
    return cast("memoryview", make(ctypes.byref(buffer)))


class _Plain:
    """An object with attributes, for `_counts_writes`."""

    value: int


def has_known_layout() -> bool:
    """Whether this is a Python whose objects are known: CPython 3.11 or 3.12 on a machine of 64 bits."""
    return sys.implementation.name == "cpython" and sys.version_info[:2] in ((3, 11), (3, 12)) and WORD == 8


def can_read(offset: int) -> bool:
    """Whether this Python has, at this offset, the word that its name promises; tried out once."""
    return offset in _READABLE


def _reads_types() -> bool:
    one: Any = _Plain()
    fields = MemoryWords.of([one, {}], OBJECT_TYPE)
    same = fields.unchanged() and fields.words() == [id(_Plain), id(dict)]
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
    fields = MemoryWords.of([written, attributes], DICT_VERSION)
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
        return frozenset(offset for offset, works in tries.items() if has_known_layout() and works())
    except Exception:  # everything: this Python was built without ctypes' access to itself
        return frozenset()


_READABLE: Final = _readable()
