"""Convoy itself: the model as `convoy.optimize` makes it, tuned on this machine or known from the database."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn import functional

import convoy
from convoy.compare.case import Case
from convoy.compare.frameworks.base import Built, Material, UnsupportedCaseError, Way
from convoy.compare.frameworks.torch_model import Step, built, check_step, load_net, outputs_of
from convoy.pipeline import optimize_model
from convoy.pipeline.stages import Observer, silent
from convoy.pipeline.training import train_model
from convoy.pipeline.verdict import float_outputs
from convoy.program.step_program import StepOptions
from convoy.report.summary import Summary
from convoy.zoo import parse_dtype

Result = TypeVar("Result")


class Convoy:
    """Convoy with its default settings at the effort that was asked for."""

    def ways(self, case: Case, material: Material) -> Sequence[Way]:
        """One: Convoy chooses layouts, engines and streams by itself."""
        if case.training and case.dtype == "fp16" and case.device == "cpu":
            raise UnsupportedCaseError("training in fp16 on a CPU: PyTorch has no such autocast; use bf16")
        numerics = "half" if case.dtype != "fp32" else "as_torch"
        build = _train if case.training else _infer
        words = ("convoy.training_step, " if case.training else "") + f"effort {case.effort}, numerics {numerics}"
        return [Way(words, partial(build, case, material, numerics))]


FRAMEWORK = Convoy()


class OutOfTimeError(Exception):
    """Raised into tuning when its time is up; what was measured is in the database."""


def tuned(case: Case, numerics: str, tune: Callable[[convoy.Settings, Observer], Result]) -> tuple[Result, float, str]:
    """Tune for as long as the case allows; the result, the seconds it took, and what to add to the setting's words.

    Args:
        case: its effort and time.
        numerics: rounding that is allowed.
        tune: tunes with some settings; what it measures stays in the database when the observer raises.
    """
    settings = convoy.Settings(
        effort=convoy.Effort(case.effort), numerics=convoy.Numerics(numerics), static_outputs=case.device == "cuda"
    )
    settings = dataclasses.replace(settings, db=Path(case.db)) if case.db else settings
    start = time.perf_counter()
    measuring: list[float] = []

    def watch(message: str, done: int, total: int) -> None:
        if not measuring:
            measuring.append(time.perf_counter())
        late = time.perf_counter() - measuring[0] > case.tune_s
        if case.tune_s and late and done < total:  # what follows measuring counts nothing
            raise OutOfTimeError(f"{message}: {done} of {total}")

    try:
        return tune(settings, watch), time.perf_counter() - start, ""
    except OutOfTimeError as error:
        words = f"measuring ended after {case.tune_s:g} s ({error}), the rest is predicted"
        result = tune(dataclasses.replace(settings, effort=convoy.Effort.NONE), silent)
        return result, time.perf_counter() - start, words


def _infer(case: Case, material: Material, numerics: str) -> Built:
    net = load_net(case, material)

    def tune(settings: convoy.Settings, observer: Observer) -> Any:
        return optimize_model(net.model, (net.x,), name=case.model, settings=settings, observer=observer)

    result, seconds, words = tuned(case, numerics, tune)
    program, summary = result.program, result.summary

    @torch.no_grad()
    def run() -> Any:
        return program(net.x)

    return _with_layers(built(run, lambda: outputs_of(run()), case), summary, seconds, words)


def _train(case: Case, material: Material, numerics: str) -> Built:
    net = load_net(case, material)
    stock = Step(net, case)  # its optimizer and scaler: the same as PyTorch's own step has
    options = StepOptions(amp=parse_dtype(case.dtype) if case.dtype != "fp32" else None, scaler=stock.scaler)

    def tune(settings: convoy.Settings, observer: Observer) -> Any:
        batch = (net.x, net.labels)
        return train_model(
            net.model,
            first_output_loss,
            stock.optimizer,
            batch,
            options=options,
            settings=settings,
            name=case.model,
            observer=observer,
        )

    result, seconds, words = tuned(case, numerics, tune)

    def run() -> torch.Tensor:
        return result.step(net.x, net.labels)

    found = built(run, lambda: check_step(lambda: run().clone(), stock.gradients), case)
    return _with_layers(found, result.summary, seconds, words) if result.summary is not None else found


def first_output_loss(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the model's first output, in fp32."""
    return functional.cross_entropy(float_outputs(outputs)[0].float(), labels)


def _with_layers(found: Built, summary: Summary, seconds: float, words: str) -> Built:
    """With what Convoy knows of its layers."""
    found.setting = words
    found.notes += summary.notes
    found.kinds = lambda: layer_kinds(summary)
    found.detail = {"layers": layers_of(summary), "peaks": dict(summary.peaks), "tuning_s": round(seconds, 2)}
    found.detail["timeline"] = [dataclasses.asdict(span) for span in summary.timeline]
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
