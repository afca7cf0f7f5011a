"""Which algorithm wins where? Question `study`: a run of `convoy study` as long-form CSV.

    convoy study --sweep batch,channels,filters,size,kernel,stride --dtype fp16 --output study.json
    python bench/study.py study.json

A row a point and algorithm: the time of its best engine; a whole net's strategies as `total_us`. Failures are left out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from record import Recorder

from convoy.compare import Row, Run, read
from convoy.compare.study_lines import strategy_table, winners

METRICS = {"time_us": "kernel_us", "total_us": "total_us", "energy_uj": "energy_uj"}


def subject(row: Row) -> str:
    """What was computed: a layer with its swept size, or a net."""
    axes = " ".join(f"{name}={value}" for name, value in sorted(row.axes.items()))
    return " ".join(word for word in (row.subject, axes, "" if row.mode == "inference" else row.mode) if word)


def provider(row: Row) -> str:
    """Convoy's engine, or the strategy."""
    return f"convoy.{row.detail['engine']}" if "engine" in row.detail else f"convoy.{row.provider.replace(' ', '_')}"


def recorded(run: Run, folder: Path | None = None) -> Recorder:
    """All figures of a run."""
    target = run.manifest["target"]
    versions = " ".join(f"{name}={str(version).replace(' ', '_')}" for name, version in target["versions"].items())
    recorder = Recorder(
        "study", device=target["name"], versions=versions, protocol=run.manifest["protocol"], folder=folder
    )
    for row in run.rows:
        for figure in row.figures:
            if figure.metric in METRICS:
                recorder.add(
                    subject=subject(row), provider=provider(row), metric=METRICS[figure.metric], unit=figure.unit,
                    p50=figure.p50, p20=figure.p20, p80=figure.p80, batch=row.batch, dtype=row.dtype,
                    numerics=row.numerics, note=f"{row.provider}: {row.setting}",
                )  # fmt: skip
    return recorder


def main() -> None:
    """Read runs, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.json")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    for path in options.runs:
        run = read(path)
        print("\n".join(winners(run.rows)))
        print("\n".join(" ".join(line) for line in strategy_table([r for r in run.rows if r.mode == "inference"])))
        print(recorded(run, options.folder).write())


if __name__ == "__main__":
    main()
