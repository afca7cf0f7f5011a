"""Schema of a run file's free parts, a row's `detail` and the manifest: pages rely on these types. No torch."""

from __future__ import annotations

from typing import Final

from convoy.compare.runs.checked_json import (
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

_LAYER_PREDICTED: Final = {"predicted": flag}
"""Files of former versions do not have it."""

_TIMED: Final[dict[str, Check]] = {
    "kinds": values(positive),
    "layers": items(fields(_LAYER, _LAYER_PREDICTED)),
    "peaks": values(positive),
    "timeline": items(exactly(_SPAN)),
    "timed": text,
}
"""Of whole nets: `convoy report --diff` looks at layers and kinds in runs of any kind."""

_DETAILS: Final[dict[str, dict[str, Check]]] = {
    "compare": {"samples": values(items(positive))},
    "options": {
        "gain": optional(number),
        "worth": optional(number),
        "defaults_ms": optional(number),
        "advice": text,
        "role": text,
        "option": text,
        "options": items(text),
    },
    "study": {"predicted": _whole, "problems": _whole, "predicted_steps": _whole, "steps": _whole},
    "scaling": {"noisy": items(text)},
}

_MANIFEST: Final[dict[str, Check]] = {
    "date": text,
    "protocol": text,
    "commit": text,
    "target": fields({}, {"name": text, "arch": text, "units": scalar, "digest": text, "device": text}),
    "versions": values(text),
    "clocks": values(scalar),
    "clocks_after": values(scalar),
    "system": values(scalar),
    "request": values(anything),
    "notes": items(text),
    "criteria": optional(
        fields({"layers": _whole, "rules": items(text), "check": optional(values(anything)), "note": text})
    ),
}

_CHECKS: Final = {kind: fields({}, {**_TIMED, **own}) for kind, own in _DETAILS.items()}


def check_detail(kind: str, data: object, where: str) -> None:
    """Refuse a row's `detail` whose known names hold something else than the pages of this kind take.

    Args:
        kind: the run file's.
        data: the detail; names that no page knows are not looked at.
        where: the field's name in errors.

    Raises:
        InputError: naming the field.
    """
    _CHECKS[kind](data, where)


check_manifest: Final = fields({}, _MANIFEST)
"""The same for a manifest of any kind."""
