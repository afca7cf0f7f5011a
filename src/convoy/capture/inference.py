"""capture_inference: from a module to a graph, pass by pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from convoy.capture.captured import Captured
from convoy.capture.copies import separate_copy
from convoy.capture.draft import verify_captured
from convoy.capture.export import export_inference
from convoy.capture.lower import lower
from convoy.capture.passes.fold_batch_norm import fold_batch_norm, replace_batch_norm
from convoy.capture.passes.fold_constants import copy_returned_constants, fold_constants
from convoy.capture.passes.fold_pad import fold_pad
from convoy.capture.passes.fold_scale import fold_scale
from convoy.capture.passes.instance_norm import instance_norm
from convoy.capture.passes.note_randomness import note_randomness
from convoy.capture.passes.one_dimensional import one_dimensional
from convoy.capture.passes.permuted_layers import permuted_layers
from convoy.capture.passes.recognise_layers import recognise_layers
from convoy.capture.passes.remove_identities import remove_identities
from convoy.capture.passes.three_dimensional import three_dimensional
from convoy.capture.passes.transposed_convolutions import transposed_convolutions
from convoy.capture.passes.unset_values import unset_values
from convoy.capture.recording.recorded_program import RecordedProgram
from convoy.capture.recording.recorded_run import recorded
from convoy.errors import CaptureError
from convoy.narrowing import is_tuple

PASSES = (
    remove_identities,
    unset_values,
    fold_constants,
    permuted_layers,
    instance_norm,
    one_dimensional,
    three_dimensional,
    transposed_convolutions,
    recognise_layers,
    fold_batch_norm,
    fold_scale,
    replace_batch_norm,
    fold_pad,
    copy_returned_constants,
    note_randomness,
)
"""In an order in which each finds what those before it uncover."""


def capture_inference(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Captured:
    """Capture what a model computes in evaluation mode, for arguments of these shapes.

    The model is left as it was, training flags included. Arguments that are no tensors (numbers, flags, None) become part
    of the graph, as do the shapes and dtypes of those that are.

    Args:
        model: any module that `torch.export` can export.
        args: example positional arguments.
        kwargs: example keyword arguments.

    Raises:
        CaptureError: the model cannot be exported (data-dependent control flow, say), with the exporter's own words; or it
            does what a graph cannot hold. `convoy.pipeline.by_parts.parts` then finds the modules that can be captured.
    """
    return capture_with_original(model, args, kwargs)[0]


def capture_with_original(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, *, run: bool = False
) -> tuple[Captured, Captured]:
    """`capture_inference`, and the same computation before any pass: its operators and constants are the model's own.

    Args:
        model: as for `capture_inference`.
        args: likewise.
        kwargs: likewise.
        run: whether a copy of the model may be run, which is faster than exporting it (`recorded_run`). The strides of outputs
            are then those of the run (`Captured.was_run`). If it cannot be recorded, a copy is exported.
    """
    if not is_tuple(args):
        raise CaptureError(f"args: got a {type(args).__name__}, expected a tuple of the model's arguments")
    named = dict(kwargs or {})
    program = recorded(model, args, named) if run else None
    if program is None:
        program = export_inference(separate_copy(model) if run else model, args, named)
    lowered = lower(program, args, named)
    draft = lowered.draft

    def captured() -> Captured:
        graph, constants = draft.finish()
        notes = tuple(dict.fromkeys(draft.notes))
        written, strides = lowered.overwritten, lowered.strides
        return Captured(
            graph, constants, lowered.arguments, lowered.results, notes, overwritten=written, strides=strides,
            was_run=isinstance(program, RecordedProgram), returned=lowered.returned,
        )  # fmt: skip

    original = captured()
    for rewrite in PASSES:
        rewrite(draft)
    found = captured()
    verify_captured(found.graph)
    return found, original
