"""RefusedError: a part of a .pt2 file that is not on the list of allowed parts."""

from __future__ import annotations


class RefusedError(Exception):
    """The part that was refused, as a sentence; `load.py` turns it into an InputError that names the file.

    Args:
        found: the part that was refused ("It holds data/constants/opaque_obj_0, a pickled object.").
        is_code: whether the file may be sound and its owner may load it by trusting it; else it is damaged.
    """

    def __init__(self, found: str, *, is_code: bool = True) -> None:
        self.found, self.is_code = found, is_code
        super().__init__(found)


def shown(text: object, most: int = 80) -> str:
    """A value from a file for a message: quoted, without control characters, and short."""
    words = ascii(text)
    return words if len(words) <= most else words[: most - 3] + "..."
