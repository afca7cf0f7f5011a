"""Deep copies of modules, of those too whose tensors are computed, as torch.nn.utils.prune and weight_norm leave them."""

from __future__ import annotations

import copy
import logging
import threading
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from convoy.errors import CaptureError
from convoy.typed_torch import named_modules

_LOCKS: Final = (type(threading.Lock()), type(threading.RLock()))
_SHARED: Final = (types.ModuleType, logging.Logger, torch.Generator)
"""Attributes that a copy has in common with its original: they cannot be copied, and `preserve_global_state` restores random
states."""


def copy_module(model: nn.Module, device: torch.device | None = None) -> nn.Module:
    """A deep copy. Attributes that are computed tensors, which `copy.deepcopy` refuses, are copied without their history.

    A pruned module's `weight` is one of these: a hook computes it from `weight_orig` and `weight_mask` before every call, also in
    the copy.

    Args:
        model: what to copy.
        device: where the copy's tensors are made, without one on the model's own device; None: each beside its original.
    """

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(device or tensor.device, copy=True)

    made: dict[int, Any] = {id(t): copied(t) for t in _computed(model)}
    if device is not None:
        made |= {id(p): nn.Parameter(copied(p), p.requires_grad) for p in model.parameters()}
        made |= {id(b): copied(b) for b in model.buffers()}
    return copy.deepcopy(model, made)


def separate_copy(
    model: nn.Module, *, share_parameters: bool = True, tensors: Mapping[int, torch.Tensor] | None = None
) -> nn.Module:
    """A copy that can be run without a trace on the original.

    Buffers, training flags, Python attributes and the list of hooks are the copy's own. Its parameters are new objects, each with
    its own `grad` and `requires_grad`; with `share_parameters` they use the original's memory.

    Args:
        model: not changed.
        share_parameters: whether parameters share memory with the original's. Leave it out where the copy may write to them.
        tensors: `id` of a parameter or buffer → what the copy has there.

    Raises:
        CaptureError: an attribute cannot be copied, or the copy would still hold something of the original's; with its name.
    """
    made = _computed_copies(model) | _stand_ins(model)
    if share_parameters:
        made |= {
            id(p): _alias(p) for p in model.parameters() if type(p) is nn.Parameter and id(p) not in (tensors or {})
        }
    copied = _deepcopy(model, {**made, **(tensors or {})})
    _check_separate(model, copied)
    return copied


def copy_sharing_tensors(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are the original's own: for putting other layers in the place of some.

    Raises:
        CaptureError: an attribute cannot be copied.
    """
    made = _computed_copies(model) | _stand_ins(model)
    made |= {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return _deepcopy(model, made)


def copy_around(model: nn.Module, tensors: Mapping[int, torch.Tensor]) -> nn.Module:
    """A copy with other tensors in the places of some, and the original's own in all other places. For a tracer.

    Args:
        model: not changed.
        tensors: `id` of a parameter or buffer → what the copy has there.

    Raises:
        CaptureError: an attribute cannot be copied.
    """
    with _SharedTensors():
        return _deepcopy(model, {**_stand_ins(model), **tensors})


class _SharedTensors(TorchFunctionMode):
    """Deep copies share their tensors with the originals."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function; a tensor's deep copy is itself."""
        copies = cast("Any", torch.Tensor).__deepcopy__
        return args[0] if func is copies else func(*args, **(kwargs or {}))


def _deepcopy(model: nn.Module, made: dict[int, Any]) -> nn.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # copies of exported programs warn of names inside torch
            copied = copy.deepcopy(model, {**_empty_dicts(model), **made})
            _put_hooks_back(model, copied)
            _put_modes_back(model, copied)
            return copied
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # __deepcopy__ and __reduce__ are the user's code
        words = str(error).partition("\n")[0]
        raise CaptureError(f"the model cannot be copied for tuning: {type(error).__name__}: {words}") from error


def _empty_dicts(model: nn.Module) -> dict[int, Any]:
    """A new dict for each empty one of a module. A layer has ten, mostly for hooks; `copy.deepcopy` takes longest for them."""
    return {
        id(value): type(value)()
        for module in model.modules()
        for value in vars(module).values()
        if type(value) in (dict, OrderedDict) and not value and not getattr(value, "__dict__", None)
    }


def _put_hooks_back(model: nn.Module, copied: nn.Module) -> None:
    """Give a copy the forward hooks that its original has, and the attributes that they read.

    `GraphModule.__deepcopy__` leaves both out. An exported program checks its inputs' sizes in such a hook.
    """
    for name, module in named_modules(model):
        kept = {kind: vars(module).get(kind) for kind in _FORWARD_HOOKS}
        if not isinstance(module, fx.GraphModule) or not any(kept.values()):
            continue
        own = vars(copied.get_submodule(name))
        own.update({attribute: value for attribute, value in vars(module).items() if attribute not in own})
        for kind, hooks in kept.items():
            if hooks and not own.get(kind):
                own[kind] = copy.copy(hooks)


def _put_modes_back(model: nn.Module, copied: nn.Module) -> None:
    """Give a copy the training flags of its original. Copies of torchvision's feature extractors are in training mode."""
    flags = {name: module.training for name, module in named_modules(model)}
    for name, module in named_modules(copied):
        if module.training != flags.get(name, module.training):
            module.training = flags[name]


_FORWARD_HOOKS: Final = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def copied_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments whose tensors are copies without a gradient; one that is given twice becomes two.

    Strides are the same, gaps of a slice included, unless elements share memory (an expanded tensor, windows).

    `torch.export` takes a tensor that is given twice for one input, and views of one tensor for views in every later call.

    Raises:
        CaptureError: an argument that is no tensor cannot be copied.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    given, named = pytree.tree_unflatten([_copied(leaf) for leaf in leaves], spec)
    return given, named


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        own = leaf.detach().clone()
        if own.layout != torch.strided or own.is_quantized or own.stride() == leaf.stride() or 0 in leaf.stride():
            return own
        try:
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device).copy_(own)
        except RuntimeError:  # windows of `unfold`: elements share memory
            return own
    try:
        return copy.deepcopy(leaf)
    except Exception as error:  # everything: __deepcopy__ and __reduce__ are the user's code
        raise CaptureError(f"an argument of type {type(leaf).__name__} cannot be copied for tuning: {error}") from error


