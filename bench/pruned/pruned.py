"""Pruned convolutions: code made for the mask beside dense and other sparse ways, over sparsities. Question `pruned`.

Usage: python bench/pruned/pruned.py [--device cpu|cuda] [--operators 1 2 ...] [--batches 1 64] [--sparsities 0.9 ...]
                              [--pattern unstructured|channel|2:4|block:RxC] [--resnet] [--least-channels N]
                              [--dtype fp32|fp16] [--effort quick|full] [--seconds S] [--db FILE] [--folder DIR]
                              [--sparse pruned.sparse24 ...]

The ten operators of "Code generated for pruned weights" (Dong, Liu, Li, Feng; Journal of Software 31(9), 2020), and with
--resnet the 3x3 and 1x1 layers of ResNet-50 (those of at least N channels and filters); zeros in random places, random filters
of zeros, two of every four channels, or blocks as `convoy prune` cuts them. Every candidate is checked against float64 (on
integers bit for bit) before it is timed, as the tuner does it. A row an engine's best setting goes to
bench/results/pruned-DEVICE.csv: the subject is the problem with its mask, the note names operator, pattern and sparsity. Dense
engines are timed once for each operator and batch, on the problem without a mask: in strict fp32, on a GPU with TF32 too; with
--dtype fp16 in nhwc alone, where tensor cores want it. With --db what was measured before is not measured again; with --seconds
nothing is begun after so long, and what was measured by then is written. With --sparse only these take pruned weights.

From two sparsities on, each layer's break-even is written too (`break_even`): the least share of zeros from which ours is as fast
as the provider that the row names, by straight lines between measured points; nan where it never is. `convoy.dense` is the
fastest dense engine of all in strict fp32 (or in fp16), ours included.

On a GPU the engines that wait for one take part. The rows of `cudnn` are those of its best plan; `gemm` is cuBLAS on im2col,
`sparse_csr` cuSPARSE on im2col, `pruned.csr` and `pruned.direct` our own index arrays.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from convoy.engines.manifest import engine_ids, entry
from convoy.measurement import detect_target, protocol_for
from convoy.perfdb import Database
from convoy.perfdb.row import Measurement
from convoy.pipeline.measure_net import make_runner
from convoy.problem import ConvProblem
from convoy.prune import break_even
from convoy.settings import Settings
from convoy.target import Target
from convoy.tune import search

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.pruned.pruned_layers import masked, operators, resnet_layers
from bench.shared.command_line import run_main
from bench.shared.record import Recorder
from bench.shared.time_limit import TimeIsUpError, until

SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
DENSE = ("aten", "onednn", "gemm", "winograd2", "winograd4", "triton.split_fp32", "cudnn")
"""Dense engines that compete; `cudnn` on a GPU only."""

DENSE_HALF = (
    "aten", "cudnn", "cuda.implicit_gemm", "triton.swapped", "triton.persistent", "triton.pointwise", "triton.implicit_gemm"
)  # fmt: skip
"""Those in fp16."""

PROVIDERS = {
    "cpu": {"aten": "torch.eager", "sparse_csr": "mkl.sparse"},
    "cuda": {"aten": "torch.graph", "gemm": "cublas", "sparse_csr": "cusparse", "cudnn": "cudnn.best"},
}
"""By device, peers' engine ids → names of the providers in results."""

OURS = (
    "pruned.c", "pruned.channels", "pruned.channels_gpu", "pruned.cuda", "pruned.direct", "pruned.sparse24", "pruned.blocks"
)  # fmt: skip
RIVALS = ("cudnn", "onednn", "sparse_csr")
"""Whom the targets are set against."""

SPARSE = (*OURS, "pruned.csr", "sparse_csr")
ROOT = Path(__file__).parents[2]


Rows = Mapping[str, list[Measurement]]
"""By problem key, what was measured."""

Ratios = dict[tuple[int, float, str], list[float]]
"""By batch, sparsity and rival: how many times as fast ours is, by layer."""

Evens = dict[tuple[int, str], list[float]]
"""By batch and rival: break-even sparsities, by layer."""

Curve = Sequence[tuple[float, float]]
"""(share of zeros, us), by rising share."""


