"""Which algorithm wins where? Question `study`: a run of `convoy study` as long-form CSV.

    convoy study --sweep batch,channels,filters,size,kernel,stride --dtype fp16 --out study.json
    python bench/study/study.py study.json
    python bench/study/study.py --replay alexnet,vgg16,googlenet,resnet50 --on "NVIDIA H200" --dtype fp16 --batch 1

A row a point and algorithm: the time of its best engine, its workspace and energy; a whole net's strategies as `total_us` and
`peak_memory_bytes`. Failures are left out. `--replay` compares strategies from the results that ship with Convoy, without the
device: the protocol says for how many problems no row was there, so that their times are predicted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from convoy.compare import Row, Run, read
from convoy.compare.study.study_lines import strategy_table, winners

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.shared.command_line import run_main
from bench.shared.record import Recorder, origin

METRICS = {
    "time_us": "kernel_us",
    "total_us": "total_us",
    "energy_uj": "energy_uj",
    "workspace_bytes": "workspace_bytes",
    "peak_memory_bytes": "peak_memory_bytes",
}


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
        "study",
        device=target["name"],
        versions=versions,
        protocol=run.manifest["protocol"],
        folder=folder,
        **origin(run.manifest),
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


def replayed(net: str, dtype: str, batch: int, device: str) -> Run:
    """Strategies for one net by the results that ship for a device; its zeros are not asked for."""
    import tempfile

    from convoy.compare.study.study_strategies import strategies
    from convoy.perfdb import Database
    from convoy.perfdb.shipped import shipped_descriptions
    from convoy.pipeline.net import capture_net
    from convoy.settings import Effort, Settings
    from convoy.zoo import example_args, input_size, load_model

    known = shipped_descriptions().values()
    target = next((target for target in known if device in ("", target.name)), None)
    if target is None:
        raise SystemExit(f"--on: got {device!r}, expected one of {sorted({target.name for target in known})}")
    model = load_model(net, dtype=dtype)
    args = example_args(model, batch=batch, dtype=dtype, default_size=input_size(net))
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(effort=Effort.NONE, db=Path(folder) / "perf.db")
        captured = capture_net(net, model, args, {}, settings, target)
        captured.inputs = []
        with Database.open(settings.db) as database:
            rows, found = strategies(captured, settings, database, lambda *_: None)
    protocol = f"replay of shipped rows, {found.predicted} of {len(found.rows)} problems predicted"
    return Run("study", {"target": target.to_dict(), "protocol": protocol}, tuple(rows))


def main() -> None:
    """Read or replay runs, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN.json")
    parser.add_argument("--replay", default="", metavar="NET,NET")
    parser.add_argument(
        "--on", default="", metavar="DEVICE", help="of --replay; by default the first that results ship for"
    )
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    runs = [read(path) for path in options.runs]
    runs += [replayed(net, options.dtype, options.batch, options.on) for net in options.replay.split(",") if net]
    for run in runs:
        print("\n".join(winners(run.rows)))
        print("\n".join(" ".join(line) for line in strategy_table([r for r in run.rows if r.mode == "inference"])))
        print(recorded(run, options.folder).write())


if __name__ == "__main__":
    run_main(main)
