"""The capture of a training step as a CUDA graph: whether it can be captured, and how."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from convoy.training.allreduce.gradient_allreduce import has_hooks
from convoy.training.capturable_optimizers import why_not_capturable
from convoy.training.overlapped_updates import ReadAfterUpdateError
from convoy.training.step_graph import StepFunction, StepGraph
from convoy.training.step_work import StepWork


def why_no_graph(work: StepWork) -> str:
    """Why a step cannot be captured as a CUDA graph; empty if it can."""
    if has_hooks(work.parameters()):
        return "a parameter has hooks, which Python must call"
    return why_not_capturable(work.optimizer, scaled=work.update.scaler is not None)


def capture_step(work: StepWork, batch: tuple[Any, ...], leaves: Sequence[torch.Tensor]) -> StepGraph:
    """Capture a step.

    Args:
        work: the step.
        batch: an example.
        leaves: its tensors.

    Raises:
        RuntimeError, LaunchError: a launch of the step cannot be captured.
    """
    runnable = work.program.runnable
    if runnable is None:
        return _captured(work, work.autograd_step(batch), leaves)
    updates = work.overlapped_updates()
    streams, keeps = runnable.streams, runnable.workspace()
    if updates is not None:
        own = () if updates.stream is None else (updates.stream,)
        try:
            return _captured(work, partial(work.run, updates=updates), leaves, (*streams, *own), keeps)
        except ReadAfterUpdateError:
            pass
    return _captured(work, work.run, leaves, streams, keeps)


def _captured(
    work: StepWork,
    function: StepFunction,
    leaves: Sequence[torch.Tensor],
    streams: Sequence[torch.cuda.Stream] = (),
    keeps: object = None,
) -> StepGraph:
    return StepGraph(
        function,
        leaves,
        work.parameters(),
        work.optimizer,
        scaler=work.update.scaler,
        micro=work.options.accumulate,
        streams=(*streams, *work.update.streams),
        keeps=keeps,
    )
