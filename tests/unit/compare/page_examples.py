"""Runs with every column filled, for tests of the looks of their pages."""

from __future__ import annotations

from dataclasses import replace

from convoy.compare.runs.rows import Figure, Row
from convoy.compare.runs.runfile import Run
from tests.unit.compare.examples import MANIFEST, compare_run, options_run, scaling_run, study_run

REASON = "triton.igemm, nhwc: needs a CUDA device of capability 8.0 or newer, got AMD EPYC (family 25 model 1); " * 5
ALGORITHMS = ("direct", "fft", "gemm", "implicit gemm", "library", "pruned", "tiled fft", "winograd", "compiler")
MILLISECONDS = ("step_ms", "compute_ms", "exposed_ms", "bound_ms", "launch_ms", "input_ms", "allreduce_ms", "collective_ms",
                "bare_ms", "group_ms", "host_ms")  # fmt: skip


def full_compare_run() -> Run:
    """Seven frameworks; one of them with every figure that a row can have, and predicted layers."""
    run = compare_run()
    more = (
        Figure.once("latency_p99_ms", "ms", 1119.123),
        Figure.once("call_ms", "ms", 1014.123),
        Figure.once("replay_ms", "ms", 1013.123),
        Figure.once("energy_j", "J", 12.345),
    )
    first = run.rows[1]
    layers = [{**layer, "predicted": index == 0} for index, layer in enumerate(first.detail["layers"])]
    first = replace(first, figures=(*first.figures, *more), detail={**first.detail, "layers": layers})
    others = tuple(
        replace(run.rows[0], provider=name, noisy=True, setting="torch.compile max-autotune, freezing, channels_last")
        for name in ("inductor", "openvino")
    )
    return replace(run, rows=(run.rows[0], first, *run.rows[2:], *others))


def full_options_run() -> Run:
    """Long names of options, and noise."""
    run = options_run()
    rows = tuple(
        replace(row, noisy=True, setting="torch.backends.cudnn.benchmark = True, channels_last") for row in run.rows
    )
    failed = Row("alexnet", "alone: autocast_bf16", "wrong_result", REASON, batch=8,
                 detail={"role": "alone", "option": "autocast_bf16+channels_last"})  # fmt: skip
    return replace(run, rows=(*rows, failed))


def full_study_run() -> Run:
    """Nine algorithms, some unsupported; nets with strategies; energy; criteria."""
    rows = [
        Row("sweep:filters", name, mode="fprop", axes={"filters": filters}, setting="cpu.winograd [band_kib=384,m=4] nhwc",
            figures=(Figure.once("time_us", "us", filters * (1 + at)), Figure.once("workspace_bytes", "B", 1e6 * at),
                     Figure.once("energy_uj", "uJ", 12345.6), Figure.once("rel_l2_error", "1", 1e-6)))
        for filters in (1, 2, 4, 64, 512, 2048)
        for at, name in enumerate(ALGORITHMS[:-1])
    ]  # fmt: skip
    rows += [
        Row("sweep:filters", "compiler", "unsupported", REASON, mode="fprop", axes={"filters": f}) for f in (1, 64)
    ]
    nets = [
        Row("squeezenet1_1", name, setting="single:pointwise", detail={"predicted": 168, "problems": 168},
            figures=(Figure.once("total_us", "us", total), Figure.once("peak_memory_bytes", "B", 6.9e6)))
        for name, total in (("exact", 2e4), ("one algorithm", 4e4), ("library", 8e4))
    ]  # fmt: skip
    rules = ["gemm_n <= 80:", "  gemm (0 %), then aten (55 %) [30 layers]", "else:", "  fft (2 %) [12 layers]"]
    manifest = {**study_run().manifest, "criteria": {"layers": 42, "rules": rules, "check": None, "note": "unknown"}}
    return Run("study", manifest, (*nets, *rows))


def full_scaling_run() -> Run:
    """Two providers on up to four GPUs, weak and strong, with every figure."""
    rows = tuple(
        Row("resnet50", provider, mode="training", batch=1024, noisy=gpus == 4,
            setting="channels_last, bucket_cap_mb=25, gradient_as_bucket_view", notes=("a note on the schedule",),
            axes={"gpus": gpus, "nodes": 1, "scaling": scaling},
            figures=(*(Figure(metric, "ms", 1234.56, 1200.0, 1300.0) for metric in MILLISECONDS),
                     Figure.once("images_per_s", "1/s", 12345.0 * gpus), Figure.once("efficiency", "1", 1 - gpus / 50),
                     Figure.once("gradient_bytes", "B", 1e8), Figure.once("link_gb_per_s", "GB/s", 450.0),
                     Figure.once("peak_memory_bytes", "B", 7e10)))
        for scaling in ("weak", "strong")
        for gpus in (1, 2, 4)
        for provider in ("torch.ddp", "convoy")
    )  # fmt: skip
    failed = Row("resnet50", "convoy", "out_of_memory", REASON, axes={"gpus": 8, "nodes": 1, "scaling": "weak"})
    return Run("scaling", scaling_run().manifest, (*rows, failed))


def changed_runs() -> tuple[Run, Run]:
    """An older and a newer run: a regression, an improvement, a broken row, one that is gone."""
    old = full_compare_run()
    slower = tuple(replace(f, p50=2 * f.p50, p20=2 * f.p20, p80=2 * f.p80) for f in old.rows[0].figures)
    broken = Row("resnet50", "convoy", "crashed", REASON)
    rows = (replace(old.rows[0], figures=slower), broken, *old.rows[3:])
    return old, Run("compare", {**MANIFEST, "versions": {"convoy": "0.2.0", "torch": "2.13.0"}}, rows)
