"""How much faster is a net, all providers in one process? Question `inference`, metrics replay_ms, images_per_s, compile_s, ...

Convoy beside eager PyTorch (NCHW and channels_last, cudnn.benchmark), the same captured as a CUDA graph, and Inductor's code with
freezing, captured too; same weights, same input, outputs checked against float64, all timed in turn in one process.
`own_processes.py` times each in a process of its own, and calls and latencies as well. Memory is what a provider
holds beyond the model as it was, and its largest run; compile_s is what it took to get ready, for Convoy the tuning.
`max-autotune` may compile for five minutes; a peer that fails or takes longer is a row without a latency that says so. JAX has a
process of its own, after the others, with weights and input of its own, checked there, and no graph of the whole: its calls
follow each other.

    python bench/inference/inference.py [--nets resnet50,googlenet] [--batch 1,32] [--dtype fp16,fp32]
                              [--peers eager,graph,inductor,coordinate-descent,max-autotune,jax] [--ablation] [--missing]
                              [--db FILE] [--tune-seconds N] [--seconds N] [--folder DIR]

A plan on several streams is timed on one too (`convoy.serial`). With `--ablation` a plan in which parallel convolutions are one
launch is beside the best one that has none of those (`convoy.admission`), and `convoy.serial` is that one on one stream.
Where tuning a net reaches `--tune-seconds`, the rest is predicted from what was measured, and the row says so; a later call
with the same `--db` goes on. With `--seconds` no case is begun that could not end in time; `--missing` takes those cases
alone that the results lack.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

import convoy
from convoy import plan as plans
from convoy.compare.child_session import ChildFailedError
from convoy.compare.runs.manifest import gpu_clocks, host
from convoy.engines.triton.merged import ENGINE as MERGED
from convoy.measurement import detect_target
from convoy.pipeline import optimize_model
from convoy.pipeline.check.end_to_end import Latency, errors_against, interleave
from convoy.pipeline.check.float64 import exact_outputs
from convoy.pipeline.measure_net import CUT
from convoy.plan import Plan
from convoy.schedule import parallel_steps
from convoy.zoo import input_size, load_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.inference import gpu_memory
from bench.inference.inference_peers import WORDS, Ready, Run, peers, reserved
from bench.inference.jax_peer import NAME as JAX
from bench.inference.jax_peer import JaxFigures, jax_figures
from bench.inference.own_processes import machine_of
from bench.shared.command_line import counts, run_main
from bench.shared.quiet import require_quiet
from bench.shared.record import Recorder
from bench.shared.time_limit import COMPILE_S
from bench.shared.timed_code import whole_net_code

NETS = "alexnet,vgg19,googlenet,resnet50,inception_v3,mobilenet_v2,densenet121,efficientnet_b0"
WORSE = 3.0
LEAST_ERROR = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 5e-2}
"""An output is right within this relative L2 error, or `WORSE` times that of the stock model: nets with random weights magnify
rounding (ResNet-50 with TF32 products is 1.5e-2 off as PyTorch runs it)."""

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


LEAST_S = 60.0
"""A case is not begun with less: capturing, checking and timing want it, and a compiling peer."""


@dataclass(frozen=True, slots=True)
class Case:
    """One net, batch and dtype."""

    net: str
    batch: int
    dtype: str


def in_jax(case: Case, run: Run, recorder: Recorder) -> JaxFigures | None:
    """JAX's figures, recorded, where it is wanted and works."""
    if WORDS[JAX] not in run.peers:
        return None
    if run.left_s < LEAST_S:
        print(f"{JAX}: no time is left", flush=True)  # and no row: that is none of its faults
        return None
    try:
        found = jax_figures(case.net, case.batch, case.dtype, COMPILE_S)
    except ChildFailedError as error:
        why = f"{error.status}: {next(iter(error.reason.splitlines()), '')[:200]}"
        print(f"{JAX}: {why}", flush=True)
        record_failure(recorder, case, JAX, why)
        return None
    record_jax(recorder, case, found)
    return found


