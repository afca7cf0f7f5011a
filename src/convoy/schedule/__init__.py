"""Order, lifetimes and memory of what was chosen. No torch here."""

from __future__ import annotations

from convoy.schedule.memory import Arena, check, lifetimes, plan_memory

__all__ = ["Arena", "check", "lifetimes", "plan_memory"]
