"""Tests that share a costly fixture, or the user's time, run in one process where several run them."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("one")
def test_groups_are_kept_together(request: pytest.FixtureRequest) -> None:
    """pytest-xdist tells a group by its name behind the test's; with pytest 9.2 it was lost, and no test failed."""
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@one")