def tuned(model: nn.Module, x: torch.Tensor, case: Case, run: Run, deny: tuple[str, ...] = ()) -> Ready | None:
    """Convoy's program, without some engines; where time is up, from what was measured until then."""
    begun = time.monotonic()
    before = reserved()
    time_s = max(1.0, min(run.time_s, run.left_s - LEAST_S / 2))
    settings = convoy.Settings(effort=convoy.Effort(run.effort), time_s=time_s, db=run.db, deny_engines=deny)
    result = optimize_model(model, (x,), name=case.net, settings=settings)
    took = time.monotonic() - begun
    for line in result.plan.notes:
        if line.startswith("streams:") or CUT in line:
            print(f"    {line}", flush=True)
    note = " cut" if any(CUT in line for line in result.plan.notes) else ""
    program = result.program.programs[0]
    if program.runnable is None:
        print("convoy: keeps the baseline")
        return None
    program((x,), {})
    held = reserved() - before
    replay = program.runnable.replay  # type: ignore[attr-defined]
    return Ready(replay, lambda: result.program(x), took, held, f" tuning_s={took:.0f}{note}", result.plan)


def serial(model: nn.Module, x: torch.Tensor, plan: Plan, run: Run) -> Ready:
    """The same plan on one stream."""
    begun, before = time.monotonic(), reserved()
    plan = dataclasses.replace(plan, steps=parallel_steps(plan.steps, 1))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plans.save(plan, path)
        net = convoy.load(model, path, (x,), settings=convoy.Settings(db=run.db))
    runnable = net.programs[0].runnable
    net(x)
    held = reserved() - before
    return Ready(runnable.replay, lambda: net(x), time.monotonic() - begun, held)  # type: ignore[union-attr]


def stages(model: nn.Module, x: torch.Tensor, case: Case, run: Run, plan: Plan | None) -> dict[str, Ready]:
    """Convoy with less: no merged convolutions, one stream."""
    found: dict[str, Ready] = {}
    if plan is None:
        return found
    if run.ablation and any(step.pattern == "merge" for step in plan.steps):
        apart = tuned(model, x, case, run, deny=(MERGED.id,))
        if apart is not None and apart.plan is not None:
            found["convoy.admission"], plan = apart, apart.plan
    if found or any(step.stream for step in plan.steps):
        found["convoy.serial"] = serial(model, x, plan, run)
    return found


def compare(case: Case, run: Run, recorder: Recorder) -> str:
    """Check and time one net; records every figure and returns a line for people."""
    model = load_model(case.net).eval().cuda()
    size = input_size(case.net)
    side = size if isinstance(size, int) else size[-1]
    x = torch.randn(case.batch, 3, side, side, generator=torch.Generator().manual_seed(case.batch)).cuda()
    exact = exact_outputs(model, (x,), {}, 0)
    model, x = model.to(DTYPES[case.dtype]), x.to(DTYPES[case.dtype])
    gpu_memory.free()
    ours = tuned(model, x, case, run)
    ready, failed = peers(model, x, run)
    for name, why in failed.items():
        record_failure(recorder, case, name, why)
    if ours is not None:
        ready |= {"convoy": ours, **stages(model, x, case, run, ours.plan)}
    timed = interleave({name: one.call for name, one in ready.items()}, cuda=True)
    stock = errors_against(model(x), exact).rel_l2_error
    line = f"{case.net:16} b{case.batch:<3} {case.dtype} " + (
        "" if ours is None else f" tuned {ours.compile_s:5.0f} s "
    )
    for name, figures in timed.items():
        error = errors_against(ready[name].output(), exact).rel_l2_error
        right = error < max(LEAST_ERROR[case.dtype], WORSE * stock)
        record(recorder, case, name, ready[name], figures, error=error, right=right)
        line += f"  {name} {figures.median_ms:.3f} ({error:.0e}{'' if right else ', WRONG'})"
    others = [figures.median_ms for name, figures in timed.items() if not name.startswith("convoy")]
    del ready
    gpu_memory.free()
    if (jax := in_jax(case, run, recorder)) is not None:
        line += f"  {JAX} {jax.timed.median_ms:.3f} ({jax.error:.0e})"
        others.append(jax.timed.median_ms)
    gain = min(others) / timed["convoy"].median_ms if "convoy" in timed and others else math.nan
    return line + f"  gain {gain:.2f}"


