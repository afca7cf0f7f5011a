"""Former names of settings: taken for one release, with a warning at the user's line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Final, TypeVar

from convoy.errors import InputError
from convoy.user_warning import warn_user

FORMER_SETTINGS: Final[Mapping[str, str]] = {"tune_s": "time_s"}
"""Former name → name. `time_s` bounds the whole call; `tune_s` bounded its measurements."""

_Settings = TypeVar("_Settings", bound=type)


def takes_former_names(kind: _Settings) -> _Settings:
    """Let a class of settings be made with, and read by, the former names of its fields."""
    make: Callable[..., None] = kind.__init__

    @wraps(make)
    def init(self: object, *args: Any, **fields: Any) -> None:
        for former, name in FORMER_SETTINGS.items():
            if former in fields:
                if name in fields:
                    raise InputError(former, fields[former], f"{name} alone: {former} is its former name")
                _warn(former, name)
                fields[name] = fields.pop(former)
        make(self, *args, **fields)

    kind.__init__ = init
    for former, name in FORMER_SETTINGS.items():
        setattr(kind, former, property(_reader(former, name), doc=f"Former name of `{name}`."))
    return kind


def _reader(former: str, name: str) -> Callable[[object], object]:
    def read(self: object) -> object:
        _warn(former, name)
        value: object = getattr(self, name)
        return value

    return read


def _warn(former: str, name: str) -> None:
    warn_user(f"Settings.{former} is now {name}, the time of the whole call; the next release will not accept {former}")
