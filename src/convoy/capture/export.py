"""From a module to an ATen program: `torch.export`, in evaluation mode, with composite operators kept whole."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from convoy.capture.functional import functional
from convoy.errors import CaptureError

_LONGEST_MESSAGE = 2000
"""Characters of the exporter's words that are kept: its hints come first, its pages of context last."""


def export_inference(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    """Export a module as it computes in evaluation mode, functional, for these very shapes.

    In-place operators become functional, and everything else stays the operator that the model called (conv2d, linear, batch
    norm, pooling, attention), so that what is not optimised runs as PyTorch runs it.

    Raises:
        CaptureError: the model cannot be exported, with the exporter's own words.
    """
    try:
        with evaluation_mode(model), quiet():
            try:
                with torch.no_grad():
                    return _export(model, args, kwargs)
            except IndexError:
                # torch 2.13 miscounts the arguments where a model ends in another grad mode than it is exported in.
                with torch.enable_grad():
                    return _export(model, args, kwargs)
    except Exception as error:  # the exporter runs the user's forward: anything may come out of it
        words = str(error).strip()[:_LONGEST_MESSAGE]
        raise CaptureError(f"the model cannot be exported: {type(error).__name__}: {words}") from error


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    return functional(torch.export.export(model, args, kwargs, strict=False))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode for a while; every submodule's training flag is put back."""
    before = [(module, module.training) for module in model.modules()]
    try:
        with suppress(
            NotImplementedError
        ):  # a loaded ExportedProgram's module: its mode was fixed when it was exported
            model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporter's log and warnings off the screen: what it has to say when it fails is in its exception."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
