"""convoy engines: list the engines, or which of them support a problem."""

from __future__ import annotations

from typing import Annotated

import typer

from convoy.cli import options


def engines(
    problem: Annotated[
        str | None, typer.Option("--problem", help="A problem's key, as `convoy layers --keys` prints it.")
    ] = None,
    device: options.Device = None,
) -> None:
    """List the engines; with a problem, which of them support it on this machine, and why the others do not."""
    from convoy.engines.manifest import engine_ids, load_engine
    from convoy.measurement import detect_target
    from convoy.problem import parse_problem
    from convoy.report import print_table
    from convoy.settings import Settings

    extra = Settings().engines
    found = [load_engine(engine, extra) for engine in engine_ids(extra)]
    if problem is None:
        print_table(("engine", "version", "algorithm"), [(e.id, str(e.version), e.family) for e in found])
        return
    wanted = parse_problem(problem)
    target = detect_target(options.pick_device(device))
    rows: list[tuple[str, ...]] = []
    for engine in found:
        support = engine.accepts(wanted, target)
        rows.append(
            (engine.id, "yes" if support else "no", support.reason or f"{len(engine.space(wanted, target))} settings")
        )
    print_table(("engine", "can", "why"), rows)
