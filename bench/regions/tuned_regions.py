"""How fast is an engine for subgraphs beside ATen and Inductor, by the rows of a tuning? Question `tuned-regions`.

    python bench/regions/tuned_regions.py DB --engine cuda.fusion [--commit COMMIT] [--folder DIR]

Takes the subgraphs that a tuning at effort quick or full has timed with the engine and with another one, in interleaved rounds on
the same data (docs/concepts/measurement.md). Rows that were timed once, because they were clearly slower, are left out.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.shared.command_line import run_main
from bench.shared.record import Recorder
from bench.shared.rows import Row

from convoy.graph.text import parse_graph
from convoy.perfdb import Database, Measurement
from convoy.perfdb.row import Status

PEERS = ("inductor", "aten")


def best_rows(rows: Sequence[Measurement], engine: str) -> dict[str, dict[str, Measurement]]:
    """By problem, each engine's fastest row; of subgraphs that the engine and a peer computed."""
    found: dict[str, dict[str, Measurement]] = {}
    for row in rows:
        if row.status is Status.OK and row.samples > 1 and row.problem.startswith("subgraph:"):
            own = found.setdefault(row.problem, {})
            if row.config.engine not in own or row.median_us < own[row.config.engine].median_us:
                own[row.config.engine] = row
    return {key: own for key, own in found.items() if engine in own and own.keys() & set(PEERS)}


def subject_of(text: str, key: str) -> tuple[str, int, str]:
    """A subgraph's operators with the sides of its largest value and the end of its key; its batch; its dtype."""
    graph = parse_graph(text)
    names = list(dict.fromkeys(node.op.split(".")[1] if "." in node.op else node.op for node in graph.nodes))
    largest = max((value.spec for value in graph.values.values()), key=lambda spec: spec.elements)
    sides = "x".join(map(str, largest.shape[1:]))
    return f"{'+'.join(names)} {sides} {key[-6:]}", largest.shape[0], largest.dtype


def tuned_regions_table(rows: Sequence[Row], title: str) -> str:
    """By operators: how many subgraphs, and the geometric mean of each engine's time."""
    times: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        operators = row["subject"].partition(" ")[0]
        times.setdefault(operators, {}).setdefault(row["subject"], {})[row["provider"]] = float(row["p50"])
    own = next(row["provider"] for row in rows if row["provider"].removeprefix("convoy.") not in PEERS)
    peers = [f"convoy.{peer}" for peer in PEERS]
    lines = [
        f"{title}, {rows[0]['device']}, commit {rows[0]['commit']}, {rows[0]['protocol']}; geometric means, microseconds",
        "",
        f"| operators | subgraphs | {' | '.join(name.removeprefix('convoy.') for name in (own, *peers))} |",
        "|---|---|---|---|---|",
    ]
    for operators, subgraphs in sorted(times.items(), key=lambda each: -len(each[1])):
        cells = [_mean([each[name] for each in subgraphs.values() if name in each]) for name in (own, *peers)]
        lines.append(f"| {operators.replace('+', ' + ')} | {len(subgraphs)} | {' | '.join(cells)} |")
    every = [each for subgraphs in times.values() for each in subgraphs.values()]
    gains = [_mean([each[peer] / each[own] for each in every if peer in each]) for peer in peers]
    counts = [sum(peer in each for each in every) for peer in peers]
    lines += ["", "; ".join(f"{own.removeprefix('convoy.')} is {gain}x as fast as {peer} on {count} subgraphs"
                            for gain, peer, count in zip(gains, PEERS, counts, strict=True)) + "."]  # fmt: skip
    return "\n".join(lines)


def _mean(values: Sequence[float]) -> str:
    return f"{math.exp(math.fsum(map(math.log, values)) / len(values)):.2f}" if values else ""


def main() -> None:
    """Turn rows into a results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("db", type=Path)
    parser.add_argument("--engine", default="cuda.fusion")
    parser.add_argument("--commit", default="", help="that tuned; by default the present one")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with Database.open(options.db, shipped=False, create=False) as database:
        found = best_rows(database.rows(), options.engine)
        texts = {key: database.text(key) or "" for key in found}
        first = next(iter(next(iter(found.values())).values()))
        target = database.target(first.target)
    if target is None:
        raise SystemExit(f"{options.db} does not describe its target")
    recorder = Recorder(
        "tuned-regions",
        device=target.name,
        versions=first.versions,
        protocol=f"{first.protocol}, interleaved",
        folder=options.folder,
        commit=options.commit,
    )
    for key, own in found.items():
        subject, batch, dtype = subject_of(texts[key], key)
        for engine in (options.engine, *PEERS):
            if engine in own:
                row = own[engine]
                recorder.add(
                    subject=subject, batch=batch, dtype=dtype, provider=f"convoy.{engine}", metric="region_us", unit="us",
                    p50=row.median_us, p20=row.median_us - row.spread_us, p80=row.median_us + row.spread_us,
                )  # fmt: skip
    print(recorder.write())


if __name__ == "__main__":
    run_main(main)
