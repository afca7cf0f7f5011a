"""What calls of a model leave in its Python attributes, and whether later results depend on it, which a graph would leave out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from convoy.capture.state.attribute_snapshot import AttributeSnapshot
from convoy.capture.state.call_leftovers import CallLeftovers, values_at
from convoy.capture.state.python_state import is_torchs
from convoy.engines.torch_flags import convolutions, without_onednn
from convoy.errors import CaptureError
from convoy.measurement.accuracy import relative_error
from convoy.pipeline.check.rounding import fixed_seed
from convoy.pipeline.isolation import IsolatedCopy, attributes_of
from convoy.program.calls import tensors_of
from convoy.typed_torch import named_modules

_NOISE_FACTOR = 10.0
"""Results of a nondeterministic model differ from call to call: only more than this multiple of that is the effect of a state."""


_MOST_NOISE = 1e-2
"""Results that differ by more from call to call are drawn or counted: no order of additions changes them so much."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call's results, and the names of the attributes that it changed: all, and numbers and collections alone."""

    results: list[torch.Tensor]
    changed: list[str]
    counted: str


def check_attributes(isolated: IsolatedCopy, device: str) -> tuple[str, CallLeftovers]:
    """Compare calls of one copy of a model that changes its attributes. A cache that the first call fills is allowed.

    A call with other values comes before the example's in a further copy: a cache of these values shows in the results.

    Args:
        isolated: further copies are made of it.
        device: where it runs.

    Returns:
        A note of tensors that every call stores, and a program does not, empty if there are none; and what calls leave.

    Raises:
        CaptureError: the results depend on what the calls before left, or every call changes a number or a collection.
    """
    try:
        copy = isolated.another()
        first, second, third = _calls(copy, device, 3)
        if second.counted:
            raise CaptureError(
                f"the model changes its attribute {second.counted} in every call, which a graph does not do"
            )
        changed = second.changed or first.changed
        difference = max(_difference(first.results, second.results), _difference(second.results, third.results))
        after = _after_other_values(isolated, device) if changed else first.results
        if after is not None:
            difference = max(difference, _difference(first.results, after))
        if difference and changed:
            (again,) = _calls(isolated.another(), device, 1)
            if difference > _NOISE_FACTOR * _difference(first.results, again.results):
                raise CaptureError(f"the model's results depend on its attribute {changed[0]}, which a call changes")
    except CaptureError:
        raise
    except Exception:  # out of memory, or an error of the user's code: the end-to-end check reports it
        return "", CallLeftovers()
    lasting = [name for name in first.changed if name not in second.changed]
    overwritten = frozenset(values_at(copy.model, second.changed)) if after is not None else frozenset[str]()
    leftovers = CallLeftovers(values_at(copy.model, lasting), overwritten)
    modules = dict(named_modules(isolated.model))
    stored = [name for name in second.changed if not is_torchs(modules[name.rpartition(".")[0]])]
    if not stored:
        return "", leftovers
    names = ", ".join(stored[:3]) + (", ..." if len(stored) > 3 else "")
    note = (
        f"PyTorch stores a tensor in {names} in every call of the model, the program does not; `fast.stock` still does"
    )
    return note, leftovers


def check_repeats(
    called: IsolatedCopy, isolated: IsolatedCopy, device: str, first: list[torch.Tensor] | None = None
) -> None:
    """Call a model again, of whose attributes none changed: it may keep something in an array, an iterator or another object.

    Args:
        called: a copy of the model.
        isolated: further copies are made of it.
        device: where it runs.
        first: the results of `called`'s first call; None if it was not called yet.

    Raises:
        CaptureError: the second call's results are others, although a further copy repeats the first's.
    """
    try:
        before = [tensor.clone() for tensor in first] if first is not None else _calls(called, device, 1)[0].results
        difference = _difference(before, _calls(called, device, 1)[0].results)
        if not difference:
            return
        noise = _difference(before, _calls(isolated.another(), device, 1)[0].results)
        if difference > min(_MOST_NOISE, _NOISE_FACTOR * noise) and _differs_without_onednn(isolated, device):
            raise CaptureError("the model's results depend on its calls before, or on numbers that it draws itself")
    except CaptureError:
        raise
    except Exception:  # out of memory, or an error of the user's code: the end-to-end check reports it
        return


