"""Every family of timm and torchvision, a small member each: captured, right, never slower? Question `zoo`, a process a net.

    python bench/zoo.py --list
    python bench/zoo.py --minutes 30 [--nets NAME,NAME] [--family timm:resnet,vgg] [--device cpu] [--no-timing]

Inference at effort `none` and a training step, with random weights: whether Convoy runs the net whole, by parts or not at
all, the error against float64, PyTorch's time over Convoy's, seconds to the first answer, and the share of time in engines of
Convoy's.
A net that fails, takes longer than `--limit` seconds or more than `--memory` GiB is a row too. A call goes on where the last one
stopped: `zoo-DEVICE.jsonl` in the folder holds the nets that have ended. With `--no-timing`, times are left out of the results:
on a busy machine they are no evidence.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository, which holds the package `bench`

from bench.shared.command_line import run_main
from bench.shared.record import RESULTS, Recorder
from bench.sweep.zoo_nets import families

from convoy.compare.runs.manifest import host

RESERVE_S = 30
"""A net is begun only with so many seconds left."""


def main() -> None:
    """Measure, print and write."""
    options = parsed()
    if options.case:
        print(json.dumps(case(json.loads(options.case))))
        return
    nets = chosen(options)
    if options.list:
        print("\n".join(f"{family:40} {name}" for family, name in nets.items()))
        return
    folder = options.folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / f"zoo-{options.device}.jsonl"
    done = ended(state)
    end = time.monotonic() + 60 * options.minutes
    for name in nets.values():
        if name in done:
            continue
        if time.monotonic() > end - RESERVE_S:
            break
        done[name] = measured(name, options, min(options.limit, end - time.monotonic()))
        with state.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"net": name, **done[name]}) + "\n")
        print(f"{name:40} {in_words(done[name])}", flush=True)
    missing = [name for name in nets.values() if name not in done]
    print(f"{len(done)} nets are there, {len(missing)} are missing")
    if done:
        print(written(done, options, folder))


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nets", default="", help="names, separated by commas, in place of a member of each family")
    parser.add_argument("--family", default="", help="families, separated by commas")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, default=64, help="height and width of images, where the net takes them")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a net may take")
    parser.add_argument(
        "--memory", type=float, default=16.0, help="GiB of addresses that a net's process may take; CPU only"
    )
    parser.add_argument("--no-timing", action="store_true")
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--list", action="store_true", help="families with their nets")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> dict[str, str]:
    """Family → net."""
    if options.nets:
        return {name: name for name in options.nets.split(",")}
    found = families()
    return {family: found[family] for family in options.family.split(",")} if options.family else found


def ended(state: Path) -> dict[str, dict[str, Any]]:
    """The nets that have ended, with what was found."""
    lines = state.read_text(encoding="utf-8").splitlines() if state.exists() else []
    return {row.pop("net"): row for row in map(json.loads, lines)}


def measured(name: str, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """One net in a process of its own, with an empty database."""
    words = json.dumps(
        {"name": name, "device": options.device, "size": options.size, "training": not options.no_training}
    )

    def limited() -> None:
        if options.device == "cpu":
            resource.setrlimit(resource.RLIMIT_AS, (int(options.memory * 2**30),) * 2)

    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "CONVOY_DB": str(Path(folder) / "perf.db")}
        command = [sys.executable, "-W", "ignore", __file__, "--case", words]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=limit_s, preexec_fn=limited,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"ok": False, "kind": "failed", "why": f"took longer than {limit_s:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return {"ok": False, "kind": "failed", "why": f"exit status {done.returncode}: {said[-1] if said else ''}"[:300]}


def case(words: dict[str, Any]) -> dict[str, Any]:
    """In the child: run the net."""
    from bench.sweep.zoo_case import run_case

    return run_case(words["name"], words["device"], size=words["size"], training=words["training"])


def in_words(found: dict[str, Any]) -> str:
    """A net's line on the screen."""
    if not found.get("convolutions", 1):
        return "no convolution"
    line = "".join(
        (
            "" if found["ok"] else "WRONG ",
            found["kind"],
            f" error {found['error']:.1e} (stock {found['stock_error']:.1e})" if "error" in found else "",
            f" {found['why']}" if found.get("why") else "",
        )
    )
    training = found.get("training")
    if training:
        line += f"; training {'' if training['ok'] else 'WRONG '}{training['kind']} {training['why']}"
    return line


def written(done: dict[str, dict[str, Any]], options: argparse.Namespace, folder: Path) -> Path:
    """Write the rows: a net's inference, its step, and the times of both."""
    from convoy.measurement import detect_target

    target = detect_target(options.device)
    recorder = Recorder(
        "zoo",
        device=target.name,
        versions=" ".join(f"{key}={value}" for key, value in target.versions if key in ("torch", "cuda", "cudnn")),
        protocol=f"effort none, random weights, {options.size} pixels where the net takes them, a process each",
        folder=folder,
        machine={"host": host()},
    )
    for name, found in done.items():
        for mode, row in (("", found), ("training_", found.get("training"))):
            if row is None or not found.get("convolutions", 1):
                continue
            about = {"subject": name, "provider": "convoy", "ok": bool(row["ok"]), "processes": "own"}
            note = f"{row['kind']} {row.get('why', '')}".strip()
            recorder.add(**about, metric=f"{mode}error", unit="1", p50=row.get("error", math.nan), note=note)
            timed = () if options.no_timing else (("first_s", "s"), ("speedup", "1"))
            for metric, unit in (*timed, ("own_share", "1")):
                if metric in row:
                    recorder.add(**about, metric=f"{mode}{metric}", unit=unit, p50=row[metric], note=note)
    return recorder.write()


if __name__ == "__main__":
    run_main(main)