def measure(problems: Sequence[ConvProblem], engines: Sequence[str], target: Target, settings: Settings) -> Rows:
    """Every engine's rows for all problems, in one search: on a GPU kernels are compiled while others are timed.

    Where time is up, what is in the database.
    """
    known = [engine for engine in engines if engine in engine_ids(settings.engines)]
    with Database.open(settings.db, shipped=False) as database, closing(make_runner(target, settings)) as runner:
        try:
            of = {"target": target, "settings": settings, "database": database, "runner": runner}
            return search(problems, engine_ids=known, **of).rows
        except TimeIsUpError:
            print("time is up", flush=True)
            protocol = protocol_for(settings.effort, target.device)
            return {p.key: database.lookup(p.key, target.digest, protocol.id) for p in problems}


def best_rows(problems: Sequence[ConvProblem], found: Rows) -> dict[str, Measurement]:
    """The fastest row of each engine over some problems that compute the same; refusals and failures are printed."""
    best: dict[str, Measurement] = {}
    for row in (row for problem in problems for row in found[problem.key]):
        if not row.ok:
            print(f"  {row.config}: {row.status} {row.reason.splitlines()[0] if row.reason else ''}", flush=True)
        elif row.config.engine not in best or row.median_us < best[row.config.engine].median_us:
            best[row.config.engine] = row
    return best


def record(recorder: Recorder, device: str, problem: ConvProblem, note: str, rows: Mapping[str, Measurement]) -> None:
    """Write each engine's best; `device` is cpu or cuda."""
    peers = PROVIDERS[device]
    for engine, row in rows.items():
        recorder.add(
            subject=problem.key, provider=peers.get(engine, f"convoy.{engine}"), metric="kernel_us",
            unit="us", p50=row.median_us, p20=max(0.0, row.median_us - row.spread_us), p80=row.median_us + row.spread_us,
            batch=problem.n, dtype=problem.x_dtype, numerics=problem.numerics,
            note=f"{note} {row.config.knobs}".strip(),
        )  # fmt: skip


def dense_problems(problem: ConvProblem, target: Target) -> dict[str, list[ConvProblem]]:
    """By numerics: the problem in both memory formats."""
    if problem.numerics == "half":
        return {"half": [problem.with_layout("nhwc")]}
    numerics = ("strict", "as_torch") if target.device == "cuda" else ("strict",)
    return {n: [replace(problem, numerics=n).with_layout(f) for f in ("nchw", "nhwc")] for n in numerics}


def fastest(rows: Mapping[str, Measurement], engines: Sequence[str] = ()) -> Measurement | None:
    """The fastest row, of some engines or of any."""
    return min((r for e, r in rows.items() if not engines or e in engines), key=lambda r: r.median_us, default=None)


def break_evens(
    recorder: Recorder, device: str, problem: ConvProblem, note: str, dense: Mapping[str, Measurement], ours: Curve
) -> dict[str, float]:
    """Write from which share of zeros ours is as fast as each dense provider and as the fastest; by provider, nan: never."""
    rivals = {PROVIDERS[device].get(engine, f"convoy.{engine}"): row.median_us for engine, row in dense.items()}
    if rivals and len(ours) > 1:
        rivals["convoy.dense"] = min(rivals.values())
    found: dict[str, float] = {}
    for provider, us in rivals.items() if len(ours) > 1 else ():
        share = break_even(ours, us)
        found[provider] = math.nan if share is None else share
        recorder.add(
            subject=problem.key, provider=provider, metric="break_even", unit="1", p50=found[provider], batch=problem.n,
            dtype=problem.x_dtype, numerics=problem.numerics, note=note,
        )  # fmt: skip
    return found


