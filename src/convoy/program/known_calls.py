"""KnownCalls: calls with plain tensors that a program has run before, found again by one look at each tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from convoy.program import calls
from convoy.program.cuda.cuda_graph import CudaGraphProgram
from convoy.program.runnable_program import Program

MOST_CALLS: Final = 256
"""Calls of further shapes or strides are looked up in full."""

OutputStrides = calls.Strides | str
"""Strides that the outputs must have, or "as made": those of the program."""

Key = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device], ...]
"""Shape, strides, dtype and device of each argument."""


@dataclass(frozen=True, slots=True)
class KnownCall:
    """A program that has run a call with such arguments.

    Attributes:
        program: the program, which takes the arguments as they are given.
        strides: strides of its outputs.
        flat: the arguments are the graph's inputs, in order.
    """

    program: Program
    strides: OutputStrides
    flat: bool

    def may_run(self, args: tuple[torch.Tensor, ...]) -> bool:
        """Whether no gradient is asked for, and torch's modes are those in which the program was made."""
        for tensor in args:
            if tensor.requires_grad and torch.is_grad_enabled():
                return False
        return calls.why_modes_forbid(self.program.autocast, self.program.default_dtype) is None


class KnownCalls:
    """Calls by the kinds of their tensors. All arguments are plain tensors by position."""

    def __init__(self) -> None:
        self._calls: dict[Key, KnownCall] = {}

    def find(self, args: tuple[Any, ...]) -> KnownCall | None:
        """The call with such arguments; None if there was none, or if an argument is no plain tensor."""
        key = _key(args)
        return None if key is None else self._calls.get(key)

    def keep(self, args: tuple[Any, ...], program: Program, strides: OutputStrides) -> None:
        """Remember that a program has run a call with these arguments, and with no others."""
        key = _key(args)
        if key is not None and len(self._calls) < MOST_CALLS:
            self._calls[key] = KnownCall(program, strides, program.is_flat(args))


def _key(args: tuple[Any, ...]) -> Key | None:
    found: list[Any] = []
    for value in args:
        if type(value) not in calls.PLAIN or not calls.is_plain(value):
            return None
        found.append((value.shape, value.stride(), value.dtype, value.device))
    return tuple(found)


def run_checked(
    program: Program,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    strides: OutputStrides,
    model: nn.Module,
    why_stale: Callable[[], str | None],
    *,
    flat: bool = False,
) -> tuple[Any, str | None]:
    """Run a program of a module unless it is stale.

    A GPU gets its work before the module's state is checked, which takes tens of microseconds (ResNet-50 has 320 tensors). If the
    state has changed, the result is thrown away. `flat` is as in a call of the program.

    Returns:
        The results, and why the program is stale (None: it is not).
    """
    had_gradients = torch.is_grad_enabled()
    if had_gradients:
        torch._C._set_grad_enabled(False)  # `torch.no_grad` takes ten times as long
    try:
        if isinstance(program.runnable, CudaGraphProgram):
            made = program(args, kwargs, strides, model, flat=flat)
            return made, why_stale()
        reason = why_stale()
        return (program(args, kwargs, strides, model, flat=flat) if reason is None else None), reason
    finally:
        if had_gradients:
            torch._C._set_grad_enabled(True)
