"""How much memory does tuning take, and how much running? Question `tuning-memory`.

A net is tuned from nothing by `convoy.optimize`, measuring processes, schedules and the last check included, and once more under
a limit (`Settings.tuning_memory_bytes`) of 1.25 times what running its plan takes. Then both plans are timed in turn.

Tuning: what the device holds beyond what it held before, read every few milliseconds; a peak that is shorter than that is missed.
Of the processes that tune, those that measure and those that compile on the device bring a CUDA context each, which counts; that
of this process does not. Running: what PyTorch holds at its most, from loading model and plan on. Use a device on which nothing
else runs.

    python bench/tuning_memory.py [--nets resnet50] [--batch 1,32] [--dtype fp16] [--tune-seconds N] [--folder DIR]
"""

from __future__ import annotations

import argparse
import gc
import math
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from record import Recorder

import convoy
from convoy.measurement import detect_target
from convoy.pipeline import optimize_model
from convoy.pipeline.verdict import Timed, interleave
from convoy.program.recording import forget_library_workspaces
from convoy.zoo import input_size, load_model

MUST = 1.25
"""Times the memory of running that tuning is allowed."""

EVERY_S = 0.005
"""Between two looks at the device: an allocation that lasts is seen, and looking takes no core."""

PROTOCOL = (
    f"tuning: bytes of the device every {EVERY_S * 1e3:g} ms, before to peak; running: PyTorch's peak; plans in turn"
)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Watch:
    """The most that a device held since it was begun to be watched, beyond what it held then."""

    def __init__(self) -> None:
        self.before = self.most = used()

    @property
    def bytes(self) -> int:
        """The peak, in bytes."""
        return self.most - self.before

    def look(self) -> None:
        """Once."""
        self.most = max(self.most, used())


def used() -> int:
    """Bytes of the device that are taken, by whomever."""
    free, total = torch.cuda.mem_get_info()
    return total - free


@contextmanager
def watched() -> Iterator[Watch]:
    """Look at the device until the end of the block, every few milliseconds."""
    release()
    watch, over = Watch(), threading.Event()

    def look() -> None:
        while not over.wait(EVERY_S):
            watch.look()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield watch
        watch.look()
    finally:
        over.set()
        thread.join()


def release() -> None:
    """Give back what nobody uses."""
    forget_library_workspaces()
    gc.collect()
    torch.cuda.empty_cache()


def example(net: str, batch: int, dtype: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """A net and its input on the device."""
    size = input_size(net)
    side = size if isinstance(size, int) else size[-1]
    x = torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(batch)).cuda().to(DTYPES[dtype])
    return load_model(net).eval().cuda().to(DTYPES[dtype]), x


@dataclass(frozen=True, slots=True)
class Tuned:
    """A plan, saved, and the most bytes of the device that tuning it took."""

    paths: list[Path]
    bytes: int
    notes: tuple[str, ...]


def tune(net: str, batch: int, dtype: str, folder: Path, **limits: Any) -> Tuned:
    """A net tuned with a database of its own."""
    settings = convoy.Settings(db=folder / "perf.db", **limits)
    with torch.no_grad(), watched() as watch:
        model, x = example(net, batch, dtype)
        program = optimize_model(model, (x,), name=net, settings=settings).program
        paths = program.save(folder / "plan.json")
        notes = program.plan.notes
        del model, x, program
    return Tuned(paths, watch.bytes, notes)


def running_bytes(net: str, batch: int, dtype: str, tuned: Tuned) -> int:
    """The most that PyTorch holds while a plan is loaded and runs."""
    release()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        model, x = example(net, batch, dtype)
        program = convoy.load(model, tuned.paths, (x,))
        for _ in range(3):
            program(x)
        torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved() - before


def latencies(net: str, batch: int, dtype: str, plans: Mapping[str, Tuned]) -> dict[str, Timed]:
    """Milliseconds of each plan's graph, in turn."""
    release()
    with torch.no_grad():
        model, x = example(net, batch, dtype)
        programs = {name: convoy.load(model, tuned.paths, (x,)).programs[0] for name, tuned in plans.items()}
        for program in programs.values():
            program((x,), {})
        return interleave({name: program.runnable.replay for name, program in programs.items()}, cuda=True)


def measure(net: str, batch: int, dtype: str, tune_s: float, recorder: Recorder) -> None:
    """All figures of one net."""
    add = partial(recorder.add, subject=net, batch=batch, dtype=dtype)
    with tempfile.TemporaryDirectory() as free, tempfile.TemporaryDirectory() as limited:
        plans = {"convoy": tune(net, batch, dtype, Path(free), tune_s=tune_s)}
        running = running_bytes(net, batch, dtype, plans["convoy"])
        limit = int(MUST * running)
        plans["convoy.limited"] = tune(
            net, batch, dtype, Path(limited), tune_s=tune_s, tuning_memory_bytes=limit
        )  # fmt: skip
        timed = latencies(net, batch, dtype, plans)
    add(provider="convoy", metric="running_memory_bytes", unit="B", p50=running)
    add(provider="convoy.limited", metric="tuning_limit_bytes", unit="B", p50=limit)
    for name, tuned in plans.items():
        found = timed[name]
        add(provider=name, metric="tuning_memory_bytes", unit="B", p50=tuned.bytes)
        low, high = found.median_ms - found.spread_ms, found.median_ms + found.spread_ms
        add(provider=name, metric="latency_ms", unit="ms", p50=found.median_ms, p20=low, p80=high)
        print(f"{net} b{batch} {dtype} {name}: {tuned.bytes / 1e6:.0f} MB tuning, {found.median_ms:.4f} ms", flush=True)
        print(*(f"  {note}" for note in tuned.notes), sep="\n", flush=True)
    print(f"  {running / 1e6:.0f} MB running, limit {limit / 1e6:.0f} MB", flush=True)


def main() -> None:
    """Tune, run, print, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default="resnet50")
    parser.add_argument("--batch", default="1,32")
    parser.add_argument("--dtype", default="fp16", choices=sorted(DTYPES))
    parser.add_argument("--tune-seconds", type=float, default=math.inf)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    target = detect_target("cuda")
    recorder = Recorder(
        "tuning-memory",
        device=target.name,
        versions=" ".join(f"{name}={version}" for name, version in target.versions),
        protocol=PROTOCOL,
        folder=options.folder,
    )
    for net in options.nets.split(","):
        for batch in map(int, options.batch.split(",")):
            measure(net, batch, options.dtype, options.tune_seconds, recorder)
            print(recorder.write(), flush=True)


if __name__ == "__main__":
    main()
