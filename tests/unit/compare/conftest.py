"""A cache folder of each worker's own, where the device's lock lies: tests side by side are not two runs on one device."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _alone(own_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", own_cache)
