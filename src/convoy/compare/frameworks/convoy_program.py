"""Convoy itself: the model as `convoy.optimize` makes it, tuned on this machine or known from the database."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

import convoy
from convoy.compare.case import Case
from convoy.compare.frameworks.base import Built, Material, UnsupportedCaseError, Way
from convoy.compare.frameworks.torch_model import built, load_net, outputs_of
from convoy.pipeline import optimize_model
from convoy.report.summary import Summary


class Convoy:
    """Convoy with its default settings at the effort that was asked for."""

    def ways(self, case: Case, material: Material) -> Sequence[Way]:
        """One: Convoy chooses layouts, engines and streams by itself."""
        if case.training:
            raise UnsupportedCaseError("this Convoy has no training step")
        numerics = "half" if case.dtype != "fp32" else "as_torch"
        return [Way(f"effort {case.effort}, numerics {numerics}", partial(_infer, case, material, numerics))]


FRAMEWORK = Convoy()


def _infer(case: Case, material: Material, numerics: str) -> Built:
    net = load_net(case, material)
    settings = convoy.Settings(
        effort=convoy.Effort(case.effort), numerics=convoy.Numerics(numerics), static_outputs=case.device == "cuda"
    )
    start = time.perf_counter()
    result = optimize_model(net.model, (net.x,), name=case.model, settings=settings)
    seconds = time.perf_counter() - start
    program, summary = result.program, result.summary

    @torch.no_grad()
    def run() -> Any:
        return program(net.x)

    found = built(run, lambda: outputs_of(run()), case, notes=summary.notes)
    found.kinds = lambda: layer_kinds(summary)
    found.detail = {"layers": layers_of(summary), "peaks": dict(summary.peaks), "tuning_s": round(seconds, 2)}
    return found


def layer_kinds(summary: Summary) -> dict[str, float]:
    """Milliseconds by layer kind, as the layers were measured one by one."""
    words = {"conv": "conv", "linear": "linear", "layout": "copy", "subgraph": "fused", "pool": "pool"}
    sums: dict[str, float] = {}
    for layer in summary.layers:
        kind = words.get(layer.problem.partition(":")[0], "other")
        sums[kind] = sums.get(kind, 0.0) + layer.median_us / 1e3
    return sums


def layers_of(summary: Summary) -> list[dict[str, Any]]:
    """The steps with what the roofline needs."""
    names = ("name", "engine", "median_us", "floor_us", "flops", "bytes_min")
    return [{name: getattr(layer, name) for name in names} for layer in summary.layers]
