"""convoy db: look after the performance database."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.command import Command, CommandGroup
from convoy.cli.output import kept
from convoy.cli.output.files import check_output
from convoy.cli.output.lines import say
from convoy.errors import InputError, unknown_name
from convoy.untrusted import escape_controls

if TYPE_CHECKING:
    from convoy.perfdb import Database, ImportResult, Measurement

app = typer.Typer(
    help="Look after the performance database.", no_args_is_help=True, cls=CommandGroup, rich_markup_mode=None
)

Db = Annotated[
    Path | None, typer.Option("--db", help="The database; by default the one that CONVOY_DB names, or the user's own.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Problem = Annotated[str, typer.Option("--problem", help="Only problems whose key contains this.")]
Engine = Annotated[str, typer.Option("--engine", help="Only this engine, by its id.")]
Status = Annotated[str, typer.Option("--status", help="Only this status: ok, unsupported, compile_error, ...")]
Target = Annotated[str, typer.Option("--target", help="Only targets whose digest begins with this.")]
Partial = Annotated[bool, typer.Option("--partial", help="Add the good rows even if others are malformed.")]

ROWS_SHOWN = 50
"""Rows of a table when no limit is given: more scrolls the answer away."""


def _open(db: Path | None, *, create: bool, change: bool = False) -> Database:
    """The database that the options name; one named by `--db` must be there, unless it is about to be written.

    Args:
        db: `--db`.
        create: whether to make a file where none is.
        change: refuse a file that cannot be written: a change that lasts as long as the command would be none.
    """
    from convoy.perfdb import Database
    from convoy.settings import Settings

    if db is not None and not create and not db.expanduser().exists():
        raise InputError("--db", str(db), "a database that is there")
    database = Database.open(db or Settings().db, create=create)
    if change and database.in_memory and database.warnings:
        database.close()
        raise InputError("db", str(database.path), "a database that can be written", database.warnings[-1])
    for line in database.warnings:
        say(f"convoy: {line}", err=True)
    return database


def _check_names(database: Database, *, engine: str, target: str) -> None:
    """Refuse an engine that is neither Convoy's nor the database's, and a target of which it has no rows."""
    from convoy.engines.manifest import LISTED_BY, RETIRED, engine_ids
    from convoy.settings import Settings

    found = database.info()
    engines = [*engine_ids(Settings().engines), *RETIRED, *found.engine]
    if engine and engine not in engines:
        raise unknown_name("engine", engine, dict.fromkeys(engines), LISTED_BY)
    if target and not any(digest.startswith(target) for digest in found.target):
        expected = ", ".join(found.target) or "none, for it is empty"
        raise InputError("target", target, f"a target of this database: {expected}")


@app.command(cls=Command)
def info(db: Db = None, as_json: Json = False) -> None:
    """Print the database's path and its contents."""
    from convoy.report import print_table

    with _open(db, create=False) as database:
        found = database.info()
    if as_json:
        say(json.dumps(found.to_dict(), indent=1))
        return
    facts = {name: value for name, value in found.to_dict().items() if isinstance(value, str | int)}
    print_table(("", "value"), [(name, _shown(str(value))) for name, value in facts.items()])
    for column in ("status", "engine", "target"):
        counts: Mapping[str, int] = getattr(found, column)
        names = {digest: f"{digest} ({name})" for digest, name in found.targets.items()}
        print_table(
            (column, "rows"), [(_shown(names.get(word, word)), str(n)) for word, n in counts.items()], numbers=(1,)
        )


@app.command("list", cls=Command, short_help="List measurements, the fastest first.")
def list_rows(
    db: Db = None,
    problem: Problem = "",
    engine: Engine = "",
    status: Status = "",
    target: Target = "",
    limit: Annotated[int | None, typer.Option("--limit", help=f"Most rows; a table shows {ROWS_SHOWN}.")] = None,
    as_json: Json = False,
) -> None:
    """List measurements by problem: the fastest first, failures last."""
    from convoy.perfdb.record import to_record
    from convoy.report import print_table

    most = ROWS_SHOWN if limit is None and not as_json else limit
    with _open(db, create=False) as database:
        _check_names(database, engine=engine, target=target)
        rows = database.rows(problem=problem, engine=engine, status=status, target=target, limit=most)
        total = database.count(problem=problem, engine=engine, status=status, target=target)
    if as_json:
        say(json.dumps([to_record(row) for row in rows], indent=1))
        return
    for question, answers in groupby(rows, lambda row: (row.problem, row.target, row.protocol)):
        say("problem {}\ntarget {}, protocol {}".format(*question))
        heads = ("engine", "version", "knobs", "status", "median_us", "spread_us", "workspace_bytes", "date", "reason")
        print_table(heads, [_cells(row) for row in answers], numbers=(1, 4, 5, 6))
    say(f"{len(rows)} of {total} rows")


def _cells(row: Measurement) -> tuple[str, ...]:
    figures = (f"{row.median_us:.2f}", f"{row.spread_us:.2f}", str(row.workspace_bytes)) if row.ok else ("", "", "")
    engine, version, knobs = row.config.engine, str(row.config.version), str(row.config.knobs)
    return (engine, version, knobs, str(row.status), *figures, row.date, _shown(row.reason[:80]))


def _shown(text: str) -> str:
    """One line, control characters escaped: compilers' messages have several lines and may hold control sequences."""
    return escape_controls(text.replace("\n", " ").replace("\t", " "))


