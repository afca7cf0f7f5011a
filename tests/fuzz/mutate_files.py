"""make fuzz: mutated files for every loader. Nothing but ConvoyError, no second of hanging, no more than 256 MiB.

    python -m tests.fuzz.mutate_files --count 1000000 --seed 1 --jobs 2 [--only plan]

A failing file is kept in the folder that `--keep` names, beside the traceback. Each process handles one loader at a time, may
allocate 256 MiB more than it has once the loader is imported, and is killed with a traceback where a file takes ten seconds.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import random
import resource
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.file_loaders import Loader, made, names
from tests.fuzz.mutations import mutated

MOST_BYTES = 256 << 20
LONGEST_S = 1.0
"""Of a process's own time: another may have the core meanwhile."""
KILLED_S = 10
CHUNK = 5000
"""Files for one child process: what a file leaves behind does not pile up."""


@dataclass
class Outcome:
    """The outcome of reading some mutated files.

    Attributes:
        seen: how many were `loaded`, `refused` or `failed`.
        faults: file's content and what went wrong.
    """

    seen: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[bytes, str]] = field(default_factory=list)


def mutation(loader: Loader, draw: random.Random) -> bytes:
    """One mutated file."""
    seed = draw.choice(loader.seeds)
    if loader.unwrap is None or loader.wrap is None:
        return mutated(seed, draw, loader.seeds)
    return loader.wrap(mutated(loader.unwrap(seed), draw, [loader.unwrap(one) for one in loader.seeds]))


def try_file(loader: Loader, path: Path, data: bytes) -> tuple[str, str]:
    """Load one file: `loaded`, `refused` or `failed`, and what went wrong."""
    from convoy.errors import ConvoyError

    path.write_bytes(data)
    begun = time.process_time()
    try:
        loader.load(path)
        word, why = "loaded", ""
    except ConvoyError as error:
        # What is printed of it must be printable; the message is made here, for it may fail by itself.
        word, why = (
            "refused",
            "" if str(error).isprintable() or "\n" in str(error) else "a message with control characters",
        )
    except BaseException:  # MemoryError and KeyboardInterrupt too: nothing else may come out of a loader
        word, why = "failed", traceback.format_exc(limit=-6)
    took = time.process_time() - begun
    if took > LONGEST_S:
        why = f"took {took:.1f} s\n{why}"
    return ("failed" if why else word), why


def run(name: str, count: int, seed: int, folder: Path) -> Outcome:
    """Try some mutations of one loader's files."""
    loader = made(name)
    draw = random.Random(zlib.crc32(f"{name} {seed}".encode()))
    path = folder / f"file{loader.suffix}"
    outcome = Outcome()
    for _ in range(count):
        data = mutation(loader, draw)
        faulthandler.dump_traceback_later(KILLED_S, exit=True)
        word, why = try_file(loader, path, data)
        faulthandler.cancel_dump_traceback_later()
        outcome.seen[word] += 1
        if why:
            outcome.faults.append((data, why))
            if len(outcome.faults) >= 20:
                break
    return outcome


def _limited(job: tuple[str, int, int]) -> tuple[str, Outcome]:
    """`run` in a process of its own, under its limit of memory."""
    name, count, seed = job
    warnings.simplefilter("ignore")  # what Pillow says of damaged images
    loader = made(name)
    for data in loader.seeds:  # what the good files import is not counted
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"file{loader.suffix}"
            path.write_bytes(data)
            loader.load(path)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES, resource.RLIM_INFINITY))
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        return name, run(name, count, seed, Path(folder))


def main() -> int:
    """Run the command; 1 where anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000, help="mutated files in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", action="append", choices=names(), help="one loader; may be given several times")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="where failing files are kept")
    args = parser.parse_args()
    chosen = args.only or names()
    shares = {name: made(name).share for name in chosen}
    jobs = []
    for name in chosen:
        left = max(1, round(args.count * shares[name] / sum(shares.values())))
        for part, start in enumerate(range(0, left, CHUNK)):
            jobs.append((name, min(CHUNK, left - start), args.seed * 1_000_003 + part))
    totals = {name: Outcome() for name in chosen}
    begun = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.jobs, maxtasksperchild=1) as pool:
        for done, (name, outcome) in enumerate(pool.imap_unordered(_limited, jobs), start=1):
            totals[name].seen.update(outcome.seen)
            totals[name].faults += outcome.faults
            words = ", ".join(f"{count} {word}" for word, count in sorted(outcome.seen.items()))
            print(f"{done} of {len(jobs)}, {time.monotonic() - begun:.0f} s: {name}: {words}", flush=True)
    failed = 0
    for name, outcome in totals.items():
        print(f"{name:20} " + ", ".join(f"{outcome.seen[word]} {word}" for word in ("loaded", "refused", "failed")))
        for index, (data, why) in enumerate(outcome.faults):
            failed += 1
            args.keep.mkdir(exist_ok=True)
            (args.keep / f"{name}-{index}").write_bytes(data)
            (args.keep / f"{name}-{index}.txt").write_text(why)
            if index < 3:
                print(f"--- {args.keep / f'{name}-{index}'}\n{why}")
    print(
        f"{sum(sum(o.seen.values()) for o in totals.values())} files in {time.monotonic() - begun:.0f} s, {failed} failed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
