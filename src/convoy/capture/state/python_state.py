"""PythonState: what a model's forward does besides computing, which a graph of its operators would leave out."""

from __future__ import annotations

import contextlib
import random
import sys
from collections import deque
from collections.abc import Generator
from typing import Any, Final, cast

import torch
from torch import nn

from convoy.capture.tensor_substitution import is_ordinary
from convoy.errors import CaptureError
from convoy.narrowing import is_dict, is_sequence

_PLAIN: Final = (int, float, bool, str, type(None))
_CONTAINERS: Final = cast("tuple[type[Any], ...]", (list, dict, set, deque))
_NO_OBJECTS: Final = cast("tuple[type[Any], ...]", (torch.Tensor, nn.Module, type))
_OWN: Final = frozenset({"_parameters", "_buffers", "_modules"})


class PythonState:
    """Watches runs of a module by a tracer.

    Args:
        module: a copy, whose attributes the runs may change.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._last: dict[tuple[int, str], object] | None = None
        self._refused = ""

    @contextlib.contextmanager
    def watched(self) -> Generator[None]:
        """Watch a run. Random numbers drawn from Python and NumPy are given back."""
        generators = _generators()
        try:
            yield
        finally:
            if _generators() != generators:
                self._refused = "draws random numbers from Python or NumPy"
                _restore(generators)
        self._note()

    def check(self) -> None:
        """Raise CaptureError where a run did what a graph would leave out."""
        if self._refused:
            raise CaptureError(f"the model or its loss {self._refused}, which a graph would leave out")

    def _note(self) -> None:
        """Compare with the run before: a value that is cached stays, one that is counted does not."""
        found: dict[tuple[int, str], object] = {}
        for index, module in enumerate(self._module.modules()):
            for name, value in vars(module).items():
                if name in _OWN:
                    continue
                if _holds_traced(value) and not is_torchs(module):
                    self._refused = f"stores a tensor in {type(module).__name__}.{name}"
                if isinstance(value, _PLAIN):
                    found[index, name] = value
                elif isinstance(value, _CONTAINERS):
                    found[index, name] = len(value)
                elif hasattr(value, "__dict__") and not isinstance(value, _NO_OBJECTS):
                    found[index, name] = _numbers_of(value)
        before = found if self._last is None else self._last
        for key, value in found.items():
            if key not in before or before[key] != value:
                self._refused = f"changes the attribute {key[1]!r} of a module in every call"
        self._last = found


def _numbers_of(value: Any) -> dict[str, object]:
    """Numbers and strings in the attributes of an object that may count, such as a meter."""
    held = cast("dict[str, object]", vars(value))
    return {name: one for name, one in held.items() if isinstance(one, _PLAIN)}


def is_torchs(module: nn.Module) -> bool:
    """Whether what a module stores is torch's affair: an LSTM's list of weights, or a weight that `weight_norm` computes."""
    return type(module).__module__.startswith("torch.nn.") or bool(vars(module)["_forward_pre_hooks"])


def _holds_traced(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not is_ordinary(value)
    if is_dict(value):
        return any(isinstance(item, torch.Tensor) and not is_ordinary(item) for item in value.values())
    if is_sequence(value):
        return any(isinstance(item, torch.Tensor) and not is_ordinary(item) for item in value)
    return False


def _generators() -> tuple[Any, Any]:
    """The states of Python's and NumPy's generators, to be compared and put back."""
    numpy = sys.modules.get("numpy")
    theirs: Any = None
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        theirs = (kind, keys.tobytes(), *rest)
    return random.getstate(), theirs


def _restore(generators: tuple[Any, Any]) -> None:
    ours, theirs = generators
    random.setstate(ours)
    numpy = sys.modules.get("numpy")
    if numpy is not None and theirs is not None:
        kind, keys, *rest = theirs
        numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))
