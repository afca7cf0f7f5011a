"""What a file of weights says about itself beside its tensors: classes, image size, data that it was trained on, pruning.

The words stand in the metadata of a .safetensors file, or in the state of a checkpoint. They may come from anybody: they are
bounded, and checked where something is built from them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from convoy.errors import InputError
from convoy.narrowing import is_dict, is_list
from convoy.untrusted import parse_json
from convoy.zoo.checksummed_file import CHECKPOINT_FORMAT, MOST_HEADER_BYTES, read_metadata, read_values
from convoy.zoo.data_identity import data_tokens
from convoy.zoo.image_size import ImageSize, sides

MOST_CLASSES: Final = 100_000
LONGEST_NAME: Final = 400
"""Characters of a class's name."""
LARGEST_SIZE: Final = 16_384
"""Height or width of an image, pixels."""

_SIZE: Final = re.compile(r"(\d{1,5})x(\d{1,5})", re.ASCII)
_TOKENS: Final = re.compile(r"[0-9a-f ]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class WeightsInfo:
    """What a weights file says about itself.

    Attributes:
        classes: name of the class that each output stands for; empty where the file does not say.
        size: of the images that the net was trained on; None where the file does not say.
        trained_on: tokens of the data sets that it was trained on (`convoy.zoo.data_identity`).
        words: everything, text by word, for people.
    """

    classes: tuple[str, ...] = ()
    size: ImageSize | None = None
    trained_on: frozenset[str] = frozenset()
    words: Mapping[str, str] = field(default_factory=dict[str, str])

    def was_trained_on(self, source: str) -> bool:
        """Whether the weights were trained on a part of this data set, as far as they know."""
        return bool(self.trained_on & data_tokens(source))

    def to_words(self) -> dict[str, str]:
        """The metadata that `read_info` reads."""
        found = dict(self.words)
        if self.classes:
            found["classes"] = json.dumps(list(self.classes))
        if self.size is not None:
            found["size"] = "x".join(map(str, sides(self.size)))
        if self.trained_on:
            found["trained_on"] = " ".join(sorted(self.trained_on))
        return found


def read_info(weights: str | Path | None) -> WeightsInfo:
    """What a weights file says about itself; nothing of `None`, `DEFAULT`, and files that cannot be read.

    Args:
        weights: as `load_model` takes them.

    Raises:
        InputError: naming `weights`: class names or a size that are malformed.
    """
    path = None if weights is None else Path(weights)
    if path is None or not path.is_file():
        return WeightsInfo()
    words = _words(path)
    try:
        return info_of(words)
    except (ValueError, TypeError) as error:
        raise InputError("weights", str(path), "a file whose metadata are whole", f"In it, {error}.") from error


def info_of(words: Mapping[str, str]) -> WeightsInfo:
    """Parse metadata that `WeightsInfo.to_words` wrote.

    Raises:
        ValueError: they are malformed.
    """
    known = dict(words)
    classes, size, tokens = (known.pop(name, "") for name in ("classes", "size", "trained_on"))
    if _TOKENS.fullmatch(tokens) is None:
        raise ValueError("trained_on is malformed")
    return WeightsInfo(_classes(classes), _size(size), frozenset(tokens.split()), known)


def _classes(text: str) -> tuple[str, ...]:
    if not text:
        return ()
    names = parse_json(text, "classes")
    if not is_list(names) or not 0 < len(names) <= MOST_CLASSES:
        raise ValueError("the class names are no list of names")
    if not all(isinstance(name, str) and 0 < len(name) <= LONGEST_NAME for name in names):
        raise ValueError(f"a class name is no text of at most {LONGEST_NAME} characters")
    if len(set(names)) != len(names):
        raise ValueError("a class name stands twice")
    return tuple(names)


def _size(text: str) -> ImageSize | None:
    if not text:
        return None
    found = _SIZE.fullmatch(text)
    if found is None or not all(0 < int(side) <= LARGEST_SIZE for side in found.groups()):
        raise ValueError("the image size is no HxW")
    height, width = map(int, found.groups())
    return height if height == width else (height, width)


def _words(path: Path) -> dict[str, str]:
    """The metadata of a file; none where it is no .safetensors file."""
    try:
        metadata = read_metadata(path, "weights")
        if metadata.get("format") != CHECKPOINT_FORMAT:
            return metadata
        state: Any = read_values(path, "weights", most_bytes=1 << 62)
        about = state.get("about", {})
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    whole = is_dict(about) and all(isinstance(word, str) for pair in about.items() for word in pair)
    return about if whole and sum(map(len, about.values())) <= MOST_HEADER_BYTES else {}
