"""How much slower is a batch without a program of its own? Question `dynamic`.

One module is made with `convoy.optimize(..., dynamic={0: (1, MOST)})`. For each batch size, a second one is made with a plan of
its own, and calls of both are timed in turn. Metrics: `over_own` (time of the first over that of the second, a row a batch size),
`over_own_worst` and `over_own_mean` (geometric) over all of them, and `weights_share` (bytes of packed weights that all programs
of the first hold, over those of its largest program).

    python bench/inference/dynamic.py [--nets resnet50,mobilenet_v2] [--device cuda] [--dtype fp16] [--most 64]
        [--batches 1,3,5,7,12,23,37,48,63] [--effort quick] [--tune-seconds 60] [--folder DIR]
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.shared.command_line import counts, run_main
from bench.shared.record import Recorder

import convoy
from convoy.compare.runs.manifest import host
from convoy.dynamic.dynamic_module import DynamicModule
from convoy.measurement import detect_target
from convoy.pipeline.check.end_to_end import Latency, interleave
from convoy.target import usable_cores
from convoy.zoo import example_args, load_model

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def weights_of(module: DynamicModule, programs: slice = slice(None)) -> int:
    """Bytes of the packed constants of some programs, each tensor's memory once."""
    return sum(dict(_constants(module, programs)).values())


def _constants(module: DynamicModule, programs: slice) -> Iterator[tuple[int, int]]:
    for program in module.programs[programs]:
        bound: Any = getattr(program.runnable, "bound", None)
        for step in bound.steps if bound is not None else ():
            for item in step.constants:
                if isinstance(item, torch.Tensor):
                    opaque = item.is_mkldnn  # a tensor object each, which the pool shares as a whole
                    yield (id(item) if opaque else item.data_ptr()), item.numel() * item.element_size()


def compared(dynamic: Any, own: Any, x: torch.Tensor) -> tuple[Latency, Latency]:
    """Times of one call of both, in turn; raises AssertionError if their results differ beyond rounding."""
    with torch.no_grad():
        found, wanted = dynamic(x).double(), own(x).double()
        error = float((found - wanted).norm() / wanted.norm())
        assert error < 2e-2, f"relative error {error:.1e}"
        timed = interleave({"dynamic": lambda: dynamic(x), "own": lambda: own(x)}, cuda=x.is_cuda)
    return timed["dynamic"], timed["own"]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nets", default="resnet50,mobilenet_v2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="fp16" if torch.cuda.is_available() else "fp32", choices=DTYPES)
    parser.add_argument("--most", type=int, default=64)
    parser.add_argument("--batches", type=counts, default="1,3,5,7,12,23,37,48,63")
    parser.add_argument("--effort", default="quick")
    parser.add_argument("--tune-seconds", type=float, default=math.inf, help="for each plan")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    target = detect_target(options.device)
    recorder = Recorder(
        "dynamic",
        device=target.name,
        versions=" ".join(f"{key}={value}" for key, value in target.versions if key in ("torch", "cuda", "cudnn")),
        protocol=f"calls in turn, effort {options.effort}, {usable_cores()} cores",
        folder=options.folder,
        machine={"host": host()},
    )
    batches = options.batches
    for net in options.nets.split(","):
        measured(net, batches, options, recorder)
    print(recorder.write())


def measured(net: str, batches: list[int], options: argparse.Namespace, recorder: Recorder) -> None:
    """All rows of one net."""
    dtype = DTYPES[options.dtype]
    model = load_model(net).to(options.device, dtype).eval()
    (most,) = (x.to(options.device, dtype) for x in example_args(model, batch=options.most))
    buckets = options.most.bit_length()
    settings = convoy.Settings(effort=options.effort, time_s=options.tune_seconds)
    whole = convoy.Settings(effort=options.effort, time_s=options.tune_seconds * buckets)
    fast = convoy.optimize(model, (most,), settings=whole, name=net, dynamic={0: (1, options.most)})
    assert isinstance(fast, DynamicModule), "batches of this net cannot be split"
    about: dict[str, Any] = {"subject": net, "provider": "convoy", "dtype": options.dtype, "processes": "one"}
    ratios: list[float] = []
    for batch in batches:
        own = convoy.optimize(model, (most[:batch],), settings=settings, name=net)
        mine, theirs = compared(fast, own, most[:batch])
        ratios.append(mine.median_ms / theirs.median_ms)
        chosen = fast.size_programs.split((batch,))
        split = " + ".join(map(str, chosen.batches)) if chosen is not None else "stock"
        note = f"{split}; {mine.median_ms:.4g} ms over {theirs.median_ms:.4g} ms"
        recorder.add(**about, batch=batch, metric="over_own", unit="1", p50=ratios[-1], note=note)
        print(f"{net:16} {batch:4} {ratios[-1]:6.3f}   {note}", flush=True)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    share = weights_of(fast) / max(1, weights_of(fast, slice(1)))
    note = f"batches {','.join(map(str, options.batches))} of 1 to {options.most}"
    for metric, value in (("over_own_worst", max(ratios)), ("over_own_mean", mean), ("weights_share", share)):
        recorder.add(**about, batch=options.most, metric=metric, unit="1", p50=value, note=note)
        print(f"{net:16} {metric:16} {value:6.3f}   {note}", flush=True)


if __name__ == "__main__":
    run_main(main)
