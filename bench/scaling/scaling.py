"""How does data-parallel training scale over the GPUs of a host? Question `scaling`: runs of `convoy scale` as long-form CSV.

    for net in alexnet resnet50 googlenet; do
      convoy scale $net --gpus 1,2,4,8 --batch 128 --dtype bf16 --out scale-$net.json
    done
    python bench/scaling/scaling.py scale-*.json

A row a figure of each number of GPUs and provider: throughput, efficiency, the step and where its time goes
(docs/how-to/scale.md).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from convoy.compare import Run, read
from convoy.compare.scaling.scaling_lines import link_table, table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.shared.record import Recorder, origin


def recorded(run: Run, folder: Path | None = None) -> Recorder:
    """All figures of a run."""
    target = run.manifest["target"]
    versions = " ".join(f"{name}={str(version).replace(' ', '_')}" for name, version in target["versions"].items())
    recorder = Recorder(
        "scaling",
        device=target["name"],
        versions=versions,
        protocol=run.manifest["protocol"],
        folder=folder,
        **origin(run.manifest),
    )
    for row in run.rows:
        subject = f"{row.subject} x{row.axes['gpus']} {row.axes['scaling']}"
        for figure in row.figures:
            recorder.add(
                subject=subject, provider=row.provider, metric=figure.metric, unit=figure.unit, p50=figure.p50,
                p20=figure.p20, p80=figure.p80, batch=row.batch, dtype=row.dtype, numerics=row.numerics,
                note=f"{row.setting}{'; noisy' if row.noisy else ''}",
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
        print("\n".join("  ".join(line) for line in (*table(run.rows), *link_table(run.rows))))
        print(recorded(run, options.folder).write())


if __name__ == "__main__":
    main()
