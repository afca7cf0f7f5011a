"""Reports of large nets for tests of their looks: long names, many steps, every column, predicted times."""

from __future__ import annotations

import dataclasses

from convoy.report.sparsity import LayerSparsity, Sparsity
from convoy.report.summary import CandidateRow, CurvePoint, LayerSummary, ScheduleSummary, Strategy, Summary
from convoy.schedule.timeline import Span
from tests.unit.report.example import summary

LONG: str = (
    "features.denseblock3.denselayer{0}.conv1+features.denseblock3.denselayer{0}.norm2+features.denseblock3.relu2"
)
KNOBS: str = "block_m=128,block_n=256,block_k=64,stages=4,warps=8,split_k=2"
REASON: str = "triton.igemm, nhwc: needs a CUDA device of capability 8.0 or newer, got this CPU; " * 6


def _candidates(index: int) -> tuple[CandidateRow, ...]:
    return (
        CandidateRow("triton.implicit_gemm", KNOBS, "nhwc", "ok", 10.0 + index, 0.5, 1 << 30, 1e-7, "", index % 3 == 0),
        CandidateRow("aten", "", "nchw", "ok", 2e4 + index, 0.5, 0, 1e-7, "", index % 3 == 0),
        CandidateRow("winograd4", "", "nchw", "unsupported", 0.0, 0.0, 0, 0.0, f"`winograd4`: {REASON}"),
    )


def layer(index: int) -> LayerSummary:
    """One of many steps: every third is predicted, every fifth has a short name."""
    rate = 1 + index % 7
    return LayerSummary(
        name=f"conv{index}" if index % 5 == 0 else LONG.format(index),
        problem="conv:fprop:n128c1024h14w14k2048r3s3:p1x1:s1x1:d1x1:g1:nhwc:fp32.fp32.fp32:as_torch:bias.relu.residual",
        engine="triton.implicit_gemm",
        knobs=KNOBS,
        layout="nhwc",
        median_us=1e5 / (1 + index),
        baseline_us=3e5 / (1 + index),
        workspace_bytes=0,
        floor_us=1e4 / (1 + index),
        flops=10**9 * rate,
        bytes_min=10**7 * (1 + index % 4),
        candidates=_candidates(index),
        zeros=0.5,
        curve=tuple(CurvePoint("zeroskip.cpu", z, 2e4 - 150 * z) for z in (0, 50, 90)) if index < 4 else (),
        algorithm="implicit gemm",
        predicted=index % 3 == 0,
        baseline_predicted=index % 3 == 0,
    )


def large_summary() -> Summary:
    """The report of a training step of 30 steps on four streams."""
    layers = tuple(layer(index) for index in range(30))
    spans = tuple(
        Span(step.name, step.engine, index % 4, 100.0 * index, 90.0, critical=index % 2 == 0)
        for index, step in enumerate(layers)
    )
    found = summary(spans)
    choice = dataclasses.replace(
        found.selection,
        predicted=True,
        strategies=tuple(Strategy(f"single:triton.engine_{n}", 1e6 * n, n > 2) for n in range(1, 8)),
    )
    return dataclasses.replace(
        found,
        model="timm:convnextv2_huge.fcmae_ft_in22k_in1k_512",
        target={"name": "NVIDIA H100 80GB HBM3", "arch": "sm_90", "units": 132, "digest": "0" * 16},
        inputs=("fp32[128,3,512,512]",) * 200,
        layers=layers,
        selection=choice,
        notes=(
            "174 of the net's 178 different layers and subgraphs were never measured, because effort none measures nothing. "
            * 2,
        ),
        schedule=ScheduleSummary(4, 4e5, 3e5),
        versions={"convoy": "0.1.0", "torch": "2.13.0+cu130", "protocol": "v5-wall-cold-500us", "cxx": "g++ 12.2.0"},
    )


def large_sparsity() -> Sparsity:
    """The zeros of 20 layers."""
    layers = tuple(
        LayerSparsity(step.name, (1024, 14, 14), 0.045 * index, 0.04 * index, 0.05 * index, 0.02 * index, 0.1, 0.1)
        for index, step in enumerate(map(layer, range(20)))
    )
    return Sparsity("timm:convnextv2_huge", 8, layers, ("no images were given",))
