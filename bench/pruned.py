"""Pruned convolutions: code made for the mask beside dense and other sparse ways, over sparsities. Question `pruned`.

Usage: python bench/pruned.py [--device cpu|cuda] [--operators 1 2 ...] [--batches 1 64] [--sparsities 0.9 ...]
                              [--pattern unstructured|channel|2:4|block:RxC] [--resnet] [--least-channels N]
                              [--dtype fp32|fp16] [--effort quick|full] [--db FILE] [--folder DIR]

The ten operators of "Code generated for pruned weights" (Dong, Liu, Li, Feng; Journal of Software 31(9), 2020), and with
--resnet the 3x3 and 1x1 layers of ResNet-50 (those of at least N channels and filters); zeros in random places, random filters
of zeros, two of every four channels, or blocks as `convoy prune` cuts them. Every candidate is checked against float64 (on
integers bit for bit) before it is timed, as the tuner does it. A row an engine's best setting goes to
bench/results/pruned-DEVICE.csv: the subject is the problem with its mask, the note names operator, pattern and sparsity. Dense
engines are timed once for each operator and batch, on the problem without a mask: in strict fp32, on a GPU with TF32 too; with
--dtype fp16 in nhwc alone, where tensor cores want it. With --db what was measured before is not measured again.

On a GPU the engines that wait for one take part. The rows of `cudnn` are those of its best plan; `gemm` is cuBLAS on im2col,
`sparse_csr` cuSPARSE on im2col, `pruned.csr` our own index arrays.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from record import Recorder

from convoy.engines.manifest import engine_ids, waiting
from convoy.measurement import detect_target, protocol_for, search
from convoy.perfdb import Database
from convoy.perfdb.row import Measurement
from convoy.pipeline.stages import make_runner
from convoy.problem import ConvProblem, WeightMask
from convoy.prune.patterns import group_ids, parse_pattern
from convoy.settings import Settings
from convoy.target import Target

OPERATORS = (
    # output side, c, k, filter side, padding, from
    (24, 1, 20, 5, 0, "LeNet-5"),
    (8, 20, 50, 5, 0, "LeNet-5"),
    (32, 3, 32, 5, 2, "CIFAR-10 quick"),
    (16, 32, 32, 5, 2, "CIFAR-10 quick"),
    (8, 32, 64, 5, 2, "CIFAR-10 quick"),
    (56, 64, 64, 3, 1, "ResNet"),
    (28, 128, 128, 3, 1, "ResNet"),
    (224, 3, 64, 3, 1, "VGG-16"),
    (224, 64, 64, 3, 1, "VGG-16"),
    (112, 64, 128, 3, 1, "VGG-16"),
)
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

OURS = ("pruned.c", "pruned.channels", "pruned.channels_gpu", "pruned.cuda", "pruned.sparse24", "pruned.blocks")
SPARSE = (*OURS, "pruned.csr", "sparse_csr")
HERE = Path(__file__).parent


def words(dtype: str) -> dict[str, str]:
    """A problem's dtypes and numerics."""
    numerics = "strict" if dtype == "fp32" else "half"
    return {"x_dtype": dtype, "weight_dtype": dtype, "y_dtype": dtype, "numerics": numerics}


def operators(chosen: Sequence[int], batch: int, dtype: str) -> Iterator[tuple[str, ConvProblem]]:
    """Name and problem of the operators asked for."""
    for number in chosen:
        side, c, k, r, pad, _ = OPERATORS[number - 1]
        size = side + r - 1 - 2 * pad
        yield f"op{number}", ConvProblem(batch, c, size, size, k, r, r, pad, pad, **words(dtype))


