"""How soon does a package answer, and does it leak? Question `package`, each figure in a fresh process.

- `open_s`: seconds from `convoy.open` to the first answer, with torch imported; importing convoy counts.
- `open_cpu_s`: the processor time of the same, which a busy machine disturbs less.
- `runtime_s`: seconds of a whole process of examples/libconvoy/classify.c: start, open, one answer, end.
- `runtime_cpu_s`: its processor time.
- `growth_bytes`: resident memory that `--cycles` times opening, running and closing add, after a tenth as many to warm up; of
  `convoy.open`, and of libconvoy.
- `package_bytes`: size of the file.

    python bench/package.py [--device cpu] [--nets resnet18,mobilenet_v2,resnet50] [--rounds 5] [--cycles 1000]

Packages are exported with `portable=True`, so that the C runtime can run them: on a CPU at effort `none`, on a GPU tuned for 30
seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the repository, which holds the package `bench`

from bench.shared.command_line import run_main
from bench.shared.record import Recorder
from bench.shared.rows import Row

from convoy.target import usable_cores

OPEN = """
import json, os, sys, time
import torch
path = sys.argv[1]
def cpu():
    used = os.times()
    return used.user + used.system
start, before = time.perf_counter(), cpu()
import convoy
net = convoy.open(path, trust=True)
y = net(*net.example_inputs())
if net.device.type == "cuda":
    torch.cuda.synchronize()
