"""Sizes that a program's inputs may have: what a file says of its dynamic shapes, checked before each call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from convoy.zoo.pt2.expressions import evaluate, solve, symbol_in
from convoy.zoo.pt2.program import DynamicSizes
from convoy.zoo.pt2.refusal import RefusedError


def check_sizes(module: nn.Module, program: ExportedProgram, sizes: DynamicSizes) -> None:
    """Let a program's module refuse inputs of sizes that it was not exported for.

    Args:
        module: what `program.module(check_guards=False)` gave; its own check, of the example's sizes, is switched off.
        program: the program.
        sizes: which sizes may vary, and how far.
    """
    names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    module.validate_inputs = False  # pyright: ignore[reportArgumentType]
    module.register_forward_pre_hook(SizeCheck(tuple(names), sizes), with_kwargs=True)


@dataclass(frozen=True)
class SizeCheck:
    """A forward pre-hook that raises RuntimeError, as PyTorch's own check does.

    Attributes:
        names: of the inputs, in the order in which the arguments' leaves come.
        sizes: which sizes may vary, and how far.
        passed: shapes that passed before.
    """

    names: tuple[str, ...]
    sizes: DynamicSizes
    passed: set[tuple[torch.Size, ...]] = field(default_factory=set, compare=False)

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the inputs of a call."""
        keywords = {name: kwargs[name] for name in self.sizes.keywords if name in kwargs}
        leaves = pytree.tree_leaves((args, keywords))
        shapes = tuple(leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor))
        if shapes not in self.passed:
            self._check(list(self._pairs(leaves)))
            self.passed.add(shapes)

    def _check(self, pairs: list[tuple[str, int, int | str, int]]) -> None:
        symbols: dict[str, int] = {}
        for name, dim, wanted, size in sorted(pairs, key=_is_derived):
            found = _symbol(wanted, size, symbols)
            if found is not None:
                symbol, value = found
                least, most = self.sizes.ranges.get(symbol, (None, None))
                symbols[symbol] = value
                if (least or 0) > value or (most is not None and most < value):
                    bounds = f"{symbol} from {least or 0}" + ("" if most is None else f" to {most}")
                    raise RuntimeError(f"input {name}: size {size} in dimension {dim}, exported for {wanted}, {bounds}")
            elif wanted != size and (isinstance(wanted, int) or _value(wanted, symbols) != size):
                known = wanted if isinstance(wanted, int) else _value(wanted, symbols)
                expected = wanted if known is None else known
                raise RuntimeError(f"input {name}: size {size} in dimension {dim}, exported for {expected}")
        given = {(name, dim): size for name, dim, _, size in pairs}
        for guard in self.sizes.guards:
            if not guard.holds(given):
                raise RuntimeError(f"the inputs' sizes do not fit what the program was exported for: {guard.text}")

    def _pairs(self, leaves: list[Any]) -> Iterator[tuple[str, int, int | str, int]]:
        for name, leaf in zip(self.names, leaves, strict=False):  # the wrong number of them is the module's own error
            sizes = self.sizes.inputs.get(name)
            if sizes is None or not isinstance(leaf, torch.Tensor):
                continue
            if leaf.dim() != len(sizes):
                raise RuntimeError(f"input {name}: {leaf.dim()} dimensions, exported for {len(sizes)}")
            for dim, wanted in enumerate(sizes):
                yield name, dim, wanted, int(leaf.shape[dim])


def _is_derived(pair: tuple[str, int, int | str, int]) -> bool:
    return isinstance(pair[2], str) and symbol_in(pair[2]) is None


def _symbol(wanted: int | str, size: int, symbols: dict[str, int]) -> tuple[str, int] | None:
    """The symbol that a size gives a value to, where it has none yet."""
    if isinstance(wanted, int):
        return None
    symbol = symbol_in(wanted)
    if symbol is not None:
        return None if symbol in symbols else (symbol, size)
    return solve(wanted, size, symbols)


def _value(expression: str, symbols: dict[str, int]) -> int | None:
    try:
        return evaluate(expression, symbols)
    except RefusedError:
        return None
