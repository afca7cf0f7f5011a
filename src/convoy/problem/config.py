"""Knobs and EngineConfig: which implementation, with which tuning. They are stored, compared and replayed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from convoy.errors import InputError

Knob = int | str | bool

_MAX_DIGITS = 20
_CONFIG = re.compile(r"([^@\[\]]{1,100})@([0-9]{1,9})\[([^\[\]]*)\]")
_WORD = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")


@dataclass(frozen=True, slots=True)
class Knobs(Mapping[str, Knob]):
    """An immutable, hashable mapping of knob names to values, sorted by name.

    Its text form is `block_m=64,split_k=4` (booleans as `true` and `false`), and `parse` reads it back, so
    `Knobs.parse(str(knobs)) == knobs`. Text values hold only letters, digits, `_`, `.` and `-`, and do not look like numbers
    or booleans.
    """

    items_: tuple[tuple[str, Knob], ...] = ()

    @staticmethod
    def of(**values: Knob) -> Knobs:
        """Make knobs from keyword arguments."""
        for name, value in values.items():
            if isinstance(value, str) and (not value or set(value) - _WORD or _read(value) != value):
                raise InputError(name, value, "a word of letters, digits, '_', '.' and '-' that is no number")
        return Knobs(tuple(sorted(values.items())))

    @staticmethod
    def parse(text: str) -> Knobs:
        """Inverse of `str`; raises InputError on malformed text."""
        values: dict[str, Knob] = {}
        for part in filter(None, text.split(",")):
            name, equals, value = part.partition("=")
            well_formed = equals and name.isascii() and name.isidentifier() and value and not set(value) - _WORD
            if not well_formed or name in values or _is_long_number(value):
                raise InputError("knobs", text, "name=value pairs separated by commas, each name once")
            values[name] = _read(value)
        return Knobs(tuple(sorted(values.items())))

    def __getitem__(self, key: str) -> Knob:
        for name, value in self.items_:
            if name == key:
                return value
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return any(name == key for name, _ in self.items_)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.items_)

    def __len__(self) -> int:
        return len(self.items_)

    def integer(self, name: str) -> int:
        """An integer knob's value."""
        value = self[name]
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(name, value, "an integer knob")
        return value

    def __str__(self) -> str:
        return ",".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in self.items_)


def _is_long_number(text: str) -> bool:
    """Whether a text is an integer of more than 64 bits, or nearly."""
    return len(text) > _MAX_DIGITS and text.removeprefix("-").isdigit()


def _read(text: str) -> Knob:
    if text in ("true", "false"):
        return text == "true"
    body = text.removeprefix("-")
    return int(text) if body.isascii() and body.isdigit() else text


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """An engine's id and version with its knobs: identifies one implementation."""

    engine: str
    version: int = 1
    knobs: Knobs = Knobs()

    def __str__(self) -> str:
        return f"{self.engine}@{self.version}[{self.knobs}]"

    @staticmethod
    def parse(text: str) -> EngineConfig:
        """Inverse of `str`; raises InputError on malformed text."""
        match = _CONFIG.fullmatch(text)
        if match is None:
            raise InputError("config", text, "a config such as triton.implicit_gemm@1[block_m=64]")
        return EngineConfig(match[1], int(match[2]), Knobs.parse(match[3]))
