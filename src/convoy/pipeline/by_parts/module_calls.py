"""module_calls: how a model calls its modules. For a model that cannot be captured whole, whose modules may be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from convoy.capture.export import evaluation_mode
from convoy.pipeline.check.rounding import fixed_seed
from convoy.pipeline.isolation import IsolatedCopy
from convoy.program.call_forms import CallArguments
from convoy.program.calls import Signature, map_tensors, signature_of
from convoy.typed_torch import named_modules


@dataclass(slots=True)
class ModuleCalls:
    """The calls of one module in one call of a model.

    Attributes:
        examples: arguments of the first call of each signature (shapes, dtypes, values of other arguments).
        seconds: wall time of all calls together, with the modules inside.
    """

    examples: dict[Signature, CallArguments] = field(default_factory=dict[Signature, CallArguments])
    seconds: float = 0.0


def module_calls(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], paths: Iterable[str] | None = None
) -> dict[str, ModuleCalls]:
    """Run a model once in evaluation mode and record the calls of its modules.

    A module with several names has the first of them. A module that its parent does not call, such as a list of layers, is not
    in the result. Arguments keep their memory format; they are as they are after the run, if the model overwrites them.

    Args:
        model: its hooks and training flags are the same afterwards.
        args: arguments, which the model may overwrite.
        kwargs: keyword arguments, likewise.
        paths: qualified names of the modules to record; all by default.

    Returns:
        qualified name → its calls, in the order of the first calls' beginnings; "" is the model itself.
    """
    cuda = any(tensor.is_cuda for tensor in model.parameters())
    wanted = None if paths is None else set(paths)
    found: dict[str, ModuleCalls] = {}
    begun: dict[str, float] = {}

    def before(name: str) -> Any:
        def note(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            calls = found.setdefault(name, ModuleCalls())
            calls.examples.setdefault(signature_of(given, named), _detached(given, named))
            begun[name] = _now(cuda=cuda)

        return note

    def after(name: str) -> Any:
        def note(*_: object) -> None:
            found[name].seconds += _now(cuda=cuda) - begun[name]

        return note

    with ExitStack() as stack:
        for name, module in named_modules(model):
            if wanted is None or name in wanted:
                # Scripted modules take no hooks with keyword arguments: they are recorded as if they were not called.
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                stack.callback(module.register_forward_pre_hook(before(name), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(after(name)).remove)
        with evaluation_mode(model), torch.no_grad(), fixed_seed():
            model(*args, **kwargs)
    return found


def depends_on_data(calls: dict[str, ModuleCalls], isolated: IsolatedCopy) -> set[str]:
    """Names of modules that calls of the model with other values of the same shapes call otherwise.

    The second head of a detector is one: the number of regions that it is given depends on the image. The other values are those
    of the arguments with each row reversed, and half of them. A model that refuses them is taken for one whose calls do not
    depend on data.

    Args:
        calls: the calls of the first call (`module_calls`).
        isolated: a copy of the model, which is run.
    """
    changed = [_with_other_values(isolated, change, calls) for change in (_reversed_rows, _halved)]
    return {
        name
        for others in changed
        for name, found in calls.items()
        if name in others and others[name].examples.keys() != found.examples.keys()
    }


def _with_other_values(
    isolated: IsolatedCopy, change: Callable[[torch.Tensor], torch.Tensor], paths: Iterable[str]
) -> dict[str, ModuleCalls]:
    args, kwargs = isolated.arguments()
    try:
        return module_calls(isolated.model, map_tensors(change, args), map_tensors(change, kwargs), paths)
    except Exception:  # the user's forward may refuse these values in any way
        return {}


def _reversed_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flip(-1) if tensor.is_floating_point() and tensor.dim() else tensor


def _halved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor / 2 if tensor.is_floating_point() else tensor


def _detached(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
    return map_tensors(torch.Tensor.detach, args), map_tensors(torch.Tensor.detach, kwargs)


def _now(*, cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()
