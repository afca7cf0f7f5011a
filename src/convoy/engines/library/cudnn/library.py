"""The cuDNN frontend: imported where it is there, with a handle for every thread and device.

Nothing here runs when the module is imported: a machine without the package, or without a GPU, gets a reason instead.
"""

from __future__ import annotations

import importlib
import threading
from functools import cache
from typing import Any, Final

import torch

OLDEST_BACKEND: Final = 90200
"""cuDNN 9.2: the first version that reports a plan's workspace before the plan is built (cudnn-frontend, plans.h,
check_support_at_index)."""

_NEEDED: Final = ("create_execution_plan", "get_engine_and_knobs_at_index")
"""Methods of the frontend's graph that are needed to rebuild a plan from its engine and knobs."""

_INSTALL: Final = "pip install 'convoy-cnn[gpu]'"


@cache
def load() -> Any:
    """The frontend's module.

    Raises:
        ImportError: it is not installed.
        OSError: it is, and cannot be loaded.
    """
    return importlib.import_module("cudnn")


@cache
def absence() -> str:
    """Why cuDNN cannot be used in this process, as a phrase; empty where it can."""
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU, and torch finds none"
    try:
        frontend = load()
    except (ImportError, OSError):
        return f"needs nvidia-cudnn-frontend: {_INSTALL}"
    if missing := [name for name in _NEEDED if not hasattr(frontend.pygraph, name)]:
        found = getattr(frontend, "__version__", "an unknown version")
        return f"needs an nvidia-cudnn-frontend with {missing[0]}, got {found}: {_INSTALL}"
    try:
        backend = int(frontend.backend_version())
    except RuntimeError:  # the frontend's message: "Unable to find symbol cudnnGetVersion"
        return "needs libcudnn, which nvidia-cudnn-frontend does not find"
    return "" if backend >= OLDEST_BACKEND else f"needs cuDNN 9.2 or newer, got {backend}"


def errors() -> tuple[type[BaseException], ...]:
    """The exceptions that the frontend raises if it or cuDNN refuses: its own (no RuntimeError), or its binding's."""
    return load().cudnnGraphNotSupportedError, RuntimeError, ValueError


def unsupported() -> type[Exception]:
    """The frontend's exception for a graph that cuDNN has no plan for."""
    found: type[Exception] = load().cudnnGraphNotSupportedError
    return found


def device() -> int:
    """PyTorch's current device."""
    return torch.cuda.current_device()


def first_line(error: BaseException, most: int = 160) -> str:
    """The beginning of an error's message, for a reason that is one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:most]


class Handles(threading.local):
    """cuDNN handles of one thread, by device."""

    def __init__(self) -> None:
        self.by_device: dict[int, Any] = {}


HANDLES = Handles()


def handle() -> Any:
    """This thread's handle on PyTorch's current device, set to PyTorch's current stream.

    cuDNN forbids sharing a handle between threads. Creating one allocates memory, so a thread's first launch must not be
    captured.
    """
    frontend, device = load(), torch.cuda.current_device()
    found = HANDLES.by_device.get(device)
    if found is None:
        found = HANDLES.by_device[device] = frontend.create_handle()
    frontend.set_stream(handle=found, stream=torch.cuda.current_stream().cuda_stream)
    return found
