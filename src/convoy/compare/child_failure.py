"""Why the process of a framework failed, as a status and a reason for its row."""

from __future__ import annotations

from convoy.compare.frameworks.base import UnsupportedCaseError
from convoy.errors import InputError

_NO_MEMORY = (
    "out of memory",
    "resource_exhausted",
    "can't allocate memory",
    "bad_alloc",
    "failed to allocate",
    "oom when",
)


class WrongResultError(Exception):
    """No way to set the framework gave the right numbers."""


def failure(error: BaseException, stage: str) -> dict[str, str]:
    """Status and reason of an exception; the user's own input is told apart, because no framework is to blame for it."""
    words = f"{type(error).__name__}: {error}".strip()
    if isinstance(error, InputError):
        fields = {"argument": error.argument, "value": str(error.value), "expected": error.expected, "todo": error.todo}
        return {"status": "launch_error", "reason": words, **fields}
    if isinstance(error, UnsupportedCaseError):
        return {"status": "unsupported", "reason": str(error)}
    if isinstance(error, WrongResultError):
        return {"status": "wrong_result", "reason": str(error)}
    if isinstance(error, MemoryError) or any(word in words.lower() for word in _NO_MEMORY):
        return {"status": "out_of_memory", "reason": words[:4000]}
    status = {"import": "launch_error", "build": "compile_error"}.get(stage, "launch_error")
    return {"status": status, "reason": words[:4000]}