@app.command(cls=Command)
def export(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="File to write: .csv (rows) or .jsonl (everything), also with .gz.")
    ],
    db: Db = None,
    problem: Problem = "",
    engine: Engine = "",
    status: Status = "",
    target: Target = "",
    shipped: Annotated[
        bool,
        typer.Option("--shipped", help="PATH is a folder: write TARGET.rows.gz files, the form that Convoy ships."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
) -> None:
    """Write measurements to a file."""
    if shipped:
        from convoy.measurement.device.known_peaks import export_peaks

        if problem or engine or status:
            raise InputError("--shipped", "other filters", "--target alone: results are shipped whole")
        with _open(db, create=False) as database:
            _check_names(database, engine="", target=target)
            paths = database.export_shipped(path, target=target)
            paths += export_peaks(database.path, path, {written.name.partition(".")[0] for written in paths})
        for written in paths:
            say(f"written: {written}")
        return
    check_output(path, "path")
    if path.exists() and not force:
        raise InputError("path", str(path), "a file that is not there yet", "Use --force to overwrite it.")
    with _open(db, create=False) as database:
        _check_names(database, engine=engine, target=target)
        number = database.export(path, problem=problem, engine=engine, status=status, target=target)
    say(f"{number} rows written to {path}")


@app.command("import", cls=Command, short_help="Add the rows of an export.")
def import_rows(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="An export: .csv or .jsonl, also with .gz.")],
    db: Db = None,
    partial: Partial = False,
    as_json: Json = False,
) -> None:
    """Add the rows of an export to the database. Every row is checked; a malformed line refuses the whole file."""
    _check_there(path)
    with _open(db, create=True, change=True) as database:
        kept.database()
        result = database.import_(path, partial=partial)
    _tell(result, path, partial=partial, as_json=as_json)


@app.command(cls=Command, short_help="Add the rows of another database.")
def merge(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Another database, which is only read.")],
    db: Db = None,
    partial: Partial = False,
    as_json: Json = False,
) -> None:
    """Add the rows of another database. Every row is checked; a malformed row refuses the whole file."""
    _check_there(path)
    with _open(db, create=True, change=True) as database:
        kept.database()
        result = database.merge(path, partial=partial)
    _tell(result, path, partial=partial, as_json=as_json)


def _check_there(path: Path) -> None:
    """Before the user's own database is opened, and made."""
    if not path.is_file():
        raise InputError("path", str(path), "a file that is there")


def _tell(result: ImportResult, path: Path, *, partial: bool, as_json: bool) -> None:
    if as_json:
        say(json.dumps(result.to_dict(), indent=1))
    else:
        for refusal in result.refused:
            say(f"{path}:{refusal.line}: {_shown(refusal.reason)}", err=True)
        say(
            f"{result.measurements} rows taken in from {path}, {result.unchanged} not newer than those here, "
            f"{len(result.refused)} refused"
        )
    if result.refused and not partial:
        first = result.refused[0]
        lines = f"{len(result.refused)} malformed, the first in line {first.line}: {_shown(first.reason)}"
        raise InputError(
            "path", str(path), "well-formed rows", f"{lines} Nothing was taken in; --partial takes the others."
        )


@app.command(cls=Command, short_help="Remove measurements, stored plans, or compiled code.")
def clear(
    db: Db = None,
    engine: Annotated[str, typer.Option("--engine", help="Only rows of this engine, by its id.")] = "",
    target: Annotated[str, typer.Option("--target", help="Only rows of this target: its whole digest.")] = "",
    compiled: Annotated[
        bool,
        typer.Option(
            "--compiled", help="Remove compiled code instead, which Convoy compiles again; no row is removed."
        ),
    ] = False,
    plans: Annotated[
        bool,
        typer.Option(
            "--plans",
            help="Remove the plans of finished searches instead: the next call searches again; no row is removed.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove measurements: all, or those of one engine or target; or remove stored plans, or compiled code."""
    from convoy.perfdb.record import check_digest

    if plans:
        if engine or target or compiled:
            raise InputError("--plans", "--engine, --target or --compiled", "--plans alone, or with --db")
        _clear_plans(db, yes=yes)
        return
    if compiled:
        if engine or target or db:
            raise InputError(
                "--compiled", "--engine, --target or --db", "--compiled alone: compiled code is in no database"
            )
        _clear_compiled(yes=yes)
        return

    if target:
        check_digest(target)
    with _open(db, create=False, change=True) as database:
        _check_names(database, engine=engine, target=target)
        number = database.count(engine=engine, target=target)
        wanted = {"engine": engine, "target": target}
        what = " and ".join(f"{name} {word}" for name, word in wanted.items() if word) or "everything"
        if not yes:
            typer.confirm(f"Remove {number} rows ({what}) from {database.path}?", abort=True)
        kept.database()
        say(f"{database.clear(engine=engine, target=target)} rows removed")


def _clear_plans(db: Db, *, yes: bool) -> None:
    """Remove the plans of finished searches from a database."""
    with _open(db, create=False, change=True) as database:
        number = len(database.plans.keys())
        if number and not yes:
            typer.confirm(f"Remove {number} plans from {database.path}?", abort=True)
        kept.database()
        say(f"{database.plans.clear()} plans removed")


def _clear_compiled(*, yes: bool) -> None:
    """Remove the compiled code in the user's cache folder."""
    from convoy.engines.compilers.clear_compiled import clear_compiled, compiled_code

    found = compiled_code()
    if found.files and not yes:
        what = f"{found.files} files of compiled code ({found.size_bytes / 1e6:.1f} MB)"
        typer.confirm(f"Remove {what} from {found.path}?", abort=True)
    removed = clear_compiled()
    say(f"{removed.files} files of compiled code ({removed.size_bytes / 1e6:.1f} MB) removed from {removed.path}")