def _differs_without_onednn(isolated: IsolatedCopy, device: str) -> bool:
    """Whether two calls of a further copy differ by PyTorch's own convolutions too.

    Some of oneDNN's read memory that nobody wrote (`convoy.engines.known_defects`): their results are others by chance.
    """
    if device != "cpu":
        return True
    with without_onednn():
        first, second = _calls(isolated.another(), device, 2)
    return _difference(first.results, second.results) > 0


def left_by_calls(isolated: IsolatedCopy) -> tuple[CallLeftovers, frozenset[str]]:
    """What calls of an isolated model leave in it; nothing if a call fails.

    Args:
        isolated: its model is called, twice.

    Returns:
        The attributes that the first call changes, with the values that it leaves; and all attributes that either call
        changes, with the buffers that it replaces, by `module.attribute`.
    """
    first, changed = CallLeftovers(), set[str]()
    try:
        for count in range(2):
            snapshot, buffers = AttributeSnapshot(isolated.model), _buffers_of(isolated.model)
            args, kwargs = isolated.arguments()
            with torch.no_grad(), fixed_seed():
                isolated.model(*args, **kwargs)
            left, now = values_at(isolated.model, snapshot.changed()), _buffers_of(isolated.model)
            changed.update(left, (name for name in buffers if now.get(name) is not buffers[name]))
            first = first if count else CallLeftovers(left)
    except Exception:  # out of memory, or an error of the user's code: then every change counts
        return CallLeftovers(), frozenset()
    return first, frozenset(changed)


def _buffers_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Buffers by qualified name, those that are None too."""
    found = ((path, *item) for path, module in named_modules(model) for item in module._buffers.items())
    return {f"{path}.{name}" if path else name: buffer for path, name, buffer in found}


def _after_other_values(isolated: IsolatedCopy, device: str) -> list[torch.Tensor] | None:
    """Results of a call that follows one with other values; None if the model does not take these."""
    copy = isolated.another()
    args, kwargs = pytree.tree_map(_other_value, copy.arguments())
    try:
        with torch.no_grad(), convolutions("as_torch", torch.device(device)), fixed_seed():
            copy.model(*args, **kwargs)
    except Exception:  # the user's forward may refuse these values in any way
        return None
    return _calls(copy, device, 1)[0].results


def _other_value(value: Any) -> Any:
    """Half of a floating-point tensor, and a little more: zeros change too."""
    is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value * 0.5 + 0.125 if is_number else value


def _calls(isolated: IsolatedCopy, device: str, count: int) -> list[_Call]:
    made: list[_Call] = []
    with torch.no_grad(), convolutions("as_torch", torch.device(device)):
        for _ in range(count):
            snapshot, before = AttributeSnapshot(isolated.model), attributes_of(isolated.model)
            args, kwargs = isolated.arguments()
            with fixed_seed():
                results = [tensor.detach().clone() for tensor in tensors_of(isolated.model(*args, **kwargs))]
            after = attributes_of(isolated.model)
            counted = next((name for name in before | after if before.get(name) != after.get(name)), "")
            made.append(_Call(results, snapshot.changed(), counted))
    return made


def _difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """The largest relative error between two calls' results; infinite where they have other shapes."""
    if [(a.shape, a.dtype) for a in one] != [(b.shape, b.dtype) for b in other]:
        return float("inf")
    pairs = zip(one, other, strict=True)
    return max((relative_error(a, b.double()) for a, b in pairs if not torch.equal(a, b)), default=0.0)
