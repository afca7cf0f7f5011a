"""Integer expressions of indices, simplified as they are made: sums of variables and of quotients, with known bounds.

A remainder is written as `e - k * (e / k)`, so that an index that is taken apart into coordinates and put together again
becomes itself: `(i / c) * c + (i - (i / c) * c)` is `i`. What remains of a `view` that neither splits nor joins is nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any


@dataclass(frozen=True, slots=True)
class Var:
    """A variable that takes the values 0 to size - 1; its name is one that this package gives, never a user's."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Quotient:
    """An expression divided by a number, rounded down."""

    of: Index
    by: int


Atom = Var | Quotient


@dataclass(frozen=True, slots=True)
class Index:
    """`const` plus the sum of `factor * atom` over `terms`.

    Attributes:
        terms: atoms with their factors, none of which is 0. Their order is the same in every process, since compiled kernels are
            kept by their text.
        const: the constant.
        low: no value is smaller.
        high: no value is larger.
    """

    terms: tuple[tuple[Atom, int], ...]
    const: int
    low: int = field(compare=False)
    high: int = field(compare=False)

    def __add__(self, other: Index | int) -> Index:
        if isinstance(other, int):
            return Index(self.terms, self.const + other, self.low + other, self.high + other) if other else self
        if not other.terms:
            return self + other.const
        if not self.terms:
            return other + self.const
        factors = dict(self.terms)
        for atom, factor in other.terms:
            factors[atom] = factors.get(atom, 0) + factor
        return _made(factors, self.const + other.const, self.low + other.low, self.high + other.high)

    def __sub__(self, other: Index | int) -> Index:
        return self + (-other if isinstance(other, int) else other * -1)

    def __mul__(self, factor: int) -> Index:
        if factor == 1 or not factor:
            return self if factor else number(0)
        ends = sorted((self.low * factor, self.high * factor))
        return Index(tuple((atom, each * factor) for atom, each in self.terms), self.const * factor, *ends)

    def divided(self, by: int) -> Index:
        """The quotient, rounded down, of an expression that is nowhere negative."""
        if by == 1:
            return self
        if self.low >= 0 and self.high < by:
            return number(0)
        whole, rest = self._split(by, fully=True)
        if rest.high < by:
            return whole
        whole, rest = self._split(by)
        if rest.low < 0:
            whole, rest = number(0), self
        if rest.high < by:
            return whole
        for common in sorted({math.gcd(by, factor) for _, factor in rest.terms} - {1, by}, reverse=True):
            coarse, fine = rest._split(common, fully=True)
            if fine.high < common and coarse.low >= 0:
                return whole + coarse.divided(by // common)
        if len(rest.terms) == 1 and not rest.const:
            ((atom, factor),) = rest.terms
            if factor == 1 and isinstance(atom, Quotient):
                return whole + atom.of.divided(atom.by * by)
        return whole + _made({Quotient(rest, by): 1}, 0, rest.low // by, rest.high // by)

    def remainder(self, by: int) -> Index:
        """The rest of such a division."""
        if self.low >= 0 and self.high < by:
            return self
        found = self - self.divided(by) * by
        return Index(found.terms, found.const, max(found.low, 0), min(found.high, by - 1))

    def _split(self, by: int, *, fully: bool = False) -> tuple[Index, Index]:
        """(whole, rest) with `whole * by + rest` the same.

        Args:
            by: the divisor.
            fully: also take as much as goes out of factors that it does not divide: then no factor of the rest is negative, nor
                as large as the divisor. Otherwise these factors stay as they are.
        """
        whole: dict[Atom, int] = {}
        rest: dict[Atom, int] = {}
        for atom, factor in self.terms:
            times, left = divmod(factor, by)
            if fully or not left:
                whole[atom], rest[atom] = times, left
            else:
                rest[atom] = factor
        times, left = divmod(self.const, by)
        return _made(whole, times), _made(rest, left)

    def substituted(self, values: Mapping[str, Index]) -> Index:
        """With expressions in place of variables, by name."""
        found = number(self.const)
        for atom, factor in self.terms:
            if isinstance(atom, Var):
                found = found + values.get(atom.name, variable(atom)) * factor
            else:
                found = found + atom.of.substituted(values).divided(atom.by) * factor
        low, high = max(found.low, self.low), min(found.high, self.high)
        return Index(found.terms, found.const, low, high)

    def names(self) -> Iterator[str]:
        """Names of the variables in it, repeats kept."""
        for atom, _ in self.terms:
            if isinstance(atom, Var):
                yield atom.name
            else:
                yield from atom.of.names()

    def factor(self, name: str) -> int | None:
        """The factor of a variable; 0 if it is not in it, None if it stands inside a quotient."""
        found = 0
        for atom, factor in self.terms:
            if isinstance(atom, Var):
                found += factor if atom.name == name else 0
            elif name in atom.of.names():
                return None
        return found

    def sole_variable(self) -> Var | None:
        """The variable that the expression is; None if it is anything else."""
        if self.const or len(self.terms) != 1:
            return None
        ((atom, factor),) = self.terms
        return atom if isinstance(atom, Var) and factor == 1 else None

    def value(self, values: Mapping[str, int]) -> int:
        """The number, for numbers in place of the variables."""
        return self.const + sum(
            factor * (values[atom.name] if isinstance(atom, Var) else atom.of.value(values) // atom.by)
            for atom, factor in self.terms
        )


def _made(factors: Mapping[Atom, int], const: int, low: int | None = None, high: int | None = None) -> Index:
    """An expression, with the bounds of its terms or better ones that are known."""
    terms = {atom: factor for atom, factor in factors.items() if factor}
    least, most = _bounds(terms)
    least, most = least + const, most + const
    low = least if low is None else max(low, least)
    high = most if high is None else min(high, most)
    return Index(tuple(sorted(terms.items(), key=_place)) if len(terms) > 1 else tuple(terms.items()), const, low, high)


def _place(term: tuple[Atom, int]) -> tuple[Any, ...]:
    return _order(term[0])


@lru_cache(maxsize=65536)
def _order(atom: Atom) -> tuple[Any, ...]:
    """The key that atoms are sorted by: variables by name, then quotients by divisor and dividend."""
    if isinstance(atom, Var):
        return 0, atom.name
    return 1, atom.by, atom.of.const, tuple((_order(inner), factor) for inner, factor in atom.of.terms)


def _bounds(terms: Mapping[Atom, int]) -> tuple[int, int]:
    """The smallest and the largest value that a sum can have. `m * e - m * by * (e / by)` is known as a remainder."""
    left = dict(terms)
    least = most = 0
    for atom, factor in terms.items():
        if not isinstance(atom, Quotient) or factor >= 0 or factor % atom.by or atom not in left:
            continue
        times = -factor // atom.by
        if all(left.get(inner) == each * times for inner, each in atom.of.terms):
            least -= times * atom.of.const
            most += times * (atom.by - 1 - atom.of.const)
            for each in (atom, *(inner for inner, _ in atom.of.terms)):
                del left[each]
    for atom, factor in left.items():
        low, high = (0, atom.size - 1) if isinstance(atom, Var) else (atom.of.low // atom.by, atom.of.high // atom.by)
        least += min(low * factor, high * factor)
        most += max(low * factor, high * factor)
    return least, most


def number(value: int) -> Index:
    """A constant."""
    return Index((), value, value, value)


def variable(var: Var) -> Index:
    """A variable; the constant 0 where it takes no other value."""
    return _made({var: 1}, 0) if var.size > 1 else number(0)


def joined(coordinates: Sequence[Index], sizes: Sequence[int]) -> Index:
    """The position of coordinates in row-major order."""
    found = number(0)
    for coordinate, size in zip(coordinates, sizes, strict=True):
        found = found * size + coordinate if size > 1 else found
    return found


def taken_apart(position: Index, sizes: Sequence[int]) -> tuple[Index, ...]:
    """Inverse of `joined`."""
    found: list[Index] = []
    for place, size in enumerate(sizes):
        after = math.prod(sizes[place + 1 :])
        found.append(number(0) if size == 1 else position.divided(after).remainder(size))
    return tuple(found)