print(json.dumps({"open_s": time.perf_counter() - start, "open_cpu_s": cpu() - before}))
"""
"""A fresh process that opens a package and runs it once; prints one line of JSON."""

GROWTH = """
import ctypes, json, sys
from pathlib import Path
path, library, cycles = sys.argv[1], sys.argv[2], int(sys.argv[3])
def state():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096, len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))
def growth(cycle):
    for _ in range(max(20, cycles // 10)):
        cycle()
    before = state()
    for _ in range(cycles):
        cycle()
    after = state()
    return {"growth_bytes": after[0] - before[0], "files": after[1] - before[1], "threads": after[2] - before[2]}
if library:
    runtime = ctypes.CDLL(library)
    def cycle():
        net = ctypes.c_void_p()
        assert runtime.convoy_open(path.encode(), 1, ctypes.byref(net)) == 0
        runtime.convoy_close(net)
else:
    import gc, convoy
    x = convoy.open(path, trust=True).example_inputs()
    def cycle():
        convoy.open(path, trust=True)(*x)
        gc.collect()
print(json.dumps(growth(cycle)))
"""
"""A fresh process that opens and closes a package many times; prints one line of JSON."""


def told(code: str, *words: object) -> dict[str, Any]:
    """What a fresh process prints, as JSON."""
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def built_classifier(folder: Path) -> Path:
    """examples/libconvoy/classify.c and libconvoy, compiled."""
    from convoy.package.runtime_library import write_runtime

    library, program = write_runtime(folder / "libconvoy").parent, folder / "classify"
    links = (f"-I{library}", f"-L{library}", "-lconvoy", f"-Wl,-rpath,{library}", "-pthread")
    source = ROOT / "examples" / "libconvoy" / "classify.c"
    subprocess.run([shutil.which("cc") or "cc", "-O2", str(source), *links, "-o", str(program)], check=True)
    return program


def runtime_times(program: Path, package: Path) -> dict[str, float]:
    """Wall and processor time of the C program, from its start to its end."""
    before, start = os.times(), time.perf_counter()
    subprocess.run([str(program), str(package)], check=True, stdout=subprocess.DEVNULL)
    took, after = time.perf_counter() - start, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return {"runtime_s": took, "runtime_cpu_s": used}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and extremes of few values, as a recorder takes them."""
    ordered = sorted(values)
    return {"p50": ordered[len(ordered) // 2], "p20": ordered[0], "p80": ordered[-1]}


def exported(net: str, folder: Path, device: str) -> Path:
    """A portable package of a net with random weights."""
    import convoy
    from convoy.zoo import example_args, load_model

    model = load_model(net).to(device)
    settings = convoy.Settings(effort="none") if device == "cpu" else convoy.Settings(time_s=30)
    args = tuple(x.to(device) for x in example_args(model))
    return convoy.export(model, folder / f"{net}.convoy", args, portable=True, settings=settings, name=net)


def measure(net: str, program: Path, folder: Path, device: str, counts: tuple[int, int], recorder: Recorder) -> None:
    """All figures of one net; `counts`: rounds and cycles."""
    package, (rounds, cycles) = exported(net, folder, device), counts
    note = f"load {os.getloadavg()[0]:.1f} on {usable_cores()} cores"
    opened = [told(OPEN, package) for _ in range(rounds)]
    ran = [runtime_times(program, package) for _ in range(rounds)]
    for provider, found in (("convoy", opened), ("libconvoy", ran)):
        for metric in found[0]:
            figures = spread([one[metric] for one in found])
            recorder.add(subject=net, provider=provider, metric=metric, unit="s", note=note, processes="own", **figures)
            print(f"{net:16} {provider:10} {metric:14} {figures['p50']:10.3f} s   {note}", flush=True)
    for provider, library in (("convoy", ""), ("libconvoy", program.parent / "libconvoy" / "libconvoy.so")):
        grown = told(GROWTH, package, library, cycles)
        lasting = f"{cycles} cycles; {grown['files']} files and {grown['threads']} threads more"
        value = float(grown["growth_bytes"])
        recorder.add(
            subject=net, provider=provider, metric="growth_bytes", unit="B", p50=value, note=lasting, processes="own"
        )
        print(f"{net:16} {provider:10} {'growth_bytes':14} {value:10.0f} B   {lasting}", flush=True)
    size = float(package.stat().st_size)
    recorder.add(subject=net, provider="convoy", metric="package_bytes", unit="B", p50=size, processes="own")


def package_table(rows: Sequence[Row], title: str) -> str:
    """Seconds to the first answer, what many openings add to the memory, and sizes."""
    nets: dict[str, dict[tuple[str, str], float]] = {}
    for row in rows:
        nets.setdefault(row["subject"], {})[row["provider"], row["metric"]] = float(row["p50"])
    lines = [
        f"{title}, {rows[0]['device']}, commit {rows[0]['commit']}, {rows[0]['protocol']}",
        "",
        "| net | MB | `convoy.open` to the first answer, s | processor time, s | C runtime, process, s | KB kept, Python | C |",
        "|---|---|---|---|---|---|---|",
    ]
    columns = (
        ("convoy", "package_bytes", 1e-6, ".1f"), ("convoy", "open_s", 1, ".2f"), ("convoy", "open_cpu_s", 1, ".2f"),
        ("libconvoy", "runtime_s", 1, ".3f"), ("convoy", "growth_bytes", 1e-3, ".0f"),
        ("libconvoy", "growth_bytes", 1e-3, ".0f"),
    )  # fmt: skip
    for net, found in nets.items():
        cells = [
            f"{found[provider, metric] * factor:{form}}" if (provider, metric) in found else ""
            for provider, metric, factor, form in columns
        ]
        lines.append(f"| {' | '.join((net, *cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nets", default="resnet18,mobilenet_v2,resnet50")
    parser.add_argument("--rounds", type=int, default=5, help="fresh processes for each figure")
    parser.add_argument("--cycles", type=int, default=1000, help="openings for the growth of the memory")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    from convoy.compare.runs.manifest import host
    from convoy.measurement import detect_target

    target = detect_target(options.device)
    recorder = Recorder(
        "package",
        device=target.name,
        versions=" ".join(f"{key}={value}" for key, value in target.versions if key == "torch"),
        protocol=f"a fresh process each, {options.cycles} cycles, {usable_cores()} cores",
        folder=options.folder,
        machine={"host": host()},
    )
    with tempfile.TemporaryDirectory() as folder:
        program = built_classifier(Path(folder))
        for net in options.nets.split(","):
            measure(net, program, Path(folder), options.device, (options.rounds, options.cycles), recorder)
            print(recorder.write())  # after each net: a run that is cut short keeps its rows


if __name__ == "__main__":
    run_main(main)
