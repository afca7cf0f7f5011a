"""How much memory does tuning take, and how much running? Question `tuning-memory`.

A net is tuned from nothing by `convoy.optimize`, measuring processes, schedules and the last check included; its plan is loaded
and run; and it is tuned once more under a limit (`Settings.tuning_memory_bytes`), so that all together is to take 1.25 times what
running takes. Where such a limit has no room for a process of its own that measures, the process that tunes does it. Then both
plans are timed in turn.

Each of the first three has a process of its own. What the device holds beyond what it held before that process began counts, read
every few milliseconds (a peak that is shorter than that is missed): the contexts of this process and of all that it starts, the
code of kernels, tensors. Use a device on which nothing else runs.

    python bench/tuning/tuning_memory.py [--nets resnet50] [--batch 1,32] [--dtype fp16] [--tune-seconds N] [--folder DIR]
"""

from __future__ import annotations

import argparse
import gc
import math
import multiprocessing
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

import convoy
from convoy.measurement import detect_target
from convoy.measurement.device.memory_limit import MIN_ISOLATED_BYTES
from convoy.pipeline import optimize_model
from convoy.pipeline.check.end_to_end import Latency, interleave
from convoy.program.cuda.recording import forget_library_workspaces
from convoy.zoo import input_size, load_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.shared.command_line import counts, run_main
from bench.shared.record import Recorder

MUST = 1.25
"""Times the memory of running that tuning is allowed."""

EVERY_S = 0.005
"""Between two looks at the device: an allocation that lasts is seen, and looking takes no core."""

PROTOCOL = f"processes of their own: bytes of the device every {EVERY_S * 1e3:g} ms, before to peak; plans in turn"

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


P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Case:
    """A net, its batch and dtype, and how long to tune."""

    net: str
    batch: int
    dtype: str
    time_s: float


@dataclass(frozen=True, slots=True)
class Tuned:
    """A plan, saved, and what its notes say."""

    paths: list[Path]
    notes: tuple[str, ...]


def limits(all_bytes: float) -> dict[str, int | bool]:
    """Settings with which tuning, together with what this process holds, is to take so many bytes.

    Args:
        all_bytes: of the device, this process's context and tensors included.
    """
    left = max(1, int(all_bytes))
    return {"tuning_memory_bytes": left, "isolate": left >= MIN_ISOLATED_BYTES}


def tune(case: Case, folder: Path, before: int, most: float = math.inf) -> Tuned:
    """A net tuned with a database of its own.

    Args:
        case: which.
        folder: for the database and the plan.
        before: bytes of the device that others held before this process began.
        most: bytes that all of this may take.
    """
    with torch.no_grad():
        model, x = example(case.net, case.batch, case.dtype)
        limited = limits(most - (used() - before)) if most < math.inf else {}
        settings = convoy.Settings(db=folder / "perf.db", time_s=case.time_s, **limited)
        program = optimize_model(model, (x,), name=case.net, settings=settings).program
        told = () if settings.isolate else ("measured in the process that tunes",)
        return Tuned(program.save(folder / "plan.json"), (*told, *program.plan.notes))


def run(case: Case, tuned: Tuned) -> None:
    """Load a plan and run it."""
    with torch.no_grad():
        model, x = example(case.net, case.batch, case.dtype)
        program = convoy.load(model, tuned.paths, (x,))
        for _ in range(3):
            program(x)
        torch.cuda.synchronize()


def alone(task: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, int]:
    """Call something in a process of its own: what it gives, and the most bytes of the device that it took."""
    spawned = multiprocessing.get_context("spawn")
    with watched() as watch, ProcessPoolExecutor(1, mp_context=spawned) as pool:
        found = pool.submit(task, *args, **kwargs).result()
    return found, watch.bytes


def latencies(case: Case, plans: Mapping[str, Tuned]) -> dict[str, Latency]:
    """Milliseconds of each plan's graph, in turn."""
    release()
    with torch.no_grad():
        model, x = example(case.net, case.batch, case.dtype)
        programs = {name: convoy.load(model, tuned.paths, (x,)).programs[0] for name, tuned in plans.items()}
        for program in programs.values():
            program((x,), {})
        return interleave({name: program.runnable.replay for name, program in programs.items()}, cuda=True)


@dataclass(frozen=True, slots=True)
class Found:
    """What one net took.

    Attributes:
        running: bytes of the device.
        limit: bytes that `convoy.limited` was allowed.
        tuned: plans, `convoy` and `convoy.limited`.
        tuning: bytes of the device that each took.
        timed: of each plan's graph.
    """

    running: int
    limit: float
    tuned: dict[str, Tuned]
    tuning: dict[str, int]
    timed: dict[str, Latency]


def measure(case: Case) -> Found:
    """Everything of one net."""
    with tempfile.TemporaryDirectory() as free, tempfile.TemporaryDirectory() as limited:
        release()
        before = used()
        plan, took = alone(tune, case, Path(free), before)
        _, running = alone(run, case, plan)
        limit = MUST * running
        other, less = alone(tune, case, Path(limited), before, limit)
        plans = {"convoy": plan, "convoy.limited": other}
        tuning = {"convoy": took, "convoy.limited": less}
        return Found(running, limit, plans, tuning, latencies(case, plans))


def record(case: Case, found: Found, recorder: Recorder) -> None:
    """Rows, and lines for people."""
    add = partial(recorder.add, subject=case.net, batch=case.batch, dtype=case.dtype)
    add(provider="convoy", metric="running_memory_bytes", unit="B", p50=found.running)
    add(provider="convoy.limited", metric="tuning_limit_bytes", unit="B", p50=found.limit)
    for name, tuned in found.tuned.items():
        took, timed = found.tuning[name], found.timed[name]
        add(provider=name, metric="tuning_memory_bytes", unit="B", p50=took)
        low, high = timed.median_ms - timed.spread_ms, timed.median_ms + timed.spread_ms
        add(provider=name, metric="latency_ms", unit="ms", p50=timed.median_ms, p20=low, p80=high)
        print(f"{case} {name}: {took / 1e6:.0f} MB tuning, {timed.median_ms:.4f} ms", flush=True)
        print(*(f"  {note}" for note in tuned.notes), sep="\n", flush=True)
    print(f"  {found.running / 1e6:.0f} MB running, limit {found.limit / 1e6:.0f} MB", flush=True)


def main() -> None:
    """Tune, run, print, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default="resnet50")
    parser.add_argument("--batch", type=counts, default="1,32")
    parser.add_argument("--dtype", default="fp16", choices=sorted(DTYPES))
    parser.add_argument("--tune-seconds", type=float, default=math.inf)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.cuda.init()
    target = detect_target("cuda")
    recorder = Recorder(
        "tuning-memory",
        device=target.name,
        versions=" ".join(f"{name}={version}" for name, version in target.versions),
        protocol=PROTOCOL,
        folder=options.folder,
    )
    for net in options.nets.split(","):
        for batch in options.batch:
            case = Case(net, batch, options.dtype, options.tune_seconds)
            record(case, measure(case), recorder)
            print(recorder.write(), flush=True)


if __name__ == "__main__":
    run_main(main)
