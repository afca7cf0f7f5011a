"""Tokens of a graph's text form."""

from __future__ import annotations

import re

from convoy.errors import InputError
from convoy.problem import TensorSpec

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<ref>%\w[\w.]*)
    | (?P<float>-?(?:\d+\.\d+(?:e[+-]?\d+)?|\d+e[+-]?\d+|inf\b|nan\b))
    | (?P<int>-?\d{1,19}(?![\w.]))
    | (?P<string>"(?:[^"\\]|\\.)*")
    | (?P<word>[A-Za-z_][\w.]*)
    | (?P<mark>[(),:=\[\]])
    )""",
    re.VERBOSE | re.ASCII,
)
_END = re.compile(r"\s*\Z")
_SPEC = re.compile(r"\s*(\w+\[[\d,]*\])", re.ASCII)


class GraphLine:
    """One line with a position: returns tokens, and errors that name the line."""

    def __init__(self, text: str, number: int) -> None:
        self.text, self.number, self.position = text, number, 0

    def error(self, expected: str) -> InputError:
        """The error that names this line and its text at the position."""
        return InputError(
            f"graph text, line {self.number}", self.text[self.position :][:200].strip() or "the end", expected
        )

    def token(self, expected: str) -> tuple[str, str]:
        """The next token as (kind, text)."""
        match = _TOKEN.match(self.text, self.position)
        if match is None or match.lastgroup is None:
            raise self.error(expected)
        self.position = match.end()
        return match.lastgroup, match[match.lastgroup]

    def accept(self, word: str) -> bool:
        """Skip `word` if it comes next."""
        match = _TOKEN.match(self.text, self.position)
        if match is None or match[match.lastgroup or 0] != word:
            return False
        self.position = match.end()
        return True

    def expect(self, word: str) -> None:
        """Skip `word`; raises InputError if it does not come next."""
        if not self.accept(word):
            raise self.error(repr(word))

    def ref(self) -> str:
        """The name of the next value, without `%`."""
        before = self.position
        kind, text = self.token("a value such as %x")
        if kind != "ref":
            self.position = before
            raise self.error("a value such as %x")
        return text[1:]

    def word(self, expected: str) -> str:
        """The next word."""
        before = self.position
        kind, text = self.token(expected)
        if kind != "word":
            self.position = before
            raise self.error(expected)
        return text

    def spec(self) -> TensorSpec:
        """The next tensor spec."""
        match = _SPEC.match(self.text, self.position)
        if match is None:
            raise self.error("a tensor spec such as fp32[1,3,8,8]")
        try:
            spec = TensorSpec.parse(match[1])
        except (InputError, ValueError) as error:
            raise self.error("a tensor spec such as fp32[1,3,8,8]") from error
        self.position = match.end()
        return spec

    def at_end(self) -> bool:
        """Whether only blanks are left."""
        return _END.match(self.text, self.position) is not None

    def end(self) -> None:
        """Raise InputError unless only blanks are left."""
        if not self.at_end():
            raise self.error("the end of the line")
