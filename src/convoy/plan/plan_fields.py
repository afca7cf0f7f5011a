"""Takes the fields of a plan's JSON object one by one, each checked; every error names the field."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, cast

from convoy.errors import PlanError

MAX_ITEMS: Final = 100_000
"""Most items of a list: a training step has as many inputs as parameters."""

RETUNE: Final = "Tune the model anew: `convoy optimize`."


class PlanFields:
    """Takes fields out of a JSON object, each checked; unknown fields are refused."""

    def __init__(self, where: str, data: object) -> None:
        if not isinstance(data, dict):
            raise PlanError(where, data, "a JSON object", RETUNE)
        self._where = where
        self._left = dict(cast("dict[str, Any]", data))

    def _take(self, name: str, right: Callable[[Any], bool], expected: str) -> Any:
        if name not in self._left:
            raise PlanError(f"{self._where}.{name}", None, expected, RETUNE)
        value = self._left.pop(name)
        if not right(value):
            raise PlanError(f"{self._where}.{name}", value, expected, RETUNE)
        return value

    def has(self, name: str) -> bool:
        """Whether a field is there that older files do not have."""
        return name in self._left

    def text(self, name: str, longest: int, pattern: re.Pattern[str] | None = None) -> str:
        """A text of at most `longest` characters that matches."""

        def right(value: Any) -> bool:
            return isinstance(value, str) and len(value) <= longest and (not pattern or bool(pattern.fullmatch(value)))

        return self._take(name, right, f"a text{f' that matches {pattern.pattern}' if pattern else ''}")

    def integer(self, name: str) -> int:
        """An integer from 0 to 2^53."""
        return self._take(name, _is_count, "an integer of at least 0")

    def number(self, name: str) -> float:
        """A finite number of at least 0."""
        value = self._take(
            name,
            lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and 0 <= v < 1e15,
            "a number of at least 0",
        )
        return float(value)

    def boolean(self, name: str) -> bool:
        """True or false."""
        return self._take(name, lambda v: isinstance(v, bool), "true or false")

    def items(self, name: str, most: int = MAX_ITEMS) -> list[Any]:
        """A list of at most `most` items."""

        def right(value: Any) -> bool:
            return isinstance(value, list) and len(cast("list[Any]", value)) <= most

        return self._take(name, right, f"a list of at most {most} items")

    def texts(self, name: str, right: Callable[[str], bool]) -> list[str]:
        """A list of texts, each of them valid."""
        found = self.items(name)
        for item in found:
            if not isinstance(item, str) or not right(item):
                raise PlanError(f"{self._where}.{name}", item, "well-formed names or texts", RETUNE)
        return found

    def integers(self, name: str) -> list[int]:
        """A list of integers of at least 0."""
        found = self.items(name)
        for item in found:
            if not _is_count(item):
                raise PlanError(f"{self._where}.{name}", item, "integers of at least 0", RETUNE)
        return found

    def plain(self, name: str) -> dict[str, Any]:
        """A JSON object."""
        return self._take(name, lambda v: isinstance(v, dict), "a JSON object")

    def finish(self) -> None:
        """Refuse unknown fields."""
        for name in self._left:
            raise PlanError(f"{self._where}.{name}", name, "no such field", RETUNE)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**53
