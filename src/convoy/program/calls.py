"""Calls of a module: their signature and strides, and torch's modes under which a program must not run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace as fx_state

Signature = tuple[Any, ...]
"""Shapes, dtypes and devices of a call's tensors, and the values of its other arguments. A program is for one signature."""

Strides = tuple[tuple[int, ...], ...]
"""Strides of a call's tensors, in order."""

PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})

_VALUES: Final = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)

# With these types, a checker narrows a value to Any after `isinstance`, not to a container of unknown items.
_SEQUENCES: Final = cast("tuple[type[Any], ...]", (tuple, list))
_DICT: Final[type[Any]] = dict


class _ByIdentity:
    """An argument that is compared by identity."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def signature_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Signature:
    """The signature of a call: nested tuples with tensors replaced by shape, dtype and device. Keywords count in their order."""
    return tuple(map(_sign, args)), tuple([(name, _sign(value)) for name, value in kwargs.items()])


def _sign(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if not is_plain(value):
            return ("other tensor", _ByIdentity(value))
        return ("tensor", tuple(value.shape), value.dtype, value.device)
    if isinstance(value, _SEQUENCES):
        return (type(value), *map(_sign, value))
    if isinstance(value, _DICT):
        return (type(value), *((key, _sign(item)) for key, item in value.items()))
    return ("value", type(value), value if isinstance(value, _VALUES) else _ByIdentity(value))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a kernel can read a tensor by its address: it is not fake, sparse, nested, or lazily negated or conjugated."""
    return (
        type(tensor) in PLAIN
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_meta or tensor.is_neg() or tensor.is_conj())
    )


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, _SEQUENCES):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, _DICT):
        for item in value.values():
            yield from tensors_of(item)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Nested tuples, lists and dicts with each tensor replaced by the function's result."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, _SEQUENCES):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, _DICT):
        made = {key: map_tensors(function, item) for key, item in value.items()}
        return made if type(value) is dict else type(value)(made)
    return value


def has_internal_overlap(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor share memory, as in an expanded tensor."""
    sides = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    reach = 0
    for stride, size in sides:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


@dataclass(frozen=True, slots=True)
class TensorKind:
    """The dtype of a module's floating-point tensors and the device of all its tensors; None where there are several or none."""

    dtype: torch.dtype | None
    device: torch.device | None

    @staticmethod
    def of(module: torch.nn.Module) -> TensorKind:
        """That of a module's parameters and buffers."""
        tensors = [*module.parameters(), *module.buffers()]
        dtypes = list({tensor.dtype for tensor in tensors if tensor.is_floating_point()})
        devices = list({tensor.device for tensor in tensors})
        return TensorKind(dtypes[0] if len(dtypes) == 1 else None, devices[0] if len(devices) == 1 else None)


@dataclass(frozen=True, slots=True)
class CallExample:
    """The arguments that a program was made for, without their values.

    Attributes:
        args: positional arguments; tensors are on the meta device.
        kwargs: keyword arguments, likewise.
        devices: devices of the tensors, in order.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    devices: tuple[torch.device, ...]

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallExample:
        """The example of a call."""
        devices = tuple(tensor.device for tensor in tensors_of((args, dict(kwargs))))
        return CallExample(map_tensors(_without_values, args), map_tensors(_without_values, dict(kwargs)), devices)

    @property
    def strides(self) -> Strides:
        """Strides of the tensors."""
        return tuple(tensor.stride() for tensor in tensors_of((self.args, self.kwargs)))

    def moved(self, kind: TensorKind, other: TensorKind) -> CallExample:
        """The example for a module whose tensors had one dtype and device, and now have another.

        Args:
            kind: what the module's tensors were; tensors of the example that are like them are changed.
            other: what they are now.
        """

        def change(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(other.dtype) if tensor.dtype == kind.dtype and other.dtype is not None else tensor

        devices = tuple(
            other.device if device == kind.device and other.device is not None else device for device in self.devices
        )
        return CallExample(map_tensors(change, self.args), map_tensors(change, self.kwargs), devices)

    def zeros(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of zeros of the same shapes, strides, dtypes and devices."""
        devices = iter(self.devices)

        def zero(tensor: torch.Tensor) -> torch.Tensor:
            # As a view: an expanded tensor, whose elements share memory, cannot be filled.
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            count = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
            flat = torch.zeros(count, dtype=tensor.dtype, device=next(devices))
            return flat.as_strided(tensor.shape, tensor.stride())

        return map_tensors(zero, self.args), map_tensors(zero, self.kwargs)


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    if not is_plain(tensor):
        return torch.empty(0, dtype=tensor.dtype, device="meta")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


# --- torch's modes around a call ----------------------------------------------------------------------------------------------

Autocast = tuple[tuple[str, torch.dtype], ...]
"""Device types for which autocast is on, with its dtype."""

_DEVICES: Final = ("cpu", "cuda")


def autocast_state() -> Autocast:
    """Device types for which autocast is on now."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    return tuple((d, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d))


@contextlib.contextmanager
def autocast_as(state: Autocast) -> Generator[None]:
    """Switch autocast on for the device types of a state, and off for others."""
    wanted = dict(state)
    with contextlib.ExitStack() as stack:
        for device in _DEVICES:
            dtype = wanted.get(device)
            if dtype is not None or torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=dtype is not None))
        yield


def is_traced() -> bool:
    """Whether the call is traced, by `torch.compile`, `torch.export`, `torch.jit` or `torch.fx`, and a stock module must run."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or fx_state._is_fx_tracing_flag  # pyright: ignore[reportPrivateImportUsage] - `is_tracing` is public, but not in __all__


def why_modes_forbid(autocast: Autocast | None = None, default_dtype: torch.dtype | None = None) -> str | None:
    """Why a program must not run under torch's present modes; None if it may.

    Args:
        autocast: the state under which the program was made; None if autocast does not matter.
        default_dtype: PyTorch's when the program was made; None if it does not matter.
    """
    if default_dtype is not None and torch.get_default_dtype() != default_dtype:
        return f"the default dtype is {torch.get_default_dtype()} and was {default_dtype} when the program was made"
    now = autocast_state()
    if autocast is not None and now != autocast:
        return f"autocast is {_shown(now)} and was {_shown(autocast)} when the program was made (give both the same)"
    if torch._C._are_functorch_transforms_active():
        return "the call is inside a transform of torch.func"
    if torch._C._len_torch_dispatch_stack():
        return "a torch dispatch mode is active"
    if forward_ad._current_level >= 0:  # pyright: ignore[reportUnknownMemberType] - a private counter without annotation
        return "forward-mode differentiation is active"
    return None


def why_not_plain(tensors: Sequence[torch.Tensor]) -> str | None:
    """Why a kernel cannot read these tensors; None if it can."""
    for tensor in tensors:
        if not is_plain(tensor):
            kind = _kind_of(tensor)
            return f"an input is a {type(tensor).__name__} ({kind}), which has no plain memory"
    return None


def _kind_of(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return "nested"
    if tensor.is_meta:
        return "on the device meta"
    if tensor.is_conj() or tensor.is_neg():
        return "a lazy conjugate or negative; .resolve_conj() and .resolve_neg() compute it"
    return str(tensor.layout).removeprefix("torch.")


def _shown(autocast: Autocast) -> str:
    return ", ".join(f"{dtype} on {device}" for device, dtype in autocast) or "off"