def are_separate(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether no two tensors among arguments share memory."""
    tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    addresses = [address for address in map(_address, tensors) if address is not None]
    return len(set(addresses)) == len(addresses)


def _computed(model: nn.Module) -> Iterator[torch.Tensor]:
    """Attributes that are results of other tensors; `copy.deepcopy` refuses them."""
    held = (value for module in model.modules() for value in vars(module).values())
    return (value for value in held if isinstance(value, torch.Tensor) and not value.is_leaf)


def _computed_copies(model: nn.Module) -> dict[int, Any]:
    """`id` of each attribute that is a computed tensor → a copy without its history."""
    return {id(tensor): tensor.detach().clone() for tensor in _computed(model)}


def _stand_ins(model: nn.Module) -> dict[int, Any]:
    """In the place of attributes that cannot be copied: new locks; loggers, Python modules and process groups as they are."""
    made: dict[int, Any] = {}
    for name, module in named_modules(model):
        for attribute, value in vars(module).items():
            if isinstance(value, _LOCKS):
                made[id(value)] = type(value)() if isinstance(value, _LOCKS[1]) else threading.Lock()
            elif isinstance(value, _SHARED) or type(value).__name__ == "ProcessGroup":
                made[id(value)] = value
            elif isinstance(value, weakref.ref) and isinstance(value(), nn.Module):
                raise CaptureError(
                    f"{name or 'the model'} holds a weak reference to a module, {attribute}: a copy would use it"
                )
    return made


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    """Another parameter of the same memory and version counter, with the attributes that people set on it."""
    with torch.no_grad():
        alias = nn.Parameter(parameter.detach(), parameter.requires_grad)
    vars(alias).update(vars(parameter))
    return alias


def _check_separate(model: nn.Module, copied: nn.Module) -> None:
    """Refuse a copy that holds modules or buffers of its original, as a `__deepcopy__` of the user's may make it."""
    own = {id(module) for module in model.modules()}
    for name, module in named_modules(copied):
        if id(module) in own:
            raise CaptureError(f"the model cannot be copied for tuning: {name or 'it'} copies itself as itself")
    held = {address: name for name, tensor in model.named_buffers() if (address := _address(tensor)) is not None}
    for name, tensor in copied.named_buffers():
        if _address(tensor) in held:
            raise CaptureError(f"the model cannot be copied for tuning: the copy shares the buffer {name}")
    for (name, module), other in zip(named_modules(model), copied.modules(), strict=False):
        for attribute, value in vars(other).items():
            if value is not None and _holds_original(value, own):
                raise CaptureError(
                    f"the model cannot be copied for tuning: {name or 'its'} attribute {attribute} of type"
                    f" {type(value).__name__} calls {type(module).__name__} by name"
                )


def _address(tensor: torch.Tensor) -> int | None:
    """Address of a tensor's memory; None where there is none to share."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):  # sparse tensors, tensors of other kinds
        return None


def _holds_original(value: Any, modules: set[int]) -> bool:
    """Whether a function closes over one of these modules or one of their methods: copies of functions are the functions."""
    if not isinstance(value, types.FunctionType):
        return False
    held = [*(cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)), *(value.__defaults__ or ())]
    return any(id(item) in modules or id(getattr(item, "__self__", None)) in modules for item in held)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty one raises
    except ValueError:
        return False
    return True
