"""Symbolic sizes of a .pt2 file: `Mul(Integer(3), Symbol('s77', positive=True, integer=True))`, or `3*s77`.

torch gives such text to sympy, which evaluates it as Python. This parser knows integers, symbols, arithmetic and a few
functions, and computes the value for given symbols; nothing else is an expression.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Final

from convoy.zoo.pt2.expression_functions import FUNCTIONS, Value, bounded
from convoy.zoo.pt2.refusal import RefusedError, shown

LONGEST: Final = 10_000
"""Characters of one expression; sizes deep inside a net of many concatenations have a few hundred."""
DEEPEST: Final = 100
"""Nested brackets."""

_TOKEN: Final = re.compile(
    r"\s*(?:(?P<symbol>Symbol\('(?:[su]\d{1,9})'(?:, (?:positive|integer|nonnegative)=True){0,3}\))"
    r"|(?P<number>\d{1,19}(?!\w))|(?P<name>[A-Za-z_]\w{0,40})|(?P<sign>\*\*|//|==|!=|<=|>=|[-+*/%(),<>]))",
    re.ASCII,
)
_SYMBOL_INSIDE: Final = re.compile(r"\b[su]\d{1,9}\b", re.ASCII)
_NAME_OF_SYMBOL: Final = re.compile(r"[su]\d{1,9}", re.ASCII)


def evaluate(text: str, symbols: Mapping[str, int]) -> int | bool:
    """The value of an expression where its symbols have these values.

    Raises:
        RefusedError: it is no expression of this kind, has another symbol, or its value is no 64-bit integer or truth value.
    """
    if len(text) > LONGEST:
        raise RefusedError(f"It has a symbolic size of {len(text)} characters.")
    value = _Parser(text, symbols).whole()
    if isinstance(value, bool):
        return value
    if value.denominator != 1:
        raise RefusedError(f"Its symbolic size {shown(text)} is {value}.", is_code=False)
    return value.numerator


def symbol_in(text: str) -> str | None:
    """The name of the symbol where an expression is nothing but one."""
    if _NAME_OF_SYMBOL.fullmatch(text):
        return text
    found = _TOKEN.fullmatch(text)
    return found["symbol"].split("'")[1] if found is not None and found["symbol"] else None


def solve(text: str, value: int, symbols: Mapping[str, int]) -> tuple[str, int] | None:
    """The one symbol of an expression that has no value yet, and the value by which the expression becomes `value`.

    None where several symbols are unknown, or the expression does not grow by equal steps with the symbol (`2*s0 + 1` does).
    """
    unknown = {name for name in _SYMBOL_INSIDE.findall(text[:LONGEST]) if name not in symbols}
    if len(unknown) != 1:
        return None
    (name,) = unknown

    def at(number: int) -> int:
        return int(evaluate(text, {**symbols, name: number}))

    try:
        first = at(2)
        step = at(3) - first
        if step == 0 or (value - first) % step:
            return None
        found = 2 + (value - first) // step
        return (name, found) if at(found) == value else None
    except RefusedError:
        return None


_COMPARISONS: Final = {"==": "Eq", "!=": "Ne", "<": "Lt", "<=": "Le", ">": "Gt", ">=": "Ge"}


class _Parser:
    """Recursive descent over the tokens; computes while it reads."""

    def __init__(self, text: str, symbols: Mapping[str, int]) -> None:
        self.text, self.symbols, self.depth, self.at = text, symbols, 0, 0
        self.tokens: list[tuple[str, str]] = []
        position, end = 0, len(text.rstrip())
        while position < end:
            found = _TOKEN.match(text, position)
            if found is None or found.lastgroup is None:
                raise self.refused()
            self.tokens.append((found.lastgroup, found[found.lastgroup]))
            position = found.end()

    def refused(self) -> RefusedError:
        return RefusedError(f"Its symbolic size {shown(self.text)} is no arithmetic.")

    def whole(self) -> Value:
        value = self.comparison()
        if self.at != len(self.tokens):
            raise self.refused()
        return value

    def peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def take(self, sign: str) -> bool:
        if self.peek() == sign:
            self.at += 1
            return True
        return False

    def comparison(self) -> Value:
        left = self.sum()
        name = _COMPARISONS.get(self.peek())
        if name is None:
            return left
        self.at += 1
        return self.call(name, [left, self.sum()])

    def sum(self) -> Value:
        value = self.product()
        while (sign := self.peek()) in ("+", "-"):
            self.at += 1
            right = self.product()
            value = self.call("Add", [value, right if sign == "+" else self.call("Mul", [Fraction(-1), right])])
        return value

    def product(self) -> Value:
        names = {"*": "Mul", "//": "FloorDiv", "/": "IntTrueDiv", "%": "Mod"}
        value = self.factor()
        while (sign := self.peek()) in names:
            self.at += 1
            value = self.call(names[sign], [value, self.factor()])
        return value

    def factor(self) -> Value:
        negative = False
        while self.take("-"):
            negative = not negative
        value = self.atom()
        if self.take("**"):
            value = self.call("Pow", [value, self.atom()])
        return self.call("Mul", [Fraction(-1), value]) if negative else value

    def atom(self) -> Value:
        if self.at >= len(self.tokens):
            raise self.refused()
        kind, word = self.tokens[self.at]
        self.at += 1
        if kind == "number":
            return bounded(Fraction(int(word)))
        if kind == "symbol":
            return self.of_symbol(word.split("'")[1])
        if word == "(":
            value = self.nested(self.comparison)
        elif kind == "name" and self.peek() == "(":
            self.at += 1
            value = self.nested(lambda: self.call(word, self.arguments()))
        elif word in ("True", "False", "true", "false"):
            return word in ("True", "true")
        elif kind == "name" and _NAME_OF_SYMBOL.fullmatch(word):
            return self.of_symbol(word)
        else:
            raise self.refused()
        if not self.take(")"):
            raise self.refused()
        return value

    def nested(self, read: Callable[[], Value]) -> Value:
        self.depth += 1
        if self.depth > DEEPEST:
            raise RefusedError(f"Its symbolic size {shown(self.text)} is nested more than {DEEPEST} deep.")
        value = read()
        self.depth -= 1
        return value

    def arguments(self) -> list[Value]:
        values = [self.comparison()]
        while self.take(","):
            values.append(self.comparison())
        return values

    def of_symbol(self, name: str) -> Value:
        if name not in self.symbols:
            raise RefusedError(f"Its symbolic size {shown(self.text)} has {name}, which depends on the data.")
        return Fraction(self.symbols[name])

    def call(self, name: str, arguments: list[Value]) -> Value:
        fewest, most, compute = FUNCTIONS.get(name, (1, 0, bool))
        logical = name in ("And", "Or", "Not")
        if not fewest <= len(arguments) <= most or any(isinstance(a, bool) != logical for a in arguments):
            raise self.refused()
        try:
            return bounded(compute(*arguments))
        except ZeroDivisionError as error:
            raise RefusedError(f"Its symbolic size {shown(self.text)} divides by zero.", is_code=False) from error
        except (ArithmeticError, TypeError, ValueError) as error:
            raise self.refused() from error
