"""The CUDA driver and NVRTC through `cuda-bindings`, whose modules are compiled and have no type information.

Only these two functions import them, so that the rest of the engines can be imported without CUDA.
"""

from __future__ import annotations

from typing import Any


def driver() -> Any:
    """The module `cuda.bindings.driver`; raises ImportError if it is not installed."""
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]

    return driver  # pyright: ignore[reportUnknownVariableType]


def nvrtc() -> Any:
    """The module `cuda.bindings.nvrtc`; raises ImportError if it is not installed, RuntimeError without the library."""
    from cuda.bindings import nvrtc  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]

    return nvrtc  # pyright: ignore[reportUnknownVariableType]