class Batch:
    """All layers at one batch size: what is measured, and what is written of it."""

    def __init__(self, options: argparse.Namespace, batch: int, target: Target, settings: Settings) -> None:
        self.options, self.batch, self.target, self.settings = options, batch, target, settings
        self.layers = [*operators(options.operators, batch, options.dtype)]
        self.layers += resnet_layers(batch, options.dtype, options.least_channels) if options.resnet else ()
        self.dense = {name: dense_problems(problem, target) for name, problem in self.layers}
        both = options.dtype == "fp16" or (target.device == "cuda" and options.pattern == "channel")
        self.forms = ("nchw", "nhwc") if both else ("nchw",)
        self.found: dict[str, list[Measurement]] = {}

    def masked(self, problem: ConvProblem, sparsity: float) -> list[ConvProblem]:
        """The problem with its mask, in every memory format that is tried."""
        pruned = masked(problem, sparsity, self.options.pattern)
        return [pruned.with_layout(form) for form in self.forms]

    def measure(self) -> None:
        """Dense problems, then those with masks."""
        problems = [p for s in self.options.sparsities for _, problem in self.layers for p in self.masked(problem, s)]
        plain = [p for by_numerics in self.dense.values() for same in by_numerics.values() for p in same]
        dense = DENSE if self.options.dtype == "fp32" else DENSE_HALF
        self.found |= measure(plain, dense, self.target, self.settings)
        self.found |= measure(problems, self.options.sparse, self.target, self.settings)

    def record(self, recorder: Recorder, ratios: Ratios, evens: Evens) -> None:
        """Rows of every layer; what ours gains over others goes to the sums."""
        device, options = self.target.device, self.options
        for name, problem in self.layers:
            dense = {numerics: best_rows(same, self.found) for numerics, same in self.dense[name].items()}
            for numerics, rows in dense.items():
                record(recorder, device, replace(problem, numerics=numerics), f"{name} dense", rows)
            strict, curve = dense[problem.numerics], []
            for sparsity in sorted(options.sparsities):
                same = self.masked(problem, sparsity)
                rows = best_rows(same, self.found)
                record(recorder, device, same[0], f"{name} {options.pattern} {sparsity}", rows)
                ours = fastest(rows, OURS)
                library = {PROVIDERS[device].get(e, e): row for e, row in {**strict, **rows}.items() if e in RIVALS}
                rivals = {"fastest dense": fastest(strict), **library}
                for rival, row in rivals.items():
                    if ours and row:
                        ratios.setdefault((self.batch, sparsity, rival), []).append(row.median_us / ours.median_us)
                curve += [(sparsity, ours.median_us)] if ours else []
                shown = "  ".join(f"{r} {row.config.engine} {row.median_us:.1f}" for r, row in rivals.items() if row)
                mine = f"{ours.median_us:.1f} us [{ours.config.engine} {ours.config.knobs}]" if ours else "none"
                print(f"{name:28s} n{self.batch:<3d} {sparsity:<5} ours {mine}  {shown}", flush=True)
            note = f"{name} {options.pattern}"
            for rival, share in break_evens(recorder, device, problem, note, strict, curve).items():
                evens.setdefault((self.batch, rival), []).append(share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--operators", nargs="*", type=int, default=list(range(1, 11)))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--sparsities", nargs="+", type=float, default=list(SPARSITIES))
    parser.add_argument("--pattern", default="unstructured")
    parser.add_argument("--resnet", action="store_true")
    parser.add_argument("--least-channels", type=int, default=0)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "fp16"))
    parser.add_argument("--effort", default="quick", choices=("quick", "full"))
    parser.add_argument("--sparse", nargs="+", default=list(SPARSE), choices=SPARSE)
    parser.add_argument("--seconds", type=int, default=0)
    parser.add_argument("--db", type=Path)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    target = detect_target(options.device)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    extra = (
        "sparse_csr=bench.pruned.sparse_csr:SparseCsr",
        *((entry("pruned.csr"),) if options.device == "cuda" else ()),
    )
    database = options.db or Path(tempfile.mkdtemp(prefix="convoy-pruned-")) / "rows.db"
    settings = Settings(effort=options.effort, engines=extra, timeout_s=300.0, db=database)
    recorder = Recorder(
        "pruned", device=target.name, versions=" ".join(f"{name}={value}" for name, value in target.versions),
        protocol=f"{protocol_for(options.effort, target.device).id} {target.units} units", folder=options.folder,
    )  # fmt: skip
    ratios: Ratios = {}
    evens: Evens = {}
    with until(options.seconds):
        for batch in options.batches:
            found = Batch(options, batch, target, settings)
            found.measure()
            found.record(recorder, ratios, evens)
            recorder.write()
    for (batch, sparsity, rival), gains in sorted(ratios.items()):
        mean, worst = statistics.geometric_mean(gains), min(gains)
        print(
            f"batch {batch} sparsity {sparsity} over {rival}: {len(gains)} layers, mean {mean:.2f}, worst {worst:.2f}"
        )
    for (batch, rival), shares in sorted(evens.items()):
        ordered = sorted(1.0 if math.isnan(share) else share for share in shares)
        print(f"batch {batch} break-even over {rival}: {len(ordered)} layers, median {statistics.median(ordered):.2f}")


if __name__ == "__main__":
    run_main(main)
