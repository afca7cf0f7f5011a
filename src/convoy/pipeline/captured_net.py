"""Captures a copy of a model, and checks that the graph can replace the model."""

from __future__ import annotations

from dataclasses import replace

import torch

from convoy.capture import Captured
from convoy.capture.state.attribute_snapshot import AttributeSnapshot
from convoy.capture.state.call_leftovers import CallLeftovers
from convoy.engines.torch_flags import convolutions
from convoy.pipeline.check.call_state import check_attributes
from convoy.pipeline.check.rounding import fixed_seed
from convoy.pipeline.isolation import IsolatedCopy
from convoy.pipeline.net import Net, capture_net
from convoy.program.calls import has_internal_overlap, is_plain, tensors_of
from convoy.settings import Settings
from convoy.target import Target
from convoy.tuning_profile import phase
from convoy.user_warning import warn_user


def captured_net(name: str, isolated: IsolatedCopy, settings: Settings, target: Target) -> Net:
    """`capture_net` of a copy of an isolated model, with the output strides of a run of the model.

    Raises:
        CaptureError: as `capture_net` and `check_attributes`.
    """
    with phase("capture"):
        net = capture_net(name, isolated.model, isolated.args, isolated.kwargs, settings, target, run=True)
    if net.captured.was_run:  # a run that changed an attribute would not have been recorded
        return net
    trial = isolated.another()
    before = AttributeSnapshot(trial.model)
    with phase("capture", "output strides"):
        strides = _stock_strides(net.captured, trial, target.device)
    # The exporter puts attributes back, so a run is looked at.
    told, leftovers = check_attributes(isolated, target.device) if before.has_changed() else ("", CallLeftovers())
    if told:
        warn_user(told)
    notes = (*net.captured.notes, *filter(None, [told]))
    return replace(net, captured=replace(net.captured, strides=strides, notes=notes, leftovers=leftovers))


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
