"""How much faster is a net if the cache evicts large values after their last read? Question `last-reads`.

One plan a case, captured twice as a CUDA graph: with the marks of `convoy.program.cuda.last_reads`, and without. The two
graphs are replayed in turn.

    python bench/inference/last_reads.py [--nets mobilenet_v2,efficientnet_b0,resnet50,densenet121] [--batch 32]
                                         [--dtype fp16] [--time 15] [--db FILE] [--folder DIR]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Generator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import torch

import convoy
from convoy.compare.runs.manifest import gpu_clocks, host
from convoy.engines.torch_operators import DTYPES
from convoy.measurement import detect_target
from convoy.program.cuda import last_reads
from convoy.program.cuda.cuda_graph import CudaGraphProgram
from convoy.zoo import input_size, load_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.inference.last_reads_table import PROVIDERS
from bench.inference.own_processes import machine_of
from bench.shared.command_line import counts, run_main
from bench.shared.quantile import quantile
from bench.shared.record import Recorder
from bench.shared.timed_code import whole_net_code

ROUNDS, SAMPLE_US = 21, 20_000

PROTOCOL = f"median of {ROUNDS} rounds; replays for {SAMPLE_US // 1000} ms of each graph in turn; events of the device"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default="mobilenet_v2,efficientnet_b0,resnet50,densenet121")
    parser.add_argument("--batch", type=counts, default="32")
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--time", type=float, default=15.0, help="seconds of tuning a net")
    parser.add_argument("--db", type=Path)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    target = detect_target("cuda")
    recorder = Recorder(
        "last-reads",
        device=target.name,
        versions=" ".join(f"{name}={version}" for name, version in target.versions),
        protocol=PROTOCOL,
        folder=given.folder,
        machine=machine_of({"clocks": gpu_clocks(), "system": {"host": host()}}),
        code=whole_net_code("cuda"),
    )
    settings = convoy.Settings(time_s=given.time, db=given.db)
    for net, dtype, batch in product(given.nets.split(","), given.dtype.split(","), given.batch):
        times, marks = measured(net, batch, DTYPES[dtype], settings)
        for provider, values in times.items():
            recorder.add(subject=net, batch=batch, dtype=dtype, numerics="as_torch", provider=provider, metric="call_us",
                         unit="us", p50=statistics.median(values), p20=quantile(values, 0.2), p80=quantile(values, 0.8),
                         note=f"{marks} kernels have marks")  # fmt: skip
        recorder.write()
        plain, marked = (statistics.median(times[name]) for name in PROVIDERS)
        print(f"{net} {dtype} b{batch}: {plain:.1f} us, {marked:.1f} with {marks} marks", flush=True)


def measured(net: str, batch: int, dtype: torch.dtype, settings: convoy.Settings) -> tuple[dict[str, list[float]], int]:
    """Microseconds of a replay by kind of graph, a value a round, and the number of marks."""
    model = load_model(net).eval().to("cuda", dtype)
    size = input_size(net)
    x = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0)).to("cuda", dtype)
    program = convoy.optimize(model, (x,), settings=settings).programs[0].runnable
    assert isinstance(program, CudaGraphProgram), f"{net}: PyTorch's own code was kept"
    with unmarked():
        plain = CudaGraphProgram(program.bound, program.device)
    graphs = {"convoy.unmarked": plain, "convoy.marked": program}
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            found[name].append(replayed(graph))
    return found, program.last_reads


@contextmanager
def unmarked() -> Generator[None]:
    """Programs that are built meanwhile have no marks."""
    before, last_reads.LEAST_BYTES = last_reads.LEAST_BYTES, sys.maxsize  # type: ignore[misc]
    try:
        yield
    finally:
        last_reads.LEAST_BYTES = before  # type: ignore[misc]


def replayed(program: CudaGraphProgram) -> float:
    """Microseconds of one replay among replays that follow each other."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed(times: int) -> float:
        start.record()
        for _ in range(times):
            program.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / times

    once = timed(3)
    return timed(max(3, round(SAMPLE_US / once)))


if __name__ == "__main__":
    run_main(main)
