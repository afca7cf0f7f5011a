"""The knobs that engines offer for a problem, kept in the user's cache: ordering thousands of tiles takes a second for a net.

Kept are the spaces of Convoy's own engines that say so (`Engine.pure_space`), for one target in one file beside compiled code
(`convoy.engines.compilers.device_binaries`). Its key holds the time and the size of the package's engines and problems, so that
another version of Convoy, or an edited one, makes its own. A damaged file is a miss. Whether an engine supports a problem is
asked every time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

from convoy._version import __version__
from convoy.engines import base
from convoy.engines.base import Engine
from convoy.engines.compilers.device_binaries import keep, kept
from convoy.engines.manifest import MANIFEST
from convoy.errors import InputError
from convoy.problem import ConvProblem, Knob, Knobs, Problem
from convoy.target import Target
from convoy.untrusted import parse_json

MOST_BYTES: Final = 4 << 20
"""Of a file: the spaces of some twenty nets. A larger one is begun anew."""

_FORM: Final = "spaces 1"
_MOST_VALUES: Final = 4 << 20


class KnownSpaces:
    """Spaces of one target; those that are not known are made, and kept by `keep`.

    Args:
        target: the device; spaces are read and kept for GPUs alone, whose engines have large ones.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._key = (_FORM, __version__, target.digest, _stamp()) if target.device == "cuda" and _stamp() else ()
        self._known: dict[str, Any] = {}
        self._new = False
        data = kept("spaces", self._key, ".json") if self._key else None
        if data is not None:
            self._known = _read(data)

    def space(self, engine: Engine, problem: Problem) -> Sequence[Knobs]:
        """What `engine.space` says of a problem that it supports."""
        if not self._key or not _is_kept(engine, problem):
            return engine.space(problem, self._target)
        name = f"{engine.id}@{engine.version} {problem.key}"
        known = self._known.get(name)
        if known is not None:
            try:
                return _unpacked(known)
            except InputError:  # whole, and yet not what this version writes
                pass
        found = engine.space(problem, self._target)
        packed = _packed(found)
        if packed is not None:
            self._known[name], self._new = packed, True
        return found

    def keep(self) -> None:
        """Write the new spaces; a cache that cannot be written is ignored."""
        if not self._new:
            return
        data = json.dumps(self._known, separators=(",", ":")).encode()
        if len(data) <= MOST_BYTES:
            keep("spaces", self._key, data, ".json")
        else:
            self._known = {}
        self._new = False


@contextmanager
def known_spaces(target: Target) -> Generator[KnownSpaces]:
    """A target's known spaces; new ones are kept when the block ends."""
    known = KnownSpaces(target)
    yield known
    known.keep()


def _is_kept(engine: Engine, problem: Problem) -> bool:
    """Not a user's engine, whose files have no stamp here; nor pruned weights, whose key does not say where the zeros are."""
    masked = isinstance(problem, ConvProblem) and problem.weight_mask
    return engine.pure_space and engine.id in MANIFEST and not masked


def _read(data: bytes) -> dict[str, Any]:
    if len(data) > MOST_BYTES:
        return {}
    try:
        found = parse_json(data, "spaces", most_values=_MOST_VALUES)
    except InputError:
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _packed(space: Sequence[Knobs]) -> list[list[Knob]] | None:
    """The knobs' names, then each one's values; None if they have different names."""
    names = [*space[0]] if space else []
    if not names or any([name for name, _ in knobs.items_] != names for knobs in space):
        return None
    return [[*names], *([value for _, value in knobs.items_] for knobs in space)]


def _unpacked(packed: object) -> list[Knobs]:
    """Inverse of `_packed`; raises InputError for anything else."""
    rows = cast("list[Any]", packed) if isinstance(packed, list) else []
    names, *values = rows or [None]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in cast("list[object]", names)):
        raise InputError("spaces", str(rows)[:80], "the names of knobs, and values")
    words = cast("list[str]", names)
    for row in values:
        if not isinstance(row, list) or len(cast("list[Any]", row)) != len(words):
            raise InputError("spaces", str(cast("object", row))[:80], f"{len(words)} values")
        if not all(isinstance(value, int | str) for value in cast("list[object]", row)):
            raise InputError("spaces", str(cast("object", row))[:80], "integers, words and booleans")
    return [Knobs(tuple(zip(words, cast("list[Knob]", row), strict=True))) for row in values]


@cache
def _stamp() -> str:
    """The time and the size of the package's modules that decide on spaces; empty if they are no files (a zip)."""
    root = Path(base.__file__).parents[1]
    try:
        found = [each.stat() for name in ("engines", "problem") for each in _modules(root / name)]
    except OSError:
        return ""
    newest = max((each.st_mtime_ns for each in found), default=0)
    return f"{len(found)} {newest} {sum(each.st_size for each in found)}" if found else ""


def _modules(folder: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _modules(Path(entry.path))
            elif entry.name.endswith(".py"):
                yield entry
