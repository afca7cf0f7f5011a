"""The modules that tests share are imported by their bare names, so no two may have one name: the first would win."""

from __future__ import annotations

from collections import Counter
from pathlib import Path


def test_no_two_shared_modules_have_one_name() -> None:
    shared = [p.name for p in Path(__file__).parent.rglob("*.py") if not p.name.startswith(("test_", "conftest"))]
    assert [name for name, count in Counter(shared).items() if count > 1 and name != "__init__.py"] == []
