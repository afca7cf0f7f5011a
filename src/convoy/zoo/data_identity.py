"""Recognising a data set again: weights remember what they were trained on, so that their accuracy is not taken on it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from convoy.zoo.datasets import own_splits
from convoy.zoo.images import image_files


def data_tokens(source: str) -> frozenset[str]:
    """Two tokens of a source without splits of its own: of its place, and of the names of its files; else none.

    A folder that gets more images keeps the first, one that is moved or copied keeps the second. Neither tells the path.

    Args:
        source: as `load_dataset` takes it.
    """
    path = Path(source)
    if not path.exists() or own_splits(source):
        return frozenset()
    if path.is_dir():
        names = [file.relative_to(path).as_posix() for file in image_files(path)]
    else:
        names = [path.name, str(path.stat().st_size)]
    return frozenset((_token(os.path.realpath(path)), _token("\0".join(names))))


def _token(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
