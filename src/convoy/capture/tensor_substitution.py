"""Substitution: Python code that reads tensors which it holds itself is handed others in their places."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode

from convoy.narrowing import is_dict
from convoy.typed_torch import is_functional, is_functorch_wrapped


class TensorSubstitution(TorchFunctionMode):
    """While active, every call of a torch function gets other tensors in the place of some.

    A loss that closes over class weights, or over a model's parameter, names a tensor that no argument of it is. Tracing hands
    it the traced tensor in its place, and a run on a copy of the model hands it the copy's.

    Args:
        stand_ins: `id` of a tensor → what takes its place.
        stand_in: what takes the place of a tensor that is not among them; None: it stays.

    Attributes:
        used: which of `stand_ins` were taken.
    """

    def __init__(
        self, stand_ins: Mapping[int, torch.Tensor], stand_in: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        super().__init__()
        self._stand_ins, self._stand_in = stand_ins, stand_in
        self.used: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function with the stand-ins."""
        given = {name: self._swap(value) for name, value in (kwargs or {}).items()}
        return func(*[self._swap(arg) for arg in args], **given)

    def _swap(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            found = self._stand_ins.get(id(value))
            if found is None and self._stand_in is not None and is_ordinary(value):
                return self._stand_in(value)
            if found is None:
                return value
            self.used.add(id(value))
            return found
        if type(value) in (tuple, list):
            return type(value)(map(self._swap, value))
        if is_dict(value) and type(value) is dict:
            return {key: self._swap(item) for key, item in value.items()}
        return value


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether a tensor has data of its own: none of a tracer's."""
    if isinstance(tensor, (FakeTensor, FunctionalTensor)):
        return False
    return not is_functional(tensor) and not is_functorch_wrapped(tensor)
