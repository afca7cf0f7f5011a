"""Runs of every kind with hostile names, for tests of pages."""

from __future__ import annotations

from typing import Any

from convoy.compare.runs.rows import Figure, Row
from convoy.compare.runs.runfile import Run

HOSTILE = "<script>alert(1)</script>"

MANIFEST: dict[str, Any] = {
    "date": "2026-01-02T03:04:05Z",
    "request": {"command": "compare", "model": "resnet50"},
    "target": {"name": f"CPU {HOSTILE}", "arch": "avx2", "units": 2, "digest": "0123456789abcdef"},
    "versions": {"convoy": "0.1.0", "torch": "2.13.0"},
    "system": {"os": "Linux", "cores": 2},
    "clocks": {"governor": "performance"},
    "protocol": "interleaved",
    "commit": "abc1234",
    "notes": [f"another run is on this CPU {HOSTILE}"],
}


def figures(latency: float, spread: float = 0.5) -> tuple[Figure, ...]:
    return (
        Figure("latency_ms", "ms", latency, latency - spread, latency + spread),
        Figure("images_per_s", "1/s", 1e3 / latency, 900 / latency, 1100 / latency),
        Figure.once("peak_memory_bytes", "B", 3e8),
        Figure.once("startup_s", "s", 1.5),
        Figure.once("compile_s", "s", 12.0),
        Figure.once("rel_l2_error", "1", 1e-6),
    )


def compare_run() -> Run:
    layers = [
        {
            "name": f"conv{i}",
            "engine": "aten",
            "median_us": 10.0 * i,
            "floor_us": 5.0,
            "flops": 10**7 * i,
            "bytes_min": 10**5,
        }
        for i in (1, 2, 3)
    ]
    detail = {
        "kinds": {"conv": 12.0, "linear": 3.0},
        "layers": layers,
        "peaks": {"bytes_per_s": 1e10, "flops_fp32": 1e11},
        "timed": "in turn",
        "timeline": [
            {"name": f"conv{i} {HOSTILE}", "engine": "aten", "stream": i % 2, "start_us": 9.0 * i, "duration_us": 8.0,
             "critical": i == 1}
            for i in (1, 2, 3)
        ],
    }  # fmt: skip
    rows = (
        Row("resnet50", "torch", figures=figures(30.0), setting="eager, channels_last", detail={"timed": "alone"}),
        Row("resnet50", "convoy", figures=figures(15.0), setting="effort quick", detail=detail, notes=("a note",)),
        Row("resnet50", "onnxruntime", figures=figures(20.0, 4.0), setting="all", noisy=True),
        Row("resnet50", "jax", "absent", "jax not installed: pip install 'jax>=0.9'"),
        Row("resnet50", f"own {HOSTILE}", "crashed", f"signal 11 (SIGSEGV) {HOSTILE} " + "x" * 300),
    )
    return Run("compare", MANIFEST, rows)


def options_run() -> Run:
    def one(provider: str, role: str, latency: float, **detail: Any) -> Row:
        about = {"role": role, "option": provider.partition(": ")[2] or provider, **detail}
        return Row("alexnet", provider, figures=figures(latency), setting="words", detail=about, batch=8)

    rows = (
        one("defaults", "defaults", 100.0),
        one("alone: compile", "alone", 50.0, gain=2.0, worth=2.0, kept=True),
        Row("alexnet", "alone: bf16", "wrong_result", "0.5 off", batch=8, detail={"role": "alone", "option": "bf16"}),
        one("step: a", "forward", 50.0, gain=2.0, worth=2.0, kept=True),
        one("without: compile", "without", 98.0, worth=1.96, kept=True),
        one("without: onednn", "default", 150.0, worth=3.0, kept=True),
        one("best", "best", 50.0, gain=2.0, advice="2.0x from options alone: compile", options=["compile"]),
    )
    return Run("options", {**MANIFEST, "notes": []}, rows)


def study_run() -> Run:
    rows = [
        Row(
            f"conv:{batch}", engine, mode="fprop", batch=batch, axes={"sweep": "batch", "batch": batch},
            figures=(Figure.once("kernel_us", "us", batch * slope + 10), Figure.once("workspace_bytes", "B", 0.0)),
        )
        for batch in (1, 2, 4)
        for engine, slope in (("gemm", 3.0), ("direct", 4.0))
    ]  # fmt: skip
    return Run("study", {**MANIFEST, "notes": []}, tuple(rows))


def scaling_run() -> Run:
    rows = tuple(
        Row(
            "resnet50",
            "ddp",
            mode="training",
            axes={"gpus": gpus, "nodes": 1, "scaling": "weak"},
            figures=(Figure.once("step_ms", "ms", 30.0 + gpus),),
        )
        for gpus in (1, 2)
    )
    return Run("scaling", {**MANIFEST, "notes": []}, rows)
