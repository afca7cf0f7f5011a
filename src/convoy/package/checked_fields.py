"""Fields of a package's JSON, each checked as it is read; unknown fields are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, cast

from convoy.errors import PackageError

MOST_COUNT: Final = 1 << 53
MOST_ITEMS: Final = 200_000


class Fields:
    """Takes fields out of a JSON object.

    Args:
        where: its name in errors.
        data: the object.

    Raises:
        PackageError: naming the field, in every method.
    """

    def __init__(self, where: str, data: object) -> None:
        if not isinstance(data, dict):
            raise PackageError(where, data, "a JSON object")
        self._where = where
        self._left = dict(cast("dict[str, Any]", data))

    def take(self, name: str, right: Callable[[Any], bool], expected: str) -> Any:
        """A field with a value that is right."""
        if name not in self._left:
            raise PackageError(f"{self._where}.{name}", None, expected)
        value = self._left.pop(name)
        if not right(value):
            raise PackageError(f"{self._where}.{name}", value, expected)
        return value

    def text(self, name: str, pattern: str = r"[^\x00-\x1f]*", longest: int = 4000) -> str:
        """A text that matches a pattern."""

        def right(value: Any) -> bool:
            return isinstance(value, str) and len(value) <= longest and re.fullmatch(pattern, value) is not None

        return self.take(name, right, f"a text that matches {pattern}")

    def integer(self, name: str, least: int = 0, most: int = MOST_COUNT) -> int:
        """An integer in a range."""
        return self.take(name, lambda value: is_integer(value, least, most), f"an integer from {least} to {most}")

    def boolean(self, name: str) -> bool:
        """True or false."""
        return self.take(name, lambda value: isinstance(value, bool), "true or false")

    def items(self, name: str, right: Callable[[Any], bool] = lambda _: True, expected: str = "a list") -> list[Any]:
        """A list of values that are right."""

        def all_right(value: Any) -> bool:
            if not isinstance(value, list) or len(cast("list[Any]", value)) > MOST_ITEMS:
                return False
            return all(map(right, cast("list[Any]", value)))

        return self.take(name, all_right, expected)

    def integers(self, name: str, least: int = 0, most: int = MOST_COUNT) -> tuple[int, ...]:
        """A list of integers in a range."""
        expected = f"integers from {least} to {most}"
        return tuple(self.items(name, lambda value: is_integer(value, least, most), expected))

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers."""

        def right(value: Any) -> bool:
            return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15

        return tuple(map(float, self.items(name, right, "numbers")))

    def texts(self, name: str, pattern: str, longest: int = 4000) -> tuple[str, ...]:
        """A list of texts that match a pattern."""

        def right(value: Any) -> bool:
            return isinstance(value, str) and len(value) <= longest and re.fullmatch(pattern, value) is not None

        return tuple(self.items(name, right, f"texts that match {pattern}"))

    def mapping(self, name: str) -> dict[str, Any]:
        """A JSON object."""
        return self.take(name, lambda value: isinstance(value, dict), "a JSON object")

    def has(self, name: str) -> bool:
        """Whether there is such a field, which was not taken yet."""
        return name in self._left

    def anything(self, name: str) -> Any:
        """A value that somebody else checks."""
        return self.take(name, lambda _: True, "a value")

    def finish(self) -> None:
        """Refuse fields that were not taken."""
        for name in self._left:
            raise PackageError(
                f"{self._where}.{name}", name, "no such field", "It may be from a later version of Convoy."
            )


def is_integer(value: object, least: int = 0, most: int = MOST_COUNT) -> bool:
    """Whether a value of JSON is an integer in a range."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
