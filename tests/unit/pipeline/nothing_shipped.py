"""As on a device of a kind that no row and no criteria ship for. Not a test module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from convoy.perfdb import shipped
from convoy.tune import criteria_file


@contextmanager
def nothing_shipped(folder: Path) -> Iterator[None]:
    """An empty folder stands for the one that the package ships, for a while."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (shipped, criteria_file):
            patch.setattr(module, "shipped_folder", lambda: folder)
        yield
