"""How much memory does tuning take, and how much running? Question `tuning-memory`: bytes of the device, from before to the peak.

A net is tuned from nothing by `convoy.optimize`, measuring processes, schedules and the last check included; then its plan runs,
loaded anew. What the device holds is read every few milliseconds; a peak that is shorter than that is missed. Of the processes
that tune, those that measure bring a CUDA context each, which counts; that of this process does not. Use a device on which
nothing else runs.

    python bench/tuning_memory.py [--nets resnet50] [--batch 1,32] [--dtype fp16] [--tune-seconds N] [--folder DIR]
"""

from __future__ import annotations

import argparse
import gc
import math
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from record import Recorder

import convoy
from convoy.measurement import detect_target
from convoy.pipeline import optimize_model
from convoy.program.recording import forget_library_workspaces
from convoy.zoo import input_size, load_model

EVERY_S = 0.005
"""Between two looks at the device: an allocation that lasts is seen, and looking takes no core."""

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


def measure(net: str, batch: int, dtype: str, settings: convoy.Settings) -> tuple[int, int]:
    """Bytes of tuning and of running."""
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        with watched() as tuning:
            model, x = example(net, batch, dtype)
            paths = optimize_model(model, (x,), name=net, settings=settings).program.save(Path(folder) / "plan.json")
            del model, x
        with watched() as running:
            model, x = example(net, batch, dtype)
            program = convoy.load(model, paths, (x,), settings=settings)
            for _ in range(3):
                program(x)
            torch.cuda.synchronize()
    return tuning.bytes, running.bytes


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
        protocol=f"bytes of the device every {EVERY_S * 1e3:g} ms, from before to the peak",
        folder=options.folder,
    )
    for net in options.nets.split(","):
        for batch in map(int, options.batch.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                settings = convoy.Settings(db=Path(folder) / "perf.db", tune_s=options.tune_seconds)
                tuning, running = measure(net, batch, options.dtype, settings)
            for metric, value in (("tuning_memory_bytes", tuning), ("running_memory_bytes", running)):
                recorder.add(
                    subject=net, batch=batch, dtype=options.dtype, provider="convoy", metric=metric, unit="B", p50=value
                )  # fmt: skip
            mega = f"{tuning / 1e6:.0f} MB tuning, {running / 1e6:.0f} MB running"
            print(f"{net} b{batch} {options.dtype}: {mega}, {tuning / running:.2f} times", flush=True)
    print(recorder.write())


if __name__ == "__main__":
    main()
