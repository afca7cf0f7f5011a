"""How much does one kernel for several convolutions gain over the layers' own kernels? Question `chains`, metric kernel_us.

Takes the bottlenecks of stride 1 of ResNet-50. Of each, the first settings of `cuda.bottleneck` are compiled in parallel, checked
(integers exactly, normal data against float64) and timed. The three layers are timed with the fastest of their own kernels, run
one after the other. A figure is one block inside a captured CUDA graph over rotating buffers, so that x comes from memory as in a
net. The fastest setting and the layers are then timed in turn. The setting is replayed `--replays` times beside other work: every
result must have the same bits.

    python bench/chains/chains.py [--batches 1,8,32,128] [--dtype fp16] [--keep 12] [--seconds 300] [--replays 2000] [--jobs 16]
                                  [--dry] [--folder DIR]

`--dry` needs no GPU: it compiles every setting and prints its registers, shared memory and estimate.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import torch

from convoy.engines.base import Buffers, Executable
from convoy.engines.hopper.chains.bottleneck import ENGINE
from convoy.engines.hopper.chains.bottleneck_problem import layers_of, subgraph_of
from convoy.engines.hopper.chains.bottleneck_tile_config import BottleneckTile
from convoy.engines.manifest import load_engine
from convoy.errors import ConvoyError
from convoy.measurement.accuracy import make_data
from convoy.problem import ConvProblem, Problem
from convoy.target import Target

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.chains.blocks import RESNET50, Block
from bench.chains.chain_runs import Check, Launches, fused_buffers, layers_chain, same_bits
from bench.layers.layer_timing import Builders, Variant, device_facts, replay_us, sets_of
from bench.shared.command_line import counts, run_main
from bench.shared.record import Recorder

LAYER_ENGINES = ("cuda.swapped", "cuda.implicit_gemm", "triton.swapped", "triton.pointwise")
ROUNDS = 15
DRY = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)


def variants(problem: Problem, engines: Sequence[str], target: Target, keep: int) -> list[Variant]:
    """The first settings of each engine that takes the problem."""
    return [
        Variant(problem, engine, knobs)  # type: ignore[arg-type]
        for engine in engines
        if load_engine(engine).accepts(problem, target)
        for knobs in list(load_engine(engine).space(problem, target))[:keep]
    ]


def dry(blocks: Sequence[Block], keep: int) -> None:
    """Compile every setting here, and say what it takes."""
    for block in blocks:
        print(f"{block.name}: floor {block.floor_us:.1f} us, by layers {block.layers_floor_us:.1f} us")
        problem = subgraph_of(block.sizes)
        support = ENGINE.supports(problem, DRY)
        if not support:
            print(f"  refused: {support.reason}")
            continue
        for knobs in list(ENGINE.space(problem, DRY))[:keep]:
            shared = BottleneckTile.of(knobs).shared_bytes(block.sizes)
            try:
                log = ENGINE.build(problem, knobs, DRY).log  # type: ignore[attr-defined]
                said = ", ".join(re.findall(r"Used \d+ registers|\d+ bytes spill stores", log))
            except ConvoyError as error:
                said = str(error).splitlines()[0]
            print(f"  {ENGINE.estimate_us(problem, knobs, DRY):7.1f} us  {shared:6d} B  {said}  {knobs}")


def timed(launches: Launches, rounds: int = 4) -> float:
    """The median of some replays, microseconds a block."""
    replay_us(launches.graph, 1)
    return statistics.median(replay_us(launches.graph, rounds))


class Bench:
    """Checks and times blocks on the device.

    Args:
        target: the device.
        cache_bytes: of its L2 cache.
        options: of the command line.
    """

    def __init__(self, target: Target, cache_bytes: int, options: argparse.Namespace) -> None:
        self.target, self.cache_bytes, self.options = target, cache_bytes, options
        versions = " ".join(f"{name}={version}" for name, version in target.versions)
        protocol = f"graph over rotating buffers, median of {ROUNDS} replays in turn"
        self.recorder = Recorder(
            "chains", device=target.name, versions=versions, protocol=protocol, folder=options.folder
        )

    def block(self, block: Block, building: dict[Variant, Future[str]]) -> None:
        """One block: the fused kernel's settings, the layers, both in turn."""
        sets = min(8, max(2, -(-2 * self.cache_bytes // block.sizes.bytes_min)))
        fused = self.fused(block, building, sets)
        layers = self.layers(block, building, sets)
        samples: dict[str, list[float]] = {name: [] for name in ("cuda.bottleneck", "layers")}
        for _ in range(ROUNDS):
            if fused:
                samples["cuda.bottleneck"] += replay_us(fused[0].graph, 1)
            if layers:
                samples["layers"] += replay_us(layers[0].graph, 1)
        for name, note in (("cuda.bottleneck", fused[1] if fused else ""), ("layers", layers[1] if layers else "")):
            if samples[name]:
                self.row(block, f"convoy.{name}" if name != "layers" else "convoy", samples[name], note)
        medians = {name: statistics.median(found) for name, found in samples.items() if found}
        print(f"{block.name}: floor {block.floor_us:.1f}  " + "  ".join(f"{n} {us:.1f}" for n, us in medians.items()))
        if fused and self.options.replays:
            print(f"  replays: {same_bits(fused[0], self.options.replays)}", flush=True)
        self.recorder.write()

    def fused(self, block: Block, building: dict[Variant, Future[str]], sets: int) -> tuple[Launches, str] | None:
        """The fastest right setting."""
        best: tuple[float, Launches, str] | None = None
        check = Check(block)
        for variant in (v for v in building if v.problem == subgraph_of(block.sizes)):  # type: ignore[comparison-overlap]
            guess = ENGINE.estimate_us(subgraph_of(block.sizes), variant.knobs, self.target)
            said, executable = building[variant].result(), None
            if not said:
                executable = ENGINE.build(subgraph_of(block.sizes), variant.knobs, self.target)
                said = check.wrong(executable)
            if said:
                print(f"  {variant.knobs}: {said}", flush=True)
                continue
            assert executable is not None
            launches = Launches([(executable, fused_buffers(block, executable, sets))])
            us = timed(launches)
            print(f"  {us:7.2f} us, estimate {guess:.1f}  {variant.knobs}", flush=True)
            note = f"floor {block.floor_us:.2f} us estimate {guess:.2f} us {variant.knobs}"
            self.row(block, "convoy.cuda.bottleneck", [us], f"quick {note}")
            if best is None or us < best[0]:
                best = (us, launches, note)
        return None if best is None else best[1:]

    def layers(self, block: Block, building: dict[Variant, Future[str]], sets: int) -> tuple[Launches, str] | None:
        """The three layers, each with the fastest of its kernels alone."""
        chosen: list[Executable] = []
        words: list[str] = []
        for layer in layers_of(subgraph_of(block.sizes).text):
            found = [self.layer(layer, v, building[v].result()) for v in building if v.problem == layer]
            found = [one for one in found if one is not None]
            if not found:
                return None
            us, executable, word = min(found, key=lambda one: one[0])
            chosen.append(executable)
            words.append(f"{word} {us:.2f}")
        return Launches(layers_chain(block, chosen, sets)), f"floor {block.layers_floor_us:.2f} us " + "; ".join(words)

    def layer(self, layer: ConvProblem, variant: Variant, refused: str) -> tuple[float, Executable, str] | None:
        """A layer's time with one setting of one kernel; None where that does not build."""
        if refused:
            return None
        executable = load_engine(variant.engine).build(layer, variant.knobs, self.target)
        own = [make_data(layer, seed, "normal", "cuda") for seed in range(min(8, sets_of(layer, self.cache_bytes)))]
        constants = executable.pack(own[0].constants)
        y = torch.empty(layer.y_spec.shape, dtype=own[0].args[0].dtype, device="cuda")
        y = y.contiguous(memory_format=torch.channels_last)
        buffers = [Buffers(data.args, [torch.empty_like(y)], constants) for data in own]
        return timed(Launches([(executable, buffers)])), executable, variant.engine

    def row(self, block: Block, provider: str, samples: Sequence[float], note: str) -> None:
        """A figure."""
        ordered = sorted(samples)
        self.recorder.add(
            subject=block.name, batch=block.sizes.n, dtype=block.sizes.dtype, numerics="half", provider=provider,
            metric="kernel_us", unit="us", p50=statistics.median(ordered), p20=ordered[len(ordered) // 5],
            p80=ordered[len(ordered) * 4 // 5], ok=True, note=note,
        )  # fmt: skip


def main() -> None:
    """Measure, print, write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=counts, default="1,8,32,128")
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--keep", type=int, default=12)
    parser.add_argument("--layer-keep", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--replays", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    blocks = [make(n, options.dtype) for n in options.batches for make in RESNET50]
    if options.dry:
        dry(blocks, options.keep)
        return
    target, _, _, cache_bytes = device_facts()
    builders, bench = Builders(options.jobs), Bench(target, cache_bytes, options)
    wanted: dict[Variant, None] = {}
    for block in blocks:
        problem = subgraph_of(block.sizes)
        wanted.update(dict.fromkeys(variants(problem, (ENGINE.id,), target, options.keep)))
        for layer in layers_of(problem.text):
            wanted.update(dict.fromkeys(variants(layer, LAYER_ENGINES, target, options.layer_keep)))
    building = builders.submit(list(wanted), target)
    try:
        for block in blocks:
            if time.monotonic() > end:
                print(f"out of time before {block.name}")
                break
            bench.block(block, building)
            torch.cuda.empty_cache()
    finally:
        builders.close()
    print(bench.recorder.path)


if __name__ == "__main__":
    run_main(main)
