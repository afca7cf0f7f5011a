"""The profile of one call that tunes: recorded always, written and printed if `Settings.profile` names a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from convoy.errors import InputError
from convoy.plan.file import write_text
from convoy.schedule.timeline import Span, chrome_trace
from convoy.settings import Settings
from convoy.tuning_profile import ProfileRecorder, TuningProfile, recorded_profile


@contextmanager
def profiled(settings: Settings) -> Generator[ProfileRecorder]:
    """Record the phases of the block; afterwards write the trace and print the table, if `settings.profile` asks for it.

    Raises:
        InputError: the file cannot be written; known before anything is tuned if its folder does not exist.
    """
    path = settings.profile
    check_profile(settings)
    with recorded_profile() as recorder:
        yield recorder
    if path is not None:
        profile = recorder.profile()
        write_profile(profile, path)
        print(profile.table(), file=sys.stderr)


def check_profile(settings: Settings) -> None:
    """Raise InputError if `settings.profile` names a folder, or a file in a folder that does not exist."""
    path = settings.profile
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise InputError("profile", str(path), "a file in a folder that exists")


def profile_of_pass(settings: Settings, name: str) -> Settings:
    """Settings whose profile is a file for one pass of training: `tuning.forward.json` beside `tuning.json`."""
    path = settings.profile
    return settings if path is None else replace(settings, profile=path.with_suffix(f".{name}{path.suffix}"))


def write_profile(profile: TuningProfile, path: Path) -> None:
    """Write a profile in the Trace Event Format, which Perfetto reads: a row for each thread, phases inside phases.

    Raises:
        InputError: the file cannot be written.
    """
    text = json.dumps(chrome_trace({"tuning": trace_spans(profile)}, row="thread"))
    write_text(path, text + "\n", "profile")


def trace_spans(profile: TuningProfile) -> list[Span]:
    """The spans of a profile as spans of a timeline; those of the calling thread are critical."""
    ordered = sorted(profile.spans, key=lambda span: (span.start_s, -span.duration_s))
    return [
        Span(span.phase, span.detail, span.thread, span.start_s * 1e6, span.duration_s * 1e6, span.thread == 0)
        for span in ordered
    ]
