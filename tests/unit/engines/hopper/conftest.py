"""What the tests of CUDA engines share."""

import pytest

from convoy.engines.hopper import hopper_support_checks


@pytest.fixture
def libraries_are_there(monkeypatch):
    """Whether the libraries of a GPU are installed here is not what most tests ask."""
    monkeypatch.setattr(hopper_support_checks, "absence", lambda: "")
    monkeypatch.setattr("convoy.engines.triton.triton_build.installed", lambda: True)