def record(
    recorder: Recorder, case: Case, name: str, one: Ready, figures: Latency, *, error: float, right: bool
) -> None:
    """A provider's rows."""
    add = partial(
        recorder.add, subject=case.net, batch=case.batch, dtype=case.dtype, provider=name, ok=right, processes="one"
    )
    add_times(add, case, figures, f"rel_l2_to_float64={error:.1e}{one.note}")
    if one.held > 0:  # or a second compiler gave back what the first one held, and nobody knows what it holds itself
        add(metric="peak_memory_bytes", unit="B", p50=float(one.held + gpu_memory.largest_run(one.call)))
    add(metric="compile_s", unit="s", p50=one.compile_s)


def record_jax(recorder: Recorder, case: Case, jax: JaxFigures) -> None:
    """JAX's rows. Its memory has the weights in it, which the others' are held beside."""
    add = partial(recorder.add, subject=case.net, batch=case.batch, dtype=case.dtype, provider=JAX, processes="one")
    add_times(add, case, jax.timed, f"rel_l2_to_float64={jax.error:.1e} in a process of its own, after the others")
    if jax.memory is not None:
        add(metric="peak_memory_bytes", unit="B", p50=float(jax.memory), note="weights included")
    add(metric="compile_s", unit="s", p50=jax.compile_s)


def record_failure(recorder: Recorder, case: Case, name: str, why: str) -> None:
    """A row of a provider that has no figure, with the reason."""
    recorder.add(
        subject=case.net, batch=case.batch, dtype=case.dtype, provider=name, ok=False,
        metric="replay_ms", unit="ms", p50=math.nan, note=why, processes="one",
    )  # fmt: skip


def add_times(add: Callable[..., None], case: Case, figures: Latency, note: str) -> None:
    """Latency and throughput."""
    middle, spread = figures.median_ms, figures.spread_ms
    least, most = middle - spread, middle + spread
    add(metric="replay_ms", unit="ms", p50=middle, p20=least, p80=most, note=note)
    rates = [1e3 * case.batch / ms for ms in (middle, most, least)]
    add(metric="images_per_s", unit="1/s", p50=rates[0], p20=rates[1], p80=rates[2])


def there(recorder: Recorder, run: Run) -> set[Case]:
    """Cases of which the results have all that is wanted."""
    found: dict[Case, set[str]] = {}
    for row in recorder.earlier():
        if row["metric"] == "replay_ms" and row["processes"] == "one":
            found.setdefault(Case(row["subject"], int(row["batch"]), row["dtype"]), set()).add(row["provider"])
    wanted = {"convoy", *(name for name, word in WORDS.items() if word in run.peers)}
    return {case for case, names in found.items() if wanted <= names}


def main() -> None:
    """Run the comparison, print a short table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default=NETS)
    parser.add_argument("--batch", type=counts, default="1,32")
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--peers", default="graph,inductor")
    parser.add_argument("--effort", default="quick")
    parser.add_argument("--db", type=Path)
    parser.add_argument("--tune-seconds", type=float, default=math.inf)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--ablation", action="store_true")
    parser.add_argument("--missing", action="store_true")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.backends.cudnn.benchmark = True  # before any call: PyTorch keeps the first plan of a convolution
    end = time.monotonic() + options.seconds
    run = Run(tuple(options.peers.split(",")), options.effort, options.db, options.tune_seconds, end, options.ablation)
    target = detect_target("cuda")
    require_quiet(target)
    recorder = Recorder(
        "inference",
        device=target.name,
        versions=" ".join(f"{name}={version}" for name, version in target.versions),
        protocol="interleaved rounds=15, graph replays, median, p20 and p80 as median -+ spread",
        folder=options.folder,
        machine=machine_of({"clocks": gpu_clocks(), "system": {"host": host()}}),
        code=whole_net_code("cuda"),
    )
    done = there(recorder, run) if options.missing else set[Case]()
    every = itertools.product(options.nets.split(","), options.dtype.split(","), options.batch)
    lines: list[str] = []
    left_out: list[str] = []
    with torch.no_grad():
        for case in [Case(net, batch, dtype) for net, dtype, batch in every]:
            if case in done:
                continue
            if run.left_s < LEAST_S:
                left_out.append(f"{case.net} b{case.batch} {case.dtype}")
                continue
            lines.append(compare(case, run, recorder))
            print(lines[-1], flush=True)
            recorder.write()
            torch.cuda.empty_cache()
    print("\nmilliseconds, medians (relative L2 error to float64)")
    print("\n".join(lines))
    if left_out:
        print("no time was left for " + ", ".join(left_out))
    print(recorder.path)


if __name__ == "__main__":
    run_main(main)
