"""torch's process-wide switches for convolutions, held at a value while a launch is queued."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch


class HeldFlag:
    """A process-wide flag that several threads may hold at one value at once: the first sets it, the last restores it.

    Saving and restoring in each thread would be wrong: of two threads that overlap, the second would save the value that the
    first has set, and leave it set. While the flag is held, other threads' calls see the value too.

    Args:
        owner: returns the object that has the flag.
        name: the flag's name.
        value: the value to hold it at.
    """

    def __init__(self, owner: Callable[[], Any], name: str, value: object) -> None:
        self._owner, self._name, self._value = owner, name, value
        self._lock = threading.Lock()
        self._holders = 0
        self._before: object = None

    @contextmanager
    def held(self) -> Generator[None]:
        """A context in which the flag has the value."""
        with self._lock:
            if self._holders == 0:
                self._before = self._read()
                setattr(self._owner(), self._name, self._value)
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if self._holders == 0:
                    setattr(self._owner(), self._name, self._before)

    def _read(self) -> object:
        """The value to be restored."""
        return getattr(self._owner(), self._name)


class HeldPrecision(HeldFlag):
    """`fp32_precision` of one operator, held at a value. Afterwards it inherits general settings again, if it did before.

    Args:
        owner: returns the object that has the setting.
        backend: returns the module of its backend, whose `fp32_precision` it inherits.
        value: the precision to hold it at.
    """

    def __init__(self, owner: Callable[[], Any], backend: Callable[[], Any], value: str) -> None:
        super().__init__(owner, "fp32_precision", value)
        self._backend = backend

    def _read(self) -> object:
        return own_precision(self._owner(), self._backend())


def own_precision(owner: Any, backend: Any) -> str:
    """`fp32_precision` of one operator as it was set: `none` if it inherits a general setting.

    PyTorch tells the precision in force only. So the general settings change for a moment: a precision that follows them is
    inherited. To write the precision in force would end the inheritance.
    """
    general: Any = torch.backends
    found = str(owner.fp32_precision)
    if found == "none" or (general.fp32_precision, backend.fp32_precision) == ("none", "none"):
        return found
    other = "tf32" if found == "ieee" else "ieee"
    with _precision(general, other):
        if owner.fp32_precision != found:
            return "none"
        # Either the operator has a precision of its own, or its backend has.
        if backend.fp32_precision != found:
            return found
    with _precision(backend, other):
        return found if owner.fp32_precision == found else "none"


@contextmanager
def _precision(owner: Any, value: str) -> Generator[None]:
    before = owner.fp32_precision
    owner.fp32_precision = value
    try:
        yield
    finally:
        owner.fp32_precision = before


def cudnn_conv_flags() -> Any:
    """`torch.backends.cudnn.conv`, which PyTorch's type stubs lack."""
    return torch.backends.cudnn.conv  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]


def onednn_conv_flags() -> Any:
    """`torch.backends.mkldnn.conv`, which PyTorch's type stubs lack."""
    return torch.backends.mkldnn.conv  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]


def precision_owners() -> dict[str, Any]:
    """The objects with PyTorch's precision settings of single operators (`fp32_precision`), by their names in `torch.backends`.

    Reading a setting that was never set gives the one that it inherits.
    """
    backends: Any = torch.backends
    return {
        "cudnn.conv": cudnn_conv_flags(),
        "cudnn.rnn": backends.cudnn.rnn,
        "cuda.matmul": backends.cuda.matmul,
        "mkldnn.conv": onednn_conv_flags(),
        "mkldnn.matmul": backends.mkldnn.matmul,
        "mkldnn.rnn": backends.mkldnn.rnn,
    }


_BENCHMARK = HeldFlag(lambda: torch.backends.cudnn, "benchmark", True)
_NO_BENCHMARK = HeldFlag(lambda: torch.backends.cudnn, "benchmark", False)
_DETERMINISTIC = HeldFlag(lambda: torch.backends.cudnn, "deterministic", True)
_CUDNN_EXACT = HeldPrecision(cudnn_conv_flags, lambda: torch.backends.cudnn, "ieee")
_ONEDNN_OFF = HeldFlag(lambda: torch.backends.mkldnn, "enabled", False)
_ONEDNN_EXACT = HeldPrecision(onednn_conv_flags, lambda: torch.backends.mkldnn, "ieee")


def convolutions(numerics: str, device: torch.device, *, deterministic: bool = False) -> AbstractContextManager[object]:
    """A context in which torch's convolutions keep to `numerics`, and on CUDA are chosen by cuDNN's benchmark.

    `as_torch` and `half` leave torch's precision flags as they are; `strict` makes fp32 products exact, also where the flags
    allow TF32 or bf16 (`torch.backends.*.conv.fp32_precision`, `torch.backends.cudnn.allow_tf32`).

    Args:
        numerics: the rounding that the user allows.
        device: where the convolution runs.
        deterministic: whether cuDNN may use only algorithms that give the same bits in every run.
    """
    if device.type == "cuda":
        stack = ExitStack()
        stack.enter_context(_BENCHMARK.held())
        if deterministic:
            stack.enter_context(_DETERMINISTIC.held())
        if numerics == "strict":
            stack.enter_context(_CUDNN_EXACT.held())
        return stack
    if numerics == "strict" and onednn_conv_flags().fp32_precision not in ("none", "ieee"):
        return _ONEDNN_EXACT.held()
    return nullcontext()


def unsearched_convolutions(device: torch.device) -> AbstractContextManager[object]:
    """A context in which torch's convolutions on CUDA run at once: by cuDNN's heuristics, without a search by the clock.

    PyTorch keeps the first plan that it finds for a convolution, and would use it in later calls that do search. It keeps plans
    of deterministic algorithms apart, so only those are allowed here: later calls search as if this one had not been made.
    """
    if device.type != "cuda":
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(_NO_BENCHMARK.held())
    stack.enter_context(_DETERMINISTIC.held())
    return stack


def without_onednn() -> AbstractContextManager[object]:
    """A context in which torch's convolutions on a CPU are its own."""
    return _ONEDNN_OFF.held()
