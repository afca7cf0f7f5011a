"""Rows of an options search: one setting of PyTorch's options with its role, its time and its error."""

from __future__ import annotations

import dataclasses

from convoy.compare.case import Case
from convoy.compare.options.setting_bench import Setting, noise
from convoy.compare.options.torch_options import OPTIONS, words_of
from convoy.compare.runs.rows import Figure, Row
from convoy.compare.samples import NOISY


def option_row(case: Case, provider: str, role: str, status: str = "ok", reason: str = "", *, option: str = "") -> Row:
    """A row of a case, without figures.

    Args:
        case: net and setting.
        provider: the setting's name among the rows of its case.
        role: which part of the search it belongs to (`alone`, `forward`, `without`, ...).
        status: how it ended.
        reason: why it is not `ok`.
        option: the option, in words.
    """
    return Row(
        subject=case.model,
        provider=provider,
        status=status,
        reason=reason,
        mode=case.mode,
        batch=case.batch,
        dtype=case.dtype,
        axes=case.axes,
        detail={"role": role, "option": option},
    )


def timed_row(row: Row, latency: Figure, setting: Setting, error: float | None) -> Row:
    """The row with the figures of its setting; `error` is relative, None where it is not known."""
    rates = [row.batch / ms * 1e3 for ms in (latency.p50, latency.p80, latency.p20)]
    figures = [latency, Figure("images_per_s", "1/s", *rates)]
    if error is not None:
        figures.append(Figure.once("rel_l2_error", "1", error))
    detail = {**row.detail, "options": sorted(setting)}
    one = next(iter(setting)).removeprefix("-") if len(setting) == 1 else ""
    words = OPTIONS[one].words if one in setting else words_of(setting)
    return dataclasses.replace(row, figures=tuple(figures), noisy=noise(latency) > NOISY, setting=words, detail=detail)
