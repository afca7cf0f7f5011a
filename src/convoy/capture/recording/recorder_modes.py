"""The modes of PyTorch under which a run is recorded: one sees the calls, the other the values that Python reads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, cast

import torch
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.overrides import TorchFunctionMode


class RecordCalls(SchemaCheckMode):
    """Sees each call before PyTorch splits composite operators, as the exporter does.

    The exporter's own modes are the only others that PyTorch lets see them; this one is for runs on real tensors.
    """

    def __init__(self, record: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._dispatch_key = torch._C.DispatchKey.PreDispatch
        self._record = record

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: else the first call would import Dynamo, which takes a second or two, to hide this class from it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a call; hidden from Dynamo where that is imported."""
        del types
        record = _record_hidden if "torch._dynamo" in sys.modules else _record
        return record(self._record, func, args, kwargs or {})


def _record(record: Callable[..., Any], func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    with cast("Any", torch._C)._DisablePythonDispatcher():
        return record(func, args, kwargs)


_record_hidden: Final[Callable[..., Any]] = cast("Any", torch)._disable_dynamo(_record, recursive=True)


_OF_DEVICE: Final = frozenset({"device", "get_device", "is_cpu", "is_cuda", "is_meta"})
"""What tells of a tensor's device; by names of methods and of attributes."""

_METADATA: Final = frozenset(
    {
        "__len__",
        "dim",
        "element_size",
        "get_device",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "nelement",
        "ndimension",
        "numel",
        "size",
        "stride",
    }
)
"""Methods that tell what is known without a tensor's values."""  # fmt: skip

_PROPERTIES: Final = frozenset(
    {
        "device",
        "dtype",
        "is_cpu",
        "is_cuda",
        "is_leaf",
        "is_quantized",
        "is_sparse",
        "layout",
        "ndim",
        "requires_grad",
        "shape",
    }
)


class RefuseReadValues(TorchFunctionMode):
    """Refuses a run in which Python reads values out of a tensor, or writes a tensor's attributes: no operator shows that.

    Args:
        refuse: called then.
        of_device: called where Python asks for a tensor's device; None: it may.
    """

    def __init__(self, refuse: Callable[[], None], of_device: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._refuse, self._of_device = refuse, of_device

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        del types
        named: dict[str, Any] = kwargs or {}
        name = getattr(func, "__name__", "")
        known = _METADATA
        if name == "__get__":
            name, known = getattr(getattr(func, "__self__", None), "__name__", ""), _PROPERTIES
        if self._of_device is not None and name in _OF_DEVICE:
            self._of_device()
        made = func(*args, **named)
        given = any(isinstance(arg, torch.Tensor) for arg in (*args, *named.values()))
        if given and not _is_of_tensors(made) and name not in known:
            self._refuse()
        return made


def _is_of_tensors(made: Any) -> bool:
    """Whether a result is a tensor, or several: the calls that made them are seen."""
    several = cast("tuple[Any, ...] | list[Any]", made) if isinstance(made, (tuple, list)) else (made,)
    return bool(several) and all(isinstance(each, torch.Tensor) for each in several)
