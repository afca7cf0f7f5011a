"""Messages for models that PyTorch cannot trace: the cause in the user's code, then PyTorch's own message."""

from __future__ import annotations

from typing import Final

_LONGEST_MESSAGE: Final = 2000
"""Characters of the tracer's words that are kept: its hints come first, its pages of context last."""

_DECIDES: Final = "values of a tensor decide what runs, as with `if x.sum() > 0`, `.item()` or `.tolist()`"

_MEANINGS: Final = {
    "DataDependentOutputException": _DECIDES,
    "GuardOnDataDependentSymNode": _DECIDES,
    "DynamicOutputShapeException": "values of a tensor decide the shape of another, as with boolean masks and `nonzero()`",
}
"""By the name of the error's class: most are private to PyTorch, and their messages name an operator or a symbol alone."""

_UNKNOWN_OUTPUT: Final = "in output, which is not a known type"
_REGISTER: Final = (
    "a result is of a class that PyTorch's pytree does not know; call torch.export.register_dataclass(CLASS)"
)


def tracer_words(error: BaseException) -> str:
    """An error of torch.export, AOTAutograd or FakeTensor as a clause; its first line is short, and may be followed by others."""
    words = str(error).strip()[:_LONGEST_MESSAGE]
    named = f"{type(error).__name__}: {words}" if words else type(error).__name__
    meaning = next((_MEANINGS[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in _MEANINGS), "")
    if _UNKNOWN_OUTPUT in words:
        meaning = _REGISTER
    return f"{meaning} ({named})" if meaning else named
