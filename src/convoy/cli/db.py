"""convoy db: look after the performance database."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from convoy.cli import options

app = typer.Typer(help="Look after the performance database.", no_args_is_help=True, rich_markup_mode=None)

Filter = Annotated[str | None, typer.Option(help="Only rows with this value.")]


def _open(db: Path | None):
    from convoy.perfdb import Database
    from convoy.settings import Settings

    database = Database.open(db or Settings().db)
    for line in database.warnings:
        typer.echo(f"convoy: {line}", err=True)
    return database


@app.command()
def info(db: options.Db = None, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say where the database lies and what is in it."""
    with _open(db) as database:
        found = database.info()
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    for name, value in found.items():
        typer.echo(f"{name}: {value}")


@app.command("list")
def list_rows(
    db: options.Db = None,
    problem: Filter = None,
    engine: Filter = None,
    status: Filter = None,
    target: Filter = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Most rows to print.")] = 50,
) -> None:
    """List measurements."""
    from convoy.report import print_table

    filters = {"problem": problem, "engine": engine, "status": status, "target": target}
    wanted = {name: value for name, value in filters.items() if value is not None}
    rows: list[tuple[str, ...]] = []
    with _open(db) as database:
        for row in database.rows(**wanted):
            rows.append((row.problem, str(row.config), str(row.status), f"{row.median_us:.2f}", row.reason[:60]))
            if len(rows) == limit:
                break
    print_table(("problem", "config", "status", "us", "reason"), rows, numbers=(3,))


@app.command()
def export(path: Annotated[Path, typer.Argument(help="File to write: .csv or .jsonl.")], db: options.Db = None) -> None:
    """Write all measurements to a file."""
    from convoy.perfdb.exchange import export_rows

    options.check_output(path, "path")
    with _open(db) as database:
        typer.echo(f"{export_rows(database, path)} rows written to {path}")


@app.command("import")
def import_rows(
    path: Annotated[Path, typer.Argument(help="File to read: .csv or .jsonl.")], db: options.Db = None
) -> None:
    """Take over measurements from a file: all of them, or none where a line is wrong."""
    from convoy.perfdb.exchange import import_rows as read

    with _open(db) as database:
        typer.echo(f"{read(database, path)} rows taken over from {path}")


@app.command()
def merge(path: Annotated[Path, typer.Argument(help="Another database.")], db: options.Db = None) -> None:
    """Take over the measurements of another database."""
    from convoy.perfdb.exchange import merge_database

    with _open(db) as database:
        typer.echo(f"{merge_database(database, path)} rows taken over from {path}")


@app.command()
def clear(
    db: options.Db = None,
    engine: Filter = None,
    target: Filter = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove measurements: all, or those of one engine or target."""
    wanted = {name: value for name, value in (("engine", engine), ("target", target)) if value is not None}
    if not yes:
        what = " and ".join(f"{name} {value}" for name, value in wanted.items()) or "everything"
        typer.confirm(f"Remove {what}?", abort=True)
    with _open(db) as database:
        typer.echo(f"{database.clear(**wanted)} rows removed")
