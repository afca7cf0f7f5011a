"""Python's bytecode of a package, as an installation leaves it: a process that starts does not compile hundreds of modules."""

from __future__ import annotations

import compileall
from pathlib import Path


def compile_package(folder: Path) -> None:
    """Compile all modules of a package that have changed, into its `__pycache__` folders.

    `pip install` does the same. A source tree has no bytecode before its first use, and none at all where
    PYTHONDONTWRITEBYTECODE is set: then a start takes a second more (two cores, 500 modules).

    Args:
        folder: the package.
    """
    compileall.compile_dir(folder, quiet=1)
