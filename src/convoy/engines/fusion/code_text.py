"""Lines of CUDA C with the values and quotients that were computed in them, each in the braces in which it is known."""

from __future__ import annotations

import math
import struct
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from convoy.engines.fusion.index_math import Atom, Index, Var

LANE: Final = "lane"
"""The variable that counts the elements of a vector; the loop variable where they are computed one by one."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A computed value: the C expression of one element.

    Attributes:
        text: the name of a variable, or a literal.
        vector: whether it is an array with one element for each lane; otherwise all lanes have this value.
    """

    text: str
    vector: bool = False

    @property
    def element(self) -> str:
        """The expression inside a loop over the lanes."""
        return f"{self.text}[{LANE}]" if self.vector else self.text


def literal(value: float) -> str:
    """A number as C writes it, exactly."""
    if not math.isfinite(value):
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        return f"from_bits(0x{bits:08x}u)"
    return f"{value.hex()}f"


class CodeText:
    """The text of a kernel's section as it grows.

    Args:
        width: elements of a vector.

    Attributes:
        lines: the text so far.
        by_element: whether one element is computed at a time, in a loop over the lanes or without vectors.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.lines: list[str] = []
        self._serial = 0
        self._depth = 1
        self._known: list[dict[object, Operand]] = [{}]
        self.by_element = width == 1

    @property
    def in_vectors(self) -> bool:
        """Whether vectors are computed."""
        return not self.by_element

    def line(self, text: str) -> None:
        """One line at the current depth."""
        self.lines.append("  " * self._depth + text)

    def name(self, kind: str) -> str:
        """A new name."""
        self._serial += 1
        return f"{kind}{self._serial}"

    @contextmanager
    def block(self, opening: str = "") -> Generator[None]:
        """Lines in braces, whose variables end with them."""
        self.line(f"{opening} {{".strip())
        self._depth += 1
        self._known.append({})
        yield
        self._known.pop()
        self._depth -= 1
        self.line("}")

    @contextmanager
    def lanes(self) -> Generator[None]:
        """A loop over the lanes, in which each element is computed by itself."""
        with self.block(self.each_lane()):
            before, self.by_element = self.by_element, True
            yield
            self.by_element = before

    def variable(self, value: str = "") -> Operand:
        """A variable to assign to: an array while vectors are computed."""
        found = Operand(self.name("v"), self.in_vectors)
        self.line(f"float {found.text}[{self.width}];" if found.vector else f"float {found.text};")
        if value:
            self.assign(found, Operand(value))
        return found

    def assign(self, found: Operand, value: Operand, operation: str = "") -> None:
        """`found = value`, or `found = operation(found, value)`, in every lane."""
        right = f"{operation}({found.element}, {value.element})" if operation else value.element
        self.line(f"{self.each_lane()} {found.element} = {right};" if found.vector else f"{found.text} = {right};")

    def index(self, index: Index) -> str:
        """An index expression; quotients become variables."""
        parts = sorted((self._atom(atom), factor) for atom, factor in index.terms)
        text = ""
        for atom, factor in parts:
            sign = "-" if factor < 0 else "+" if text else ""
            text += f" {sign} {atom}" + ("" if abs(factor) == 1 else f" * {abs(factor)}u")
        if index.const or not text:
            text += f" {'-' if index.const < 0 else '+' if text else ''} {abs(index.const)}u"
        text = text.strip()
        return f"0u {text}" if text.startswith("-") else text

    def _atom(self, atom: Atom) -> str:
        if isinstance(atom, Var):
            return atom.name
        found = self._find(atom)
        if found is None:
            text = f"({self.index(atom.of)}) / {atom.by}u"
            found = Operand(self.name("q"))
            self.line(f"const unsigned {found.text} = {text};")
            self._known[-1][atom] = found
        return found.text

    def each_lane(self) -> str:
        """A loop over the lanes."""
        return f"UNROLL for (unsigned {LANE} = 0; {LANE} < {self.width}; ++{LANE})"

    def _find(self, key: object) -> Operand | None:
        for scope in reversed(self._known):
            if key in scope:
                return scope[key]
        return None
