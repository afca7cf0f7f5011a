"""Support: whether an engine supports a problem, as a value and never as an exception."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Support:
    """Yes, or no with a reason. Truthy if yes; a no without a reason is refused."""

    ok: bool
    reason: str = ""

    def __post_init__(self) -> None:
        if not self.ok and not self.reason:
            raise ValueError("Support.no needs a reason")

    def __bool__(self) -> bool:
        return self.ok

    @staticmethod
    def yes() -> Support:
        """The engine supports it, with its default knobs, on this target."""
        return _YES

    @staticmethod
    def no(reason: str) -> Support:
        """The engine does not support it; `reason` is a phrase that a user can act on ("needs groups = 1, got 4")."""
        return Support(False, reason)


_YES = Support(True)
