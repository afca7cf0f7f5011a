"""From copies of a model and its arguments to a captured net that may take the model's place."""

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


def captured_net(name: str, isolated: IsolatedCopy, settings: Settings, target: Target) -> Net:
    """`capture_net` of a copy of an isolated model, which is left fit to be run; outputs' strides are those of a run of it.

    Raises:
        CaptureError: likewise; and where the model changes a number or word of its own in every call, as a counter in Python.
    """
    twin = separate_copy(isolated.model)
    before = attributes_of(twin)
    net = capture_net(name, twin, isolated.args, isolated.kwargs, settings, target)
    if attributes_of(twin) != before:  # a cache that the first call fills is no reason
        changed = _changed_in_every_call(isolated.another(), target.device)
        if changed:
            raise CaptureError(f"the model changes its attribute {changed} in every call, which a graph does not do")
    strides = _stock_strides(net.captured, isolated.another(), target.device)
    return replace(net, captured=replace(net.captured, strides=strides))


def _stock_strides(captured: Captured, isolated: IsolatedCopy, device: str) -> tuple[tuple[int, ...] | None, ...]:
    """How the model's own outputs lie in memory; as they were traced where it cannot be run.

    PyTorch's fake tensors are wrong about tensors with one channel, whose strides fit nchw and nhwc: after an activation a CPU
    takes them for nchw, and a traced graph for nhwc. So may the next convolution, whatever number of channels it makes.
    """
    try:
        with torch.no_grad(), fixed_seed(), convolutions("as_torch", torch.device(device)):
            made = list(tensors_of(isolated.model(*isolated.args, **isolated.kwargs)))
    except Exception:  # no room, or the user's code outside an exporter: the check of the whole net has words for it
        return captured.strides
    shapes = [captured.graph.values[name].spec.shape for name in captured.graph.outputs]
    if [tuple(tensor.shape) for tensor in made] != [tuple(shape) for shape in shapes]:
        return captured.strides
    return tuple(tensor.stride() if is_plain(tensor) and not has_internal_overlap(tensor) else None for tensor in made)


def _changed_in_every_call(isolated: IsolatedCopy, device: str) -> str:
    """Name of an attribute that a second call changes; empty where there is none."""
    found: list[dict[str, object]] = []
    with torch.no_grad(), convolutions("as_torch", torch.device(device)):
        for _ in range(2):
            isolated.model(*isolated.args, **isolated.kwargs)
            found.append(attributes_of(isolated.model))
    first, second = found
    return next((name for name in first | second if first.get(name) != second.get(name)), "")
