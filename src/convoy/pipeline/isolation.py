"""Isolation: tuning runs copies of a model and its arguments, and restores process-wide state.

`isolate` makes the copies. `preserve_global_state` is held around a public call. One thread tunes at a time: the exporter, the
logging and warning filters and PyTorch's flags are the process's. Random states, environment variables and flags are restored.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from convoy.capture.copies import copied_arguments, separate_copy
from convoy.engines.torch_flags import precision_owners
from convoy.tuning_lock import one_at_a_time
from convoy.typed_torch import named_modules

_TORCHS_OWN: Final = r"torch\."
"""Names of modules inside PyTorch, for Python's filters of warnings."""


@dataclass(frozen=True, slots=True)
class IsolatedCopy:
    """Copies of a model and its arguments.

    Attributes:
        model: a copy in evaluation mode (`separate_copy`).
        args: copies of the arguments, no two of which share memory.
        kwargs: copies of the keyword arguments, likewise.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def another(self) -> IsolatedCopy:
        """Another copy, of this copy's present state; parameters are shared."""
        return IsolatedCopy(separate_copy(self.model), *copied_arguments(self.args, self.kwargs))

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """New copies of the arguments, for a call that may change them."""
        return copied_arguments(self.args, self.kwargs)


def isolate(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    share_parameters: bool = True,
    evaluate: bool = True,
) -> IsolatedCopy:
    """Copy a model, with its parameters' memory shared, and its arguments.

    Args:
        model: not changed.
        args: likewise.
        kwargs: likewise.
        share_parameters: whether the copy's parameters share the original's memory. A model that overrides `train` always gets
            parameters of its own: some merge weights there.
        evaluate: put the copy in evaluation mode; else it has the original's training flags.

    Raises:
        CaptureError: the model or an argument cannot be copied.
    """
    switched = evaluate and any(module.training for module in model.modules())
    share = share_parameters and not (switched and any(map(overrides_train, model.modules())))
    copied = separate_copy(model, share_parameters=share)
    if switched:
        with suppress(NotImplementedError):  # the module of an ExportedProgram: its mode was fixed when it was exported
            copied.eval()
    return IsolatedCopy(copied, *copied_arguments(args, kwargs))


def overrides_train(module: nn.Module) -> bool:
    """Whether a module overrides `train` or `eval` of torch's own classes."""
    kind = type(module)
    inside = kind.__module__.partition(".")[0] == "torch"
    return not inside and (kind.train is not nn.Module.train or kind.eval is not nn.Module.eval)


def attributes_of(model: nn.Module) -> dict[str, object]:
    """Numbers, strings and summaries of collections in the attributes of a model's modules, by `module.attribute`."""
    found: dict[str, object] = {}
    for path, module in named_modules(model):
        for name, value in vars(module).items():
            if isinstance(value, (bool, int, float, str, type(None))):
                found[f"{path}.{name}" if path else name] = value
            elif isinstance(value, (list, dict, set, deque)) and not name.startswith("_"):
                held = cast("list[Any]", value)
                found[f"{path}.{name}" if path else name] = (type(held).__name__, len(held), repr_of(held))
    return found


def repr_of(value: list[Any] | dict[Any, Any] | set[Any] | deque[Any]) -> tuple[object, ...]:
    """The numbers and strings of a collection; other items by their types."""
    items: list[Any] = [*value.items()] if isinstance(value, dict) else [*value]
    leaves: list[object] = pytree.tree_leaves(items)
    return tuple(leaf if isinstance(leaf, (bool, int, float, str, type(None))) else str(type(leaf)) for leaf in leaves)


@contextmanager
def preserve_global_state() -> Generator[None]:
    """Run one thread at a time, and restore random states, environment variables and flags afterwards.

    PyTorch's warnings about what its own modules call, such as Inductor's use of a deprecated function, are not shown: the user
    cannot change that. Warnings at lines of the user's code are.

    Held for the whole of a public call that tunes: two calls that time programs at once would measure each other's load.
    """
    with one_at_a_time(), ExitStack() as stack:
        stack.callback(_random_states())
        stack.callback(_environment())
        stack.callback(_flags())  # with the filters of warnings
        for category in (DeprecationWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category, module=_TORCHS_OWN)
        yield


def _random_states() -> Callable[[], None]:
    """A function that restores the random states of torch, Python and NumPy."""
    cpu, python = torch.get_rng_state(), random.getstate()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else None

    def restore() -> None:
        torch.set_rng_state(cpu)
        random.setstate(python)
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)
        if numpy is not None:
            numpy.random.set_state(drawn)

    return restore


def _environment() -> Callable[[], None]:
    before = dict(os.environ)

    def restore() -> None:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value

    return restore


def _flags() -> Callable[[], None]:
    """A function that restores PyTorch's flags, the warning filters and `logging.disable`."""
    held = [(write, read()) for read, write in _switches()]
    reads = [read for read, _ in _switches()]

    def restore() -> None:
        for read, (write, value) in zip(reads, held, strict=True):
            if read() != value:
                write(value)

    return restore


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(owner, name, None), lambda value: setattr(owner, name, value)


def _switches() -> list[tuple[Callable[[], Any], Callable[[Any], None]]]:
    """For each flag, the functions that read and write it."""
    backends = torch.backends
    switches: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
        (torch.is_grad_enabled, torch._C._set_grad_enabled),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        (sys.getrecursionlimit, sys.setrecursionlimit),
        _attribute(backends.cudnn, "enabled"),
        _attribute(backends.cudnn, "benchmark"),
        _attribute(backends.cudnn, "deterministic"),
        _attribute(backends.mkldnn, "enabled"),
        _attribute(logging.root.manager, "disable"),
        (lambda: list(warnings.filters), _set_filters),
        (lambda: list(sys.path), lambda value: sys.path.__setitem__(slice(None), value)),
    ]
    switches += [_attribute(owner, "fp32_precision") for owner in precision_owners().values()]
    for device in ("cpu", "cuda"):
        switches.append((_bound(torch.is_autocast_enabled, device), _setting(torch.set_autocast_enabled, device)))
        switches.append((_bound(torch.get_autocast_dtype, device), _setting(torch.set_autocast_dtype, device)))
    return switches


def _bound(read: Callable[[str], Any], device: str) -> Callable[[], Any]:
    return lambda: read(device)


def _setting(write: Callable[[str, Any], None], device: str) -> Callable[[Any], None]:
    return lambda value: write(device, value)


def _set_filters(value: list[Any]) -> None:
    cast("list[Any]", warnings.filters)[:] = value
    warnings._filters_mutated()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType] - Python's word for it in 3.11 and 3.12
