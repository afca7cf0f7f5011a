"""Captures a copy of a model, and checks that the graph can replace the model."""

from __future__ import annotations

from dataclasses import replace

import torch

from convoy.capture import Captured
from convoy.capture.copies import separate_copy
from convoy.engines.torch_flags import convolutions
from convoy.errors import CaptureError
from convoy.pipeline.check.rounding import fixed_seed
from convoy.pipeline.isolation import IsolatedCopy, attributes_of
from convoy.pipeline.net import Net, capture_net
from convoy.program.calls import has_internal_overlap, is_plain, tensors_of
from convoy.settings import Settings
from convoy.target import Target
from convoy.tuning_profile import phase


def captured_net(name: str, isolated: IsolatedCopy, settings: Settings, target: Target) -> Net:
    """`capture_net` of a copy of an isolated model, with the output strides of a run of the model.

    Raises:
        CaptureError: as `capture_net`, or the model changes a Python attribute in every call, such as a counter.
    """
    with phase("capture"):
        net = capture_net(
            name, separate_copy(isolated.model), isolated.args, isolated.kwargs, settings, target, run=True
        )
    if net.captured.was_run:  # a run that changed an attribute would not have been recorded
        return net
    trial = isolated.another()
    before = attributes_of(trial.model)
    with phase("capture", "output strides"):
        strides = _stock_strides(net.captured, trial, target.device)
    # The exporter puts attributes back, so a run is looked at. A cache that the first call fills is allowed.
    if attributes_of(trial.model) != before:
        changed = _changed_in_every_call(isolated.another(), target.device)
        if changed:
            raise CaptureError(f"the model changes its attribute {changed} in every call, which a graph does not do")
    return replace(net, captured=replace(net.captured, strides=strides))


def _stock_strides(captured: Captured, isolated: IsolatedCopy, device: str) -> tuple[tuple[int, ...] | None, ...]:
    """Strides of the model's own outputs; those of the traced graph if the model cannot be run.

    Fake tensors may have other strides: the strides of a tensor with one channel fit nchw and nhwc, and after an activation a CPU
    takes it for nchw, a traced graph for nhwc. The next convolution then has another output layout.
    """
    try:
        with torch.no_grad(), fixed_seed(), convolutions("as_torch", torch.device(device)):
            made = list(tensors_of(isolated.model(*isolated.args, **isolated.kwargs)))
    except Exception:  # out of memory, or an error of the user's code: the end-to-end check reports it
        return captured.strides
    shapes = [captured.graph.values[name].spec.shape for name in captured.graph.outputs]
    if [tuple(tensor.shape) for tensor in made] != [tuple(shape) for shape in shapes]:
        return captured.strides
    return tuple(tensor.stride() if is_plain(tensor) and not has_internal_overlap(tensor) else None for tensor in made)


def _changed_in_every_call(isolated: IsolatedCopy, device: str) -> str:
    """Name of an attribute that a second call changes; empty if there is none."""
    found: list[dict[str, object]] = []
    with torch.no_grad(), convolutions("as_torch", torch.device(device)):
        for _ in range(2):
            isolated.model(*isolated.args, **isolated.kwargs)
            found.append(attributes_of(isolated.model))
    first, second = found
    return next((name for name in first | second if first.get(name) != second.get(name)), "")
