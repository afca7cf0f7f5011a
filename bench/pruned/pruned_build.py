"""How long does it take to write and compile code for a mask? Question `pruned`, metric `compile_s`.

ResNet-50's distinct 3x3 and 1x1 layers with most weights zero: the engine's first setting for each, in an empty cache, all cores
on one layer. No GPU is needed for `pruned.cuda`; without one, an H100 is built for.

    python bench/pruned/pruned_build.py [--engine pruned.cuda|pruned.c] [--sparsity 0.9] [--seconds S] [--folder DIR]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from convoy.engines.manifest import load_engine
from convoy.measurement import detect_target
from convoy.target import Target

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.pruned.pruned_layers import masked, resnet_layers
from bench.shared.command_line import run_main
from bench.shared.record import Recorder
from bench.shared.time_limit import TimeIsUpError, until

H100 = Target("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132, 80 << 30, 50 << 20)


def main() -> None:
    """Build, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="pruned.cuda", choices=("pruned.cuda", "pruned.c"))
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--seconds", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="convoy-empty-cache-")
    engine = load_engine(options.engine)
    on_gpu = options.engine == "pruned.cuda" and torch.cuda.is_available()
    target = detect_target("cuda") if on_gpu else H100 if options.engine == "pruned.cuda" else detect_target("cpu")
    cores = len(os.sched_getaffinity(0))
    recorder = Recorder(
        "pruned", device=target.name, versions=" ".join(f"{n}={v}" for n, v in target.versions) or f"torch={torch.__version__}",
        protocol=f"once, empty cache, {cores} cores", folder=options.folder,
    )  # fmt: skip
    seconds: list[float] = []
    layers = sorted(resnet_layers(1, "fp32", 0), key=lambda layer: -layer[1].weight_spec.elements)
    with until(options.seconds):
        try:
            for name, dense in layers:
                problem = masked(dense, options.sparsity, "unstructured")
                support = engine.accepts(problem, target)
                if not support:
                    print(f"{name}: {support.reason}", flush=True)
                    continue
                began = time.perf_counter()
                engine.build(problem, engine.space(problem, target)[0], target)
                seconds.append(time.perf_counter() - began)
                assert problem.mask is not None
                note = f"{name} unstructured {options.sparsity} nonzeros={problem.mask.nonzeros}"
                print(f"{note}: {seconds[-1]:.2f} s", flush=True)
                recorder.add(
                    subject=problem.key, provider=f"convoy.{options.engine}", metric="compile_s", unit="s", p50=seconds[-1],
                    numerics="strict", note=note,
                )  # fmt: skip
        except TimeIsUpError:
            print("time is up", flush=True)
    if seconds:
        print(f"{len(seconds)} layers: median {statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s")
        print(recorder.write())


if __name__ == "__main__":
    run_main(main)
