"""What the free parts of a run file may hold, a row's `detail` and the manifest: pages build on these types. No torch."""

from __future__ import annotations

from typing import Final

from convoy.compare.checked_json import (
    Check,
    anything,
    count,
    exactly,
    fields,
    flag,
    items,
    number,
    optional,
    positive,
    scalar,
    text,
    values,
)
from convoy.errors import InputError

MOST_STREAMS: Final = 64
"""Rows of a timeline's picture."""


def _stream(data: object, where: str) -> None:
    if count(data, where, 0) >= MOST_STREAMS:
        raise InputError(where, data, f"an integer under {MOST_STREAMS}")


def _whole(data: object, where: str) -> None:
    count(data, where, 0)


_SPAN: Final = {
    "name": text, "engine": text, "stream": _stream, "start_us": positive, "duration_us": positive, "critical": flag,
}  # fmt: skip
_LAYER: Final = {"name": text, "engine": text, "median_us": positive, "flops": positive, "bytes_min": positive}

_DETAIL: Final[dict[str, Check]] = {
    "kinds": values(positive),
    "samples": values(items(positive)),
    "layers": items(fields(_LAYER)),
    "peaks": values(positive),
    "timeline": items(exactly(_SPAN)),
    "gain": optional(number),
    "worth": optional(number),
    "predicted": _whole,
    "problems": _whole,
    "noisy": items(text),
    "timed": text,
    "advice": text,
    "role": text,
    "option": text,
}

_MANIFEST: Final[dict[str, Check]] = {
    "date": text,
    "protocol": text,
    "commit": text,
    "target": fields({}, {"name": text, "arch": text, "units": scalar, "digest": text, "device": text}),
    "versions": values(text),
    "clocks": values(scalar),
    "system": values(scalar),
    "request": values(anything),
    "notes": items(text),
    "criteria": optional(
        fields({"layers": _whole, "rules": items(text), "check": optional(values(anything)), "note": text})
    ),
}

check_detail: Final = fields({}, _DETAIL)
"""Refuses a row's `detail` whose known names hold something else than pages take; others are not looked at."""

check_manifest: Final = fields({}, _MANIFEST)
"""The same for a manifest."""