def resnet_layers(batch: int, dtype: str, least: int) -> Iterator[tuple[str, ConvProblem]]:
    """The distinct 3x3 and 1x1 layers of ResNet-50 that have at least so many channels and filters."""
    with (HERE / "layers" / "resnet50.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            names = ("c", "h", "w", "k", "r", "s", "pad_h", "pad_w", "stride_h", "stride_w")
            sizes = {name: int(row[name]) for name in names}
            if sizes["r"] <= 3 and min(sizes["c"], sizes["k"]) >= least:
                yield (
                    f"resnet50 {row['r']}x{row['s']} {row['c']}x{row['h']} {row['k']}",
                    ConvProblem(n=batch, **words(dtype), **sizes),
                )


def masked(problem: ConvProblem, sparsity: float, pattern: str) -> ConvProblem:
    """The problem with exactly that share of zeros in random places, filters or blocks; the same in every run."""
    shape = problem.weight_spec.shape
    generator = np.random.default_rng([*shape, int(sparsity * 1000)])
    kind = parse_pattern(pattern)
    if kind.kind == "nm":
        order = (
            generator.random((shape[0], shape[1] // kind.second, kind.second, *shape[2:]))
            .argsort(axis=2)
            .argsort(axis=2)
        )
        nonzero = order < kind.first
    else:
        ids = group_ids(kind, torch.empty(shape), problem.groups) if kind.kind == "block" else None
        places = {"channel": shape[0], "unstructured": int(np.prod(shape))}.get(kind.kind, 0)
        ids = np.repeat(np.arange(places), np.prod(shape) // places) if ids is None else ids.numpy()
        zeros = generator.permutation(ids.max() + 1)[: round(sparsity * (ids.max() + 1))]
        nonzero = ~np.isin(ids, zeros)
    return problem.with_mask(WeightMask(shape, np.packbits(nonzero).tobytes()))


Rows = Mapping[str, list[Measurement]]
"""By problem key, what was measured."""


def measure(problems: Sequence[ConvProblem], engines: Sequence[str], target: Target, settings: Settings) -> Rows:
    """Every engine's rows for all problems, in one search: on a GPU kernels are compiled while others are timed."""
    known = [engine for engine in engines if engine in engine_ids(settings.engines)]
    with Database.open(settings.db, shipped=False) as database, closing(make_runner(target, settings)) as runner:
        return search(
            problems, engine_ids=known, target=target, settings=settings, database=database, runner=runner
        ).rows


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
    parser.add_argument("--db", type=Path)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    target = detect_target(options.device)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH", ""))))
    extra = ("sparse_csr=sparse_csr:SparseCsr", *(waiting() if options.device == "cuda" else ()))
    database = options.db or Path(tempfile.mkdtemp(prefix="convoy-pruned-")) / "rows.db"
    settings = Settings(effort=options.effort, engines=extra, timeout_s=300.0, db=database)
    recorder = Recorder(
        "pruned", device=target.name, versions=" ".join(f"{name}={value}" for name, value in target.versions),
        protocol=f"{protocol_for(options.effort, target.device).id} {target.units} units", folder=options.folder,
    )  # fmt: skip
    ratios: dict[tuple[int, float, str], list[float]] = {}
    for batch in options.batches:
        layers = [*operators(options.operators, batch, options.dtype)]
        layers += resnet_layers(batch, options.dtype, options.least_channels) if options.resnet else ()
        dense_of = {name: dense_problems(problem, target) for name, problem in layers}
        masks = {(name, s): masked(problem, s, options.pattern) for name, problem in layers for s in options.sparsities}
        plain = [p for by_numerics in dense_of.values() for same in by_numerics.values() for p in same]
        found = dict(measure(plain, DENSE if options.dtype == "fp32" else DENSE_HALF, target, settings))
        both = options.dtype == "fp16" or (target.device == "cuda" and options.pattern == "channel")
        forms = ("nchw", "nhwc") if both else ("nchw",)
        found |= measure([p.with_layout(form) for p in masks.values() for form in forms], SPARSE, target, settings)
        for name, problem in layers:
            dense = {numerics: best_rows(same, found) for numerics, same in dense_of[name].items()}
            for numerics, rows in dense.items():
                record(recorder, target.device, replace(problem, numerics=numerics), f"{name} dense", rows)
            for sparsity in options.sparsities:
                pruned = masks[name, sparsity]
                rows = best_rows([pruned.with_layout(form) for form in forms], found)
                record(recorder, target.device, pruned, f"{name} {options.pattern} {sparsity}", rows)
                ours, csr = fastest(rows, OURS), rows.get("sparse_csr")
                rivals = {"dense": fastest(dense[problem.numerics]), "csr": csr}
                for rival, row in rivals.items():
                    if ours and row:
                        ratios.setdefault((batch, sparsity, rival), []).append(row.median_us / ours.median_us)
                shown = "  ".join(f"{r} {row.config.engine} {row.median_us:.1f}" for r, row in rivals.items() if row)
                mine = f"{ours.median_us:.1f} us [{ours.config.knobs}]" if ours else "none"
                print(f"{name:28s} n{batch:<3d} {sparsity:<5} ours {mine}  {shown}", flush=True)
            recorder.write()
    for (batch, sparsity, rival), found in sorted(ratios.items()):
        mean, worst = statistics.geometric_mean(found), min(found)
        print(f"batch {batch} sparsity {sparsity} over {rival}: geometric mean {mean:.2f}, worst {worst:.2f}")


if __name__ == "__main__":
    main()
