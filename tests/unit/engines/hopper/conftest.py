"""Fixtures that the tests of CUDA engines share."""

import pytest

from convoy.engines.hopper import hopper_support_checks


@pytest.fixture
def libraries_are_there(monkeypatch):
    """Most tests do not ask whether the libraries of a GPU are installed here."""
    monkeypatch.setattr(hopper_support_checks, "absence", lambda: "")
    monkeypatch.setattr("convoy.engines.triton.triton_build.installed", lambda: True)
