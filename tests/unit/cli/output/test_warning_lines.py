"""Convoy's warnings on the command line are one line each; the process's own way of showing warnings comes back."""

from __future__ import annotations

import sys
import warnings

import pytest

from convoy.measurement.device import doctor
from convoy.user_warning import warn_user
from tests.e2e.command import Command


def test_own_warnings_are_lines_and_others_are_pythons(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def findings() -> list[doctor.Finding]:
        warn_user("no program for 64 images:\n  there is too little \x1b[31mmemory")
        warnings.warn("of a library", UserWarning, stacklevel=1)
        warnings.warn("old", FutureWarning, stacklevel=1)
        return []

    monkeypatch.setattr(doctor, "findings", findings)
    monkeypatch.setattr(doctor, "engine_findings", lambda every: [])
    monkeypatch.setattr(warnings, "showwarning", lambda message, category, *_: sys.stderr.write(f"shown {message}\n"))
    before = warnings.filters[:], warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        done = Command(capsys, monkeypatch)("doctor")
    assert done.code == 0
    assert done.err.splitlines() == [
        "convoy: warning: no program for 64 images: there is too little \\x1b[31mmemory",
        "shown of a library",
    ]
    assert (warnings.filters, warnings.showwarning) == before
