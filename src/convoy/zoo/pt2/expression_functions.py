"""The functions that a symbolic size of a .pt2 file may call, on exact fractions and truth values."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Final

from convoy.zoo.pt2.refusal import RefusedError

LARGEST: Final = 2**63 - 1
"""Sizes are 64-bit integers, and no step towards them is larger."""

Value = Fraction | bool


def bounded(value: Value) -> Value:
    """The value itself; raises RefusedError if it does not fit into 64 bits."""
    if not isinstance(value, bool) and max(abs(value.numerator), value.denominator) > LARGEST:
        raise RefusedError("It has a symbolic size beyond 64 bits.", is_code=False)
    return value


def _floor(a: Fraction, b: Fraction) -> Fraction:
    return Fraction(a // b)


def _mod(a: Fraction, b: Fraction) -> Fraction:
    return a % b


def _power(a: Fraction, b: Fraction) -> Fraction:
    if b.denominator != 1 or abs(b) > 64 or (a == 0 and b < 0):
        raise RefusedError(f"It has a symbolic size with the power {b}.")
    for _ in range(abs(int(b))):
        bounded(a ** (1 if b > 0 else -1))
    result = Fraction(1)
    for _ in range(abs(int(b))):
        result = result * a if b > 0 else result / a
        bounded(result)
    return result


def _product(*values: Fraction) -> Fraction:
    result = Fraction(1)
    for value in values:
        result *= value
        bounded(result)
    return result


def _modular(base: Fraction, divisor: Fraction, modulus: Fraction) -> Fraction:
    return _mod(_floor(base, divisor), modulus)


def _sum(*values: Fraction) -> Fraction:
    return sum(values, Fraction(0))


def _quotient(a: Fraction, b: Fraction) -> Fraction:
    return a / b


def _ceiling_of_quotient(a: Fraction, b: Fraction) -> Fraction:
    return Fraction(-(-a // b))


def _largest(*values: Fraction) -> Fraction:
    return max(values)


def _smallest(*values: Fraction) -> Fraction:
    return min(values)


def _floor_of(a: Fraction) -> Fraction:
    return Fraction(math.floor(a))


def _ceiling_of(a: Fraction) -> Fraction:
    return Fraction(math.ceil(a))


def _truncated(a: Fraction) -> Fraction:
    return Fraction(math.trunc(a))


def _all(*values: bool) -> bool:
    return all(values)


def _any(*values: bool) -> bool:
    return any(values)


FUNCTIONS: Final[dict[str, tuple[int, int, Callable[..., Any]]]] = {
    "Integer": (1, 1, Fraction),
    "Rational": (2, 2, Fraction),
    "Identity": (1, 1, Fraction),
    "Add": (1, 10_000, _sum),
    "Mul": (1, 10_000, _product),
    "Pow": (2, 2, _power),
    "PowByNatural": (2, 2, _power),
    "FloorDiv": (2, 2, _floor),
    "CleanDiv": (2, 2, _floor),
    "IntTrueDiv": (2, 2, _quotient),
    "CeilDiv": (2, 2, _ceiling_of_quotient),
    "Mod": (2, 2, _mod),
    "PythonMod": (2, 2, _mod),
    "ModularIndexing": (3, 3, _modular),
    "Max": (1, 10_000, _largest),
    "max": (1, 10_000, _largest),
    "Min": (1, 10_000, _smallest),
    "min": (1, 10_000, _smallest),
    "Abs": (1, 1, abs),
    "floor": (1, 1, _floor_of),
    "ceiling": (1, 1, _ceiling_of),
    "FloorToInt": (1, 1, _floor_of),
    "CeilToInt": (1, 1, _ceiling_of),
    "TruncToInt": (1, 1, _truncated),
    "ToFloat": (1, 1, Fraction),
    "Eq": (2, 2, operator.eq),
    "Ne": (2, 2, operator.ne),
    "Lt": (2, 2, operator.lt),
    "Le": (2, 2, operator.le),
    "Gt": (2, 2, operator.gt),
    "Ge": (2, 2, operator.ge),
    "Equality": (2, 2, operator.eq),
    "Unequality": (2, 2, operator.ne),
    "StrictLessThan": (2, 2, operator.lt),
    "LessThan": (2, 2, operator.le),
    "StrictGreaterThan": (2, 2, operator.gt),
    "GreaterThan": (2, 2, operator.ge),
    "And": (1, 10_000, _all),
    "Or": (1, 10_000, _any),
    "Not": (1, 1, operator.not_),
}
"""Fewest and most arguments, and the function; the names that `sympy.srepr` and torch's own functions have."""
