"""Warnings that point at the user's line: the innermost frame outside Convoy and torch."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Final

_OWN: Final = str(Path(__file__).parent)
_BETWEEN: Final = frozenset({"torch", "contextlib", "functools"})


def warn_user(reason: str) -> None:
    """Warn with `convoy: REASON`, at the user's line that led here.

    Args:
        reason: what happened, and what the user can do.
    """
    warnings.warn(f"convoy: {reason}", UserWarning, stacklevel=_level_of_user())


def _level_of_user() -> int:
    """The `stacklevel` for `warn_user`; that of the outermost frame if all frames are Convoy's or torch's."""
    level = 1
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _is_inside(frame):
            return level
        frame = frame.f_back
        level += 1
    return level - 1


def _is_inside(frame: FrameType) -> bool:
    if "__name__" not in frame.f_globals:  # code that AOTAutograd generates
        return True
    package = str(frame.f_globals["__name__"]).partition(".")[0]
    if package in _BETWEEN or frame.f_code.co_filename.startswith(_OWN):
        return True
    # Code that torch and Python generate, such as the forward of a torch.fx graph, is in none of the user's files.
    return frame.f_code.co_filename.startswith("<") and frame.f_code.co_filename not in ("<stdin>", "<string>")
