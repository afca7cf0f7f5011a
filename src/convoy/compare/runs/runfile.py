"""Run files: the results of a comparison, an options search, a study or a scaling run, as JSON of one form.

See docs/how-to/compare.md.

One envelope for every kind, `{"kind", "schema", "manifest", "rows"}`, so that one page shows them all and any two of one kind can
be compared. Plain data, checked field by field on the way in; no torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from convoy.compare.runs.checked_json import LONGEST_NAME, count, flag, listed, mapping, number, text, word
from convoy.compare.runs.rows import STATUSES, Figure, Row
from convoy.compare.runs.run_schema import check_detail, check_manifest
from convoy.errors import InputError
from convoy.plan.file import write_text
from convoy.untrusted import read_json

SCHEMA: Final = 1

KINDS: Final = ("compare", "options", "study", "scaling")
"""Kinds of runs."""

LARGEST_BYTES: Final = 64 << 20
MOST_ROWS: Final = 200_000
MOST_VALUES: Final = 2_000_000
"""A study of 1000 layers by 30 algorithms has 1.8 million."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run file.

    Attributes:
        kind: one of `KINDS`.
        manifest: device and protocol (`convoy.compare.runs.manifest`): JSON with `date`, `target`, `versions`, `protocol`,
            `commit`, `request` at least.
        rows: results, in the order of measuring.
        schema: version of the form.
    """

    kind: str
    manifest: Mapping[str, Any]
    rows: tuple[Row, ...] = ()
    schema: int = SCHEMA

    def row(self, key: tuple[object, ...]) -> Row | None:
        """The row of a key, or None."""
        return next((row for row in self.rows if row.key == key), None)

    def with_row(self, row: Row) -> Run:
        """The run with one row more; a row of the same key is replaced where it stands."""
        if self.row(row.key) is None:
            return dataclasses.replace(self, rows=(*self.rows, row))
        return dataclasses.replace(self, rows=tuple(row if old.key == row.key else old for old in self.rows))

    def resumes(self, other: Run) -> bool:
        """Whether rows of `other`, an older state of a file, may stand here: same request, device, versions, protocol.

        Packages installed since then measured none of the rows. Packages that were installed must have the same versions.
        """
        names = ("request", "target", "protocol", "commit")
        same = all(self.manifest.get(name) == other.manifest.get(name) for name in names)
        return (
            same and self.kind == other.kind and _still(other.manifest.get("versions"), self.manifest.get("versions"))
        )


def _still(before: object, now: object) -> bool:
    """Whether all that was installed is there in the same version; there may be more."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return before == now
    return cast("dict[object, object]", before).items() <= cast("dict[object, object]", now).items()


def to_dict(run: Run) -> dict[str, Any]:
    """JSON's types, nested."""
    rows = [_row_to_dict(row) for row in run.rows]
    return {"kind": run.kind, "schema": run.schema, "manifest": dict(run.manifest), "rows": rows}


def _row_to_dict(row: Row) -> dict[str, Any]:
    data: dict[str, Any] = {f.name: getattr(row, f.name) for f in dataclasses.fields(row)}
    data["figures"] = [dataclasses.asdict(figure) for figure in row.figures]
    data["axes"], data["detail"], data["notes"] = dict(row.axes), dict(row.detail), list(row.notes)
    return data


def write(run: Run, path: Path) -> None:
    """Write a run, whole or not at all; raises InputError where the path cannot be written or a number is not finite."""
    try:
        content = json.dumps(_storable(to_dict(run)), indent=1, allow_nan=False)
    except ValueError as error:
        raise InputError("run", str(path), "finite numbers alone", str(error)) from error
    write_text(path, content + "\n", "run")


