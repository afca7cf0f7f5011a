"""Peak rates as JSON files: those of this machine's devices are kept beside the database, those of some devices are shipped.

Peak rates are a property of a device, and measuring them takes one to two seconds. A damaged file counts as none: the rates are
measured again, and the file is written anew.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final, cast

from convoy.errors import InputError
from convoy.measurement.device.peaks import Peaks
from convoy.perfdb import default_path
from convoy.perfdb.shipped import shipped_folder
from convoy.target import Target
from convoy.untrusted import parse_json, read_text

SCHEMA: Final = 1
SUFFIX: Final = ".peaks.json"
MAX_BYTES: Final = 1 << 14
MAX_FILES: Final = 100
"""Most files of other targets that are looked at."""

_FIELDS: Final = ("schema", "target", "bytes_per_s", "cache_bytes_per_s", "flops", "brief")


@dataclass(frozen=True, slots=True)
class DevicePeaks:
    """A device's settled peak rates.

    Attributes:
        target: where they were measured.
        peaks: the rates.
        brief: whether they are the best of few runs (`peaks(target, brief=True)`).
    """

    target: Target
    peaks: Peaks
    brief: bool = False


def peaks_json(known: DevicePeaks) -> str:
    """The file's text; equal rates give equal texts."""
    data = {
        "schema": SCHEMA,
        "target": known.target.to_dict(),
        "bytes_per_s": known.peaks.bytes_per_s,
        "cache_bytes_per_s": known.peaks.cache_bytes_per_s,
        "flops": known.peaks.flops,
        "brief": known.brief,
    }
    return json.dumps(data, indent=1) + "\n"


def read_peaks(text: str, source: str) -> DevicePeaks:
    """Inverse of `peaks_json`. Every field is checked; InputError names it, with `source` as the file's name."""
    data = parse_json(text, source)
    fields = cast("dict[str, Any]", data if isinstance(data, dict) else {})
    if set(fields) != set(_FIELDS) or fields["schema"] != SCHEMA or not isinstance(fields["brief"], bool):
        raise InputError(source, text[:80], "an object with " + ", ".join(_FIELDS) + f", of schema {SCHEMA}")
    target = Target.from_dict(fields["target"])
    flops = cast("dict[str, Any]", fields["flops"] if isinstance(fields["flops"], dict) else {})
    if "fp32" not in flops or len(flops) > 20:
        raise InputError(f"{source}: flops", str(flops)[:80], "operations a second by dtype, with fp32")
    rates = {name: _rate(value, f"{source}: flops.{name}", 0.0) for name, value in flops.items()}
    memory = _rate(fields["bytes_per_s"], f"{source}: bytes_per_s", 1.0)
    cached = _rate(fields["cache_bytes_per_s"], f"{source}: cache_bytes_per_s", 0.0)
    return DevicePeaks(target, Peaks(memory, rates, cached, target.cache_bytes), fields["brief"])


def _rate(value: object, where: str, least: float) -> float:
    """A rate, at most 1e18 a second: a million times what one GPU reaches."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(where, value, "a finite number")
    if not least <= value <= 1e18:
        raise InputError(where, value, f"a number from {least:g} to 1e18")
    return float(value)


def find_peaks(
    target: Target, database: Path | None, *, brief: bool, folder: Traversable | None = None
) -> Peaks | None:
    """The known rates of a device.

    Args:
        target: the device.
        database: the database's path, which the user's files lie beside; None for the default one.
        brief: whether brief rates, those of other software versions on the same device, and the shipped ones will do. Else only
            rates of this very target that took their time.
        folder: the shipped files; by default the package's own.

    Returns:
        None if nothing fits.
    """
    own = _read(_own_path(target, database))
    if own is not None and own.target.digest == target.digest and (brief or not own.brief):
        return replace(own.peaks, cache_bytes=target.cache_bytes)
    for known in _others(target, database, folder) if brief else ():
        if known.target.is_same_device(target):
            return replace(known.peaks, cache_bytes=target.cache_bytes)
    return None


def keep_peaks(known: DevicePeaks, database: Path | None) -> None:
    """Write rates beside the database, unless patient ones are there; a folder that cannot be written to is left alone."""
    path = _own_path(known.target, database)
    if known.brief and _read(path) is not None:
        return
    temporary = path.with_name(f"{path.name}.new-{os.getpid()}")
    try:
        with suppress(OSError):
            temporary.write_text(peaks_json(known), encoding="utf-8")
            temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def export_peaks(database: Path | None, folder: Path, targets: Collection[str]) -> list[Path]:
    """Write the patient rates of targets in the form that ships with the package, and return the files.

    Args:
        database: the database's path, which the user's files lie beside; None for the default one.
        folder: a folder that exists.
        targets: digests of the targets.
    """
    path, written = (database or default_path()).expanduser(), list[Path]()
    for digest in sorted(targets):
        known = _read(path.with_name(f"{path.stem}-{digest}{SUFFIX}"))
        if known is not None and not known.brief and known.target.digest == digest:
            written.append(folder / f"{digest}{SUFFIX}")
            written[-1].write_text(peaks_json(known), encoding="utf-8")
    return written


def _own_path(target: Target, database: Path | None) -> Path:
    path = (database or default_path()).expanduser()
    return path.with_name(f"{path.stem}-{target.digest}{SUFFIX}")


def _others(target: Target, database: Path | None, folder: Traversable | None) -> Iterator[DevicePeaks]:
    """The user's files of other targets, then the shipped ones."""
    path, own = (database or default_path()).expanduser(), _own_path(target, database)
    beside = sorted(path.parent.glob(f"{path.stem}-*{SUFFIX}"))[:MAX_FILES] if path.parent.is_dir() else []
    folder = folder or shipped_folder()
    entries = [entry for entry in folder.iterdir() if entry.name.endswith(SUFFIX)] if folder.is_dir() else []
    for each in (*beside, *sorted(entries, key=lambda entry: entry.name)):
        found = _read(each) if each != own else None
        if found is not None:
            yield found


def _read(path: Path | Traversable) -> DevicePeaks | None:
    """The rates in a file; None if it is not there, or damaged."""
    with suppress(InputError, OSError, ValueError):
        if isinstance(path, Path):
            return read_peaks(read_text(path, MAX_BYTES, "peaks"), path.name) if path.exists() else None
        with path.open("rb") as file:
            return read_peaks(file.read(MAX_BYTES).decode("utf-8"), path.name)
    return None
