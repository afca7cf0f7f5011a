"""A summary with hostile strings in it, for the report's tests."""

from __future__ import annotations

from convoy.report.summary import (
    CandidateRow,
    LayerSummary,
    Memory,
    ScheduleSummary,
    SelectionSummary,
    Strategy,
    Summary,
    Timing,
    Tuning,
)
from convoy.schedule.timeline import Span

HOSTILE = "<script>document.title = 'broken'</script><img src=x onerror=alert(1)>"

TIMELINE = (
    Span(f"conv0{HOSTILE}", "onednn", 0, 0.0, 30.0, critical=True),
    Span("conv1", "aten", 2, 30.0, 10.0, critical=False),
    Span("conv2", "onednn", 0, 32.0, 28.0, critical=True),
)
"""Three steps on streams 0 and 2 that end after 60 microseconds; the second is on no longest way."""


def summary(timeline: tuple[Span, ...] = ()) -> Summary:
    rows = (
        CandidateRow("onednn", "", "nhwc", "ok", 10.0, 0.5, 0, 1e-7, ""),
        CandidateRow("aten", "", "nchw", "ok", 20.0, 0.5, 0, 1e-7, ""),
        CandidateRow("winograd4", "", "nchw", "wrong_result", 0.0, 0.0, 64, 0.0, HOSTILE),
    )
    layers = tuple(
        LayerSummary(
            f"conv{i}{HOSTILE if i == 0 else ''}",
            "conv:key",
            "onednn",
            "",
            "nhwc",
            t,
            2 * t,
            0,
            t / 3,
            10**7,
            10**5,
            rows,
        )
        for i, t in enumerate((30.0, 10.0, 20.0))
    )
    return Summary(
        model=HOSTILE,
        target={"name": "CPU", "arch": "avx2", "units": 2, "digest": "0" * 16},
        batch=1,
        dtype="fp32",
        numerics="as_torch",
        inputs=("fp32[1,3,8,8]",),
        baseline=Timing("torch.eager", 2.0, 0.1),
        optimized=Timing("convoy", 1.0, 0.1),
        speedup=2.0,
        rel_l2_error=1e-7,
        max_abs_error=1e-6,
        baseline_rel_l2_error=1e-7,
        tuning=Tuning(1.0, 3, 0),
        memory=Memory(0, 1024, 2048),
        selection=SelectionSummary("exact", 60.0, 60.0, 61.0, (Strategy("exact", 60.0), Strategy("baseline", 120.0))),
        layers=layers,
        peaks={"bytes_per_s": 2e10, "flops_fp32": 1e11},
        notes=(HOSTILE,),
        versions={"convoy": "0"},
        date="2026-01-01T00:00:00Z",
        schedule=ScheduleSummary(3, 68.0, 58.0) if timeline else ScheduleSummary(1, 0.0, 0.0),
        timeline=timeline,
    )
