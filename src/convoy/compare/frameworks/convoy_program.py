"""Convoy itself: the model as `convoy.optimize` makes it, tuned on this machine or known from the database."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import convoy
from convoy.compare.case import Case
from convoy.compare.frameworks.base import BuiltModel, CaseInputs, FrameworkConfig, UnsupportedCaseError
from convoy.compare.frameworks.torch_model import FrameworkStep, built, check_step, load_net, outputs_of
from convoy.pipeline import optimize_model
from convoy.pipeline.check.end_to_end import float_outputs
from convoy.report.summary import Summary
from convoy.training.step_program import StepOptions
from convoy.training.tune_step import tune_training_step
from convoy.zoo import parse_dtype


class Convoy:
    """Convoy with its default settings at the effort that was asked for."""

    def ways(self, case: Case, material: CaseInputs) -> Sequence[FrameworkConfig]:
        """One: Convoy chooses layouts, engines and streams by itself."""
        if case.training and case.dtype == "fp16" and case.device == "cpu":
            raise UnsupportedCaseError("training in fp16 on a CPU: PyTorch has no such autocast; use bf16")
        build = _train if case.training else _infer
        words = ("convoy.training_step, " if case.training else "") + f"effort {case.effort}"
        return [FrameworkConfig(words, partial(build, case, material))]


FRAMEWORK = Convoy()


def settings_of(case: Case) -> convoy.Settings:
    """Convoy's settings: the case's effort and time, and PyTorch's own rounding, for which rows are shipped."""
    settings = convoy.Settings(
        effort=convoy.Effort(case.effort),
        time_s=case.time_s or math.inf,
        static_outputs=case.device == "cuda",
    )
    return dataclasses.replace(settings, db=Path(case.db)) if case.db else settings


def _infer(case: Case, material: CaseInputs) -> BuiltModel:
    net = load_net(case, material)
    start = time.perf_counter()
    result = optimize_model(net.model, (net.x,), name=case.model, settings=settings_of(case))
    seconds = time.perf_counter() - start
    program, summary = result.program, result.summary

    @torch.no_grad()
    def run() -> Any:
        return program(net.x)

    replay = getattr(program.programs[0].runnable, "replay", None)  # on a GPU, unless stock PyTorch is the fastest
    return _with_layers(built(run, lambda: outputs_of(run()), case, replay=replay), summary, seconds)


def _train(case: Case, material: CaseInputs) -> BuiltModel:
    net = load_net(case, material)
    stock = FrameworkStep(net, case)  # its optimizer and scaler: the same as PyTorch's own step has
    options = StepOptions(amp=parse_dtype(case.dtype) if case.dtype != "fp32" else None, scaler=stock.scaler)
    start = time.perf_counter()
    result = tune_training_step(
        net.model,
        first_output_loss,
        stock.optimizer,
        (net.x, net.labels),
        options=options,
        settings=settings_of(case),
        name=case.model,
    )
    seconds = time.perf_counter() - start

    def run() -> torch.Tensor:
        return result.step(net.x, net.labels)

    def replay() -> None:
        graph = result.step.graph  # captured by one of the first calls, or never
        if graph is None:
            run()
        else:
            graph.replay()

    check = partial(check_step, lambda: run().clone(), stock.gradients)
    found = built(run, check, case, replay=replay if case.device == "cuda" else None)
    return _with_layers(found, result.summary, seconds) if result.summary is not None else found


def first_output_loss(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the model's first output, in fp32."""
    return functional.cross_entropy(float_outputs(outputs)[0].float(), labels)


def _with_layers(found: BuiltModel, summary: Summary, seconds: float) -> BuiltModel:
    """With what Convoy knows of its layers."""
    found.notes += summary.notes
    found.kinds = lambda: layer_kinds(summary)
    found.detail = {"layers": layers_of(summary), "peaks": dict(summary.peaks), "tuning_s": round(seconds, 2)}
    found.detail["timeline"] = [dataclasses.asdict(span) for span in summary.timeline]
    return found


def layer_kinds(summary: Summary) -> dict[str, float]:
    """Milliseconds by layer kind: sums of the layers' single times, measured or predicted."""
    words = {"conv": "conv", "linear": "linear", "layout": "copy", "subgraph": "fused", "pool": "pool"}
    sums: dict[str, float] = {}
    for layer in summary.layers:
        kind = words.get(layer.problem.partition(":")[0], "other")
        sums[kind] = sums.get(kind, 0.0) + layer.median_us / 1e3
    return sums


def layers_of(summary: Summary) -> list[dict[str, Any]]:
    """The steps with the roofline's inputs."""
    names = ("name", "engine", "median_us", "floor_us", "flops", "bytes_min", "predicted")
    return [{name: getattr(layer, name) for name in names} for layer in summary.layers]
