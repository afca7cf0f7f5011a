"""convoy engines: list the engines, or which of them support a problem."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.options import shared, values

if TYPE_CHECKING:
    from convoy.measurement.device.engine_availability import EngineAvailability


def engines(
    problem: Annotated[
        str | None, typer.Option("--problem", help="A problem's key, as `convoy layers --keys` prints it.")
    ] = None,
    device: shared.Device = None,
) -> None:
    """List the engines and where they work; with a problem, which of them support it here, and why the others do not."""
    from convoy.engines.manifest import engine_ids, load_engine
    from convoy.measurement import detect_target
    from convoy.measurement.device.engine_availability import devices_here, engine_availability
    from convoy.problem import parse_problem
    from convoy.report import print_table
    from convoy.settings import Settings

    extra = Settings().engines
    found = [load_engine(engine, extra) for engine in engine_ids(extra)]
    if problem is None:
        targets = [detect_target(name) for name in ([device] if device else devices_here())]
        availability = {one.engine: one for one in engine_availability(targets, extra)}
        heads = ("engine", "version", "algorithm", "works on", "what it needs")
        rows = [(e.id, str(e.version), e.family, *_where(availability[e.id])) for e in found]
        print_table(heads, rows, numbers=(1,), least=(1, 2))
        return
    wanted = parse_problem(problem)
    target = detect_target(values.pick_device(device))
    answers: list[tuple[str, ...]] = []
    for engine in found:
        support = engine.accepts(wanted, target)
        answers.append(
            (
                engine.id,
                "yes" if support else "no",
                support.reason or f"{len(engine.space(wanted, target))} configurations",
            )
        )
    print_table(("engine", "supports it", "why, or in how many ways"), answers)


def _where(one: EngineAvailability) -> tuple[str, str]:
    """The devices of this machine on which an engine works; for none, the reason."""
    return (" and ".join(one.devices), "") if one.devices else ("no device here", one.reason.partition(", got ")[0])