def _storable(value: Any) -> Any:
    """The same, with parts that UTF-8 cannot hold (bytes of a file's name) replaced: `read` would refuse them."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_storable(name): _storable(item) for name, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_storable(item) for item in cast("list[Any]", value)]
    return value


def read(path: Path) -> Run:
    """Read a run file and check everything in it.

    Raises:
        InputError: no regular file, too large, no JSON, another schema, or a field of the wrong type or value, which is named.
    """
    return from_dict(read_json(path, LARGEST_BYTES, "run", most_values=MOST_VALUES), str(path))


def resumed(path: Path, new: Run, *, again: bool = False) -> Run:
    """The run to go on with: `new`, with the rows and notes that an interrupted run of the same request left at `path`.

    Args:
        path: where the run is written after each row.
        new: the run that is about to begin, without rows.
        again: ignore the existing file; the first `write` overwrites it.

    Raises:
        InputError: the file is no run file, or another request's, device's, version's or commit's.
    """
    if again or not path.exists():
        return new
    old = read(path)
    if not new.resumes(old):
        todo = "Use --again to measure anew and overwrite it, or another file."
        raise InputError("run", str(path), "a run of the same request, device, versions and commit", todo)
    notes = list(dict.fromkeys([*old.manifest.get("notes", ()), *new.manifest.get("notes", ())]))
    return dataclasses.replace(old, manifest={**new.manifest, "date": old.manifest.get("date", ""), "notes": notes})


def from_dict(data: object, source: str = "run") -> Run:
    """Inverse of `to_dict`; raises InputError naming the field, with `source` as the file's name."""
    fields = mapping(data, source)
    schema = fields.get("schema")
    if schema != SCHEMA:
        raise InputError(f"{source}: schema", schema, str(SCHEMA), "Read it with the Convoy that wrote it.")
    kind = fields.get("kind")
    if kind not in KINDS:
        raise InputError(f"{source}: kind", kind, "one of " + ", ".join(KINDS))
    rows = fields.get("rows")
    found = listed(rows, f"{source}: rows")
    if len(found) > MOST_ROWS:
        raise InputError(f"{source}: rows", len(found), f"at most {MOST_ROWS} rows")
    read_rows = [_row(cast("str", kind), row, f"{source}: rows[{index}]") for index, row in enumerate(found)]
    seen: set[tuple[object, ...]] = set()
    for row in read_rows:
        if row.key in seen:
            raise InputError(f"{source}: rows", f"{row.label()}, {row.provider}", "each row once")
        seen.add(row.key)
    manifest = mapping(fields.get("manifest"), f"{source}: manifest")
    check_manifest(manifest, f"{source}: manifest")
    return Run(cast("str", kind), manifest, tuple(read_rows), SCHEMA)


def _row(kind: str, data: object, where: str) -> Row:
    fields = mapping(data, where)
    known = {f.name for f in dataclasses.fields(Row)}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise InputError(where, unknown[0], "a field that rows have", "It has: " + ", ".join(sorted(known)) + ".")
    status = fields.get("status", "ok")
    if status not in STATUSES:
        raise InputError(f"{where}.status", status, "one of " + ", ".join(STATUSES))
    figures = listed(fields.get("figures", []), f"{where}.figures")
    row = Row(
        subject=text(fields.get("subject"), f"{where}.subject", LONGEST_NAME),
        provider=text(fields.get("provider"), f"{where}.provider", LONGEST_NAME),
        status=cast("str", status),
        reason=text(fields.get("reason", ""), f"{where}.reason"),
        mode=word(fields.get("mode", "inference"), f"{where}.mode"),
        batch=count(fields.get("batch", 1), f"{where}.batch"),
        dtype=word(fields.get("dtype", "fp32"), f"{where}.dtype"),
        numerics=word(fields.get("numerics", "as_torch"), f"{where}.numerics"),
        axes=_axes(fields.get("axes", {}), f"{where}.axes"),
        setting=text(fields.get("setting", ""), f"{where}.setting"),
        figures=tuple(_figure(figure, f"{where}.figures[{index}]") for index, figure in enumerate(figures)),
        noisy=flag(fields.get("noisy", False), f"{where}.noisy"),
        notes=tuple(text(note, f"{where}.notes") for note in listed(fields.get("notes", []), f"{where}.notes")),
        detail=mapping(fields.get("detail", {}), f"{where}.detail"),
    )
    check_detail(kind, row.detail, f"{where}.detail")
    if len({figure.metric for figure in row.figures}) != len(row.figures):
        raise InputError(f"{where}.figures", [f.metric for f in row.figures], "each metric once")
    return row


def _figure(data: object, where: str) -> Figure:
    fields = mapping(data, where)
    return Figure(
        word(fields.get("metric"), f"{where}.metric"),
        text(fields.get("unit"), f"{where}.unit", 20),
        number(fields.get("p50"), f"{where}.p50"),
        number(fields.get("p20"), f"{where}.p20"),
        number(fields.get("p80"), f"{where}.p80"),
    )


def _axes(data: object, where: str) -> dict[str, int | float | str]:
    found: dict[str, int | float | str] = {}
    for name, value in mapping(data, where).items():
        if isinstance(value, str):
            text(value, f"{where}.{name}", LONGEST_NAME)
        else:
            number(value, f"{where}.{name}")
        found[word(name, where)] = value
    return found
