"""What does it cost to notice a changed module? Question `guard-cost`.

An optimised module compares its stock module with a snapshot in every call (docs/concepts/stale-weights.md). Timed here, by
net: the check alone on the host; on a GPU the time that a call keeps the host busy, with the check and without it, the
replay of the CUDA graph, and calls in a row, with the check and without: their difference is what is not hidden behind the
GPU.

    python bench/guard_cost/guard_cost.py [--nets resnet18,resnet50,mobilenet_v2,densenet121] [--batch 1]
                                          [--dtype fp32,fp16] [--device cuda] [--folder DIR]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch

import convoy
from convoy.compare.runs.manifest import gpu_clocks, host
from convoy.engines.torch_operators import DTYPES
from convoy.measurement import detect_target
from convoy.program.cuda.cuda_graph import CudaGraphProgram
from convoy.program.optimized_module import OptimizedModule
from convoy.zoo import input_size, load_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.inference.own_processes import machine_of
from bench.shared.command_line import counts, run_main
from bench.shared.quantile import quantile
from bench.shared.record import Recorder
from bench.shared.timed_code import whole_net_code

ROUNDS, CALLS = 15, 40

PROTOCOL = (
    f"median of {ROUNDS} rounds of {CALLS} calls, with and without in turn; host clock; a synchronisation a round"
)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default="resnet18,resnet50,mobilenet_v2,densenet121")
    parser.add_argument("--batch", type=counts, default="1")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    target = detect_target(given.device)
    versions = " ".join(f"{name}={version}" for name, version in target.versions)
    recorder = Recorder(
        "guard-cost",
        device=target.name,
        versions=versions,
        protocol=PROTOCOL,
        folder=given.folder,
        machine=machine_of({"clocks": gpu_clocks(), "system": {"host": host()}}),
        code=whole_net_code(target.device),
    )
    cases = product(given.nets.split(","), given.dtype.split(","), given.batch)
    for net, dtype, batch in cases:
        for provider, metric, times in measured(net, batch, dtype, torch.device(given.device)):
            recorder.add(subject=net, batch=batch, dtype=dtype, numerics="as_torch", provider=provider,
                         metric=metric, unit="us", p50=statistics.median(times), p20=quantile(times, 0.2),
                         p80=quantile(times, 0.8))  # fmt: skip
            print(f"{net} {dtype} b{batch} {provider} {metric} {statistics.median(times):.1f} us")
        recorder.write()  # a run that is cut short keeps the nets before


def measured(net: str, batch: int, dtype: str, device: torch.device) -> list[tuple[str, str, list[float]]]:
    """(provider, metric, microseconds a call by round) of one net."""
    model = load_model(net, dtype=dtype).eval().to(device)
    side = input_size(net)
    x = torch.randn(batch, 3, side, side, device=device, dtype=DTYPES[dtype])
    fast = convoy.optimize(model, (x,), settings=convoy.Settings(effort="none"))
    found = [("convoy.check", "check_us", timed(fast.program_cache.why_stale, device, waits=False))]
    if fast.plan.baseline:
        return found
    with torch.no_grad():
        without = unchecked(fast)
        calls = {"convoy": lambda: fast(x), "convoy.unchecked": lambda: without(x)}
        for metric, waits in (("host_us", False), ("call_us", True)):
            rounds = {name: [0.0] * ROUNDS for name in calls}
            for index in range(ROUNDS):
                for name, call in calls.items():
                    rounds[name][index] = once(call, device, waits=waits)
            found += [(name, metric, times) for name, times in rounds.items()]
        runnable = fast.programs[0].runnable
        if isinstance(runnable, CudaGraphProgram):
            found.append(("convoy.replay", "call_us", timed(runnable.replay, device, waits=True)))
    return found


def unchecked(fast: OptimizedModule) -> OptimizedModule:
    """A module with the same programs and without the check."""
    twin = copy.deepcopy(fast)
    twin.program_cache.why_stale = lambda: None  # type: ignore[method-assign]
    return twin


def timed(call: Callable[[], object], device: torch.device, *, waits: bool) -> list[float]:
    """Microseconds a call, by round."""
    return [once(call, device, waits=waits) for _ in range(ROUNDS)]


def once(call: Callable[[], object], device: torch.device, *, waits: bool) -> float:
    """Microseconds a call of one round: with `waits` until the device has done it all, else those of the host alone."""
    call()
    synchronise(device)
    count = CALLS if waits or device.type == "cpu" else 8  # few enough to be queued without waiting for the device
    start = time.perf_counter()
    for _ in range(count):
        call()
    if waits:
        synchronise(device)
    taken = time.perf_counter() - start
    synchronise(device)
    return taken / count * 1e6


def synchronise(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    run_main(main)
