"""Writes CUDA C that computes `Tensor`s at positions: one element, or `width` consecutive ones, a vector, at once.

The text is made of numbers, of names that this module gives and of functions of `fusion_operators.cuh`. Nothing of a user's is
part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from convoy.engines.fusion.code_text import LANE, CodeText, Operand, literal
from convoy.engines.fusion.gather_code import interpolated, windowed
from convoy.engines.fusion.index_math import Index, number
from convoy.engines.fusion.tensors import (
    Concatenated,
    Coordinates,
    Elementwise,
    Input,
    Interpolated,
    Moved,
    NotFusibleError,
    Reduced,
    Tensor,
    Windowed,
)

CPP_TYPE: Final = {"fp16": "Half", "bf16": "BFloat", "fp32": "float"}


@dataclass(frozen=True, slots=True)
class KnownReduction:
    """A reduction that was computed before: where, and the variable that holds it."""

    at: Coordinates
    operand: Operand


class Emitter(CodeText):
    """Lines of CUDA C, with the values that they have computed so far.

    Args:
        width: elements of a vector.

    Attributes:
        by_lane: how many values had to be computed element by element because a vector of them is not contiguous.
        loads: addresses that were read.
        reductions: reductions that were computed before, by the identity of the `Reduced`.
        reads: the positions at which reductions were read, if `probing`.
        probing: whether only `loads` and `reads` are wanted, and the text is thrown away.
    """

    def __init__(self, width: int, *, probing: bool = False) -> None:
        super().__init__(width)
        self.by_lane = 0
        self.loads: list[tuple[Input, Index]] = []
        self.reductions: dict[int, KnownReduction] = {}
        self.reads: list[tuple[Reduced, Coordinates]] = []
        self.probing = probing
        self._addresses: dict[tuple[tuple[int, ...], Coordinates], Index] = {}

    def evaluate(self, tensor: Tensor, at: Coordinates) -> Operand:
        """A value at coordinates, of which one may contain the lane.

        Raises:
            NotFusibleError: it cannot be computed there.
        """
        if isinstance(tensor, Moved):
            return self.evaluate(tensor.of, tensor.source(at))
        key = (id(tensor), at)
        found = self._find(key)
        if found is None:
            found = self._computed(tensor, at)
            self._known[-1][key] = found
        return Operand(found.element) if found.vector and self.by_element else found

    def _computed(self, tensor: Tensor, at: Coordinates) -> Operand:
        if isinstance(tensor, Elementwise):
            return self._elementwise(tensor, at)
        if isinstance(tensor, Input):
            return self._load(tensor, at)
        if isinstance(tensor, Concatenated):
            return self._concatenated(tensor, at)
        if isinstance(tensor, Windowed):
            return windowed(self, self.evaluate, tensor, at) or self._one_by_one(tensor, at)
        if isinstance(tensor, Interpolated):
            return interpolated(self, self.evaluate, tensor, at) or self._one_by_one(tensor, at)
        assert isinstance(tensor, Reduced)
        return self._reduced(tensor, at)

    def _elementwise(self, tensor: Elementwise, at: Coordinates) -> Operand:
        numbers = list(map(literal, tensor.numbers))
        if tensor.function == "constant":
            return Operand(numbers[0])
        args = [self.evaluate(arg, at) for arg in tensor.args]
        found = Operand(self.name("v"), any(arg.vector for arg in args))
        call = f"op_{tensor.function}({', '.join([*(arg.element for arg in args), *numbers])})"
        if found.vector:
            self.line(f"float {found.text}[{self.width}];")
            self.line(f"{self.each_lane()} {found.element} = {call};")
        else:
            self.line(f"const float {found.text} = {call};")
        return found

    def _load(self, tensor: Input, at: Coordinates) -> Operand:
        key = (tensor.strides, at)
        if key not in self._addresses:
            self._addresses[key] = tensor.address(at)
        address = self._addresses[key]
        self.loads.append((tensor, address))
        if self.by_element or LANE not in address.names():
            found = Operand(self.name("v"))
            self.line(f"const float {found.text} = to_float({tensor.parameter}[{self.index(address)}]);")
            return found
        first = self.first_of_vector(address)
        if first is None:
            return self._one_by_one(tensor, at)
        found = Operand(self.name("v"), vector=True)
        self.line(f"float {found.text}[{self.width}];")
        self.line(f"load({found.text}, {tensor.parameter} + ({self.index(first)}));")
        return found

    def first_of_vector(self, index: Index) -> Index | None:
        """An index at lane 0, if the lanes are consecutive from a multiple of the width on; else None."""
        if index.factor(LANE) != 1:
            return None
        first = index.substituted({LANE: number(0)})
        multiples = all(factor % self.width == 0 for _, factor in first.terms) and first.const % self.width == 0
        return first if multiples else None

    def _one_by_one(self, tensor: Tensor, at: Coordinates) -> Operand:
        self.by_lane += 1
        found = Operand(self.name("v"), vector=True)
        self.line(f"float {found.text}[{self.width}];")
        with self.lanes():
            self.line(f"{found.element} = {self._computed(tensor, at).text};")
        return found

    def _concatenated(self, tensor: Concatenated, at: Coordinates) -> Operand:
        place = at[tensor.dim]
        first, bounds = place, tensor.bounds()
        if self.in_vectors and LANE in place.names():
            found = self.first_of_vector(place)
            if found is None or any(start % self.width for start, _ in bounds):
                return self._one_by_one(tensor, at)
            first = found
        touched = [
            (part, start, end)
            for part, (start, end) in zip(tensor.parts, bounds, strict=True)
            if start <= place.high and end > place.low
        ]

        def part_at(part: Tensor, start: int) -> Operand:
            moved = place + -start
            within = Index(moved.terms, moved.const, max(moved.low, 0), min(moved.high, part.shape[tensor.dim] - 1))
            return self.evaluate(part, (*at[: tensor.dim], within, *at[tensor.dim + 1 :]))

        if len(touched) == 1:
            return part_at(*touched[0][:2])
        found = self.variable()
        where = self.index(first)
        for turn, (part, start, end) in enumerate(touched):
            last = turn == len(touched) - 1
            opening = "else" if last else f"{'else ' if turn else ''}if ({where} < {end}u)"
            with self.block(opening):
                self.assign(found, part_at(part, start))
        return found

    def _reduced(self, tensor: Reduced, at: Coordinates) -> Operand:
        if self.probing:
            self.reads.append((tensor, at))
            return Operand("0.0f")
        known = self.reductions.get(id(tensor))
        if known is None or known.at != at:
            raise NotFusibleError("reads a reduction at other positions than those of its rows")
        return known.operand
