"""How a problem can be computed: every implementation behind one contract (see base.py).

The package can be called: `convoy.engines()` lists the engines (the public API has a function where Python has a package).
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from convoy.engines.base import Engine


class _Callable(ModuleType):
    """This package, as something that can be called too."""

    def __call__(self) -> list[Engine]:
        """Every engine there is, the baseline first. One whose package or device is missing says so when it is asked."""
        from convoy.engines.manifest import MANIFEST, load_engine

        return [load_engine(engine) for engine in MANIFEST]


sys.modules[__name__].__class__ = _Callable
