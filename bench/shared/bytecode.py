"""Python's bytecode, as an installation leaves it: a process that starts does not compile hundreds of modules."""

from __future__ import annotations

import compileall
from pathlib import Path

import torch


def compile_package(folder: Path) -> None:
    """Compile all modules of a package that have changed, into its `__pycache__` folders.

    `pip install` does the same. A source tree has no bytecode before its first use, and none at all where
    PYTHONDONTWRITEBYTECODE is set: then a start takes a second more (two cores, 500 modules).

    Args:
        folder: the package.
    """
    compileall.compile_dir(folder, quiet=1)


def compile_installed_packages() -> None:
    """Compile the packages beside PyTorch that have no bytecode, in all cores; one that may not be written stays as it is.

    `pip install` has done it; `uv pip install` does not by default.
    """
    compileall.compile_dir(Path(torch.__file__).parents[1], quiet=2, workers=0)
