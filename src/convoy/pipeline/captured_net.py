"""Captures a copy of a model, and checks that the graph can replace the model."""

from __future__ import annotations

from dataclasses import replace

import torch

from convoy.capture import Captured
from convoy.capture.state.attribute_snapshot import AttributeSnapshot
from convoy.capture.state.call_leftovers import CallLeftovers
from convoy.engines.torch_flags import convolutions
from convoy.pipeline.check.call_state import check_attributes, check_repeats
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
        CaptureError: as `capture_net`, `check_attributes` and `check_repeats`.
    """
    with phase("capture"):
        net = capture_net(name, isolated.model, isolated.args, isolated.kwargs, settings, target, run=True)
    trial = isolated.another()
    if net.captured.was_run:  # a run that changed an attribute would not have been recorded
        with phase("capture", "repeat the call"):
            check_repeats(trial, isolated, target.device)
        return net
    before = AttributeSnapshot(trial.model)
    with phase("capture", "output strides"):
        made = _stock_run(trial, target.device)
        strides = _strides(net.captured, made)
    # The exporter puts attributes back, so a run is looked at.
    told, leftovers = "", CallLeftovers()
    with phase("capture", "repeat the call"):
        if before.has_changed():
            told, leftovers = check_attributes(isolated, target.device)
        elif made is not None:
            check_repeats(trial, isolated, target.device, made)
    if told:
        warn_user(told)
    notes = (*net.captured.notes, *filter(None, [told]))
    return replace(net, captured=replace(net.captured, strides=strides, notes=notes, leftovers=leftovers))


def _stock_run(isolated: IsolatedCopy, device: str) -> list[torch.Tensor] | None:
    """The model's own outputs; None if it cannot be run."""
    args, kwargs = isolated.arguments()
    try:
        with torch.no_grad(), fixed_seed(), convolutions("as_torch", torch.device(device)):
            return list(tensors_of(isolated.model(*args, **kwargs)))
    except Exception:  # out of memory, or an error of the user's code: the end-to-end check reports it
        return None


def _strides(captured: Captured, made: list[torch.Tensor] | None) -> tuple[tuple[int, ...] | None, ...]:
    """Strides of the model's own outputs; those of the traced graph if the model cannot be run.

    Fake tensors may have other strides: the strides of a tensor with one channel fit nchw and nhwc, and after an activation a CPU
    takes it for nchw, a traced graph for nhwc. The next convolution then has another output layout.
    """
    if made is None:
        return captured.strides
    shapes = [captured.graph.values[name].spec.shape for name in captured.graph.outputs]
    if [tuple(tensor.shape) for tensor in made] != [tuple(shape) for shape in shapes]:
        return captured.strides
    return tuple(tensor.stride() if is_plain(tensor) and not has_internal_overlap(tensor) else None for tensor in made)
