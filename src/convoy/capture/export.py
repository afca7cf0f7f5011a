"""From a module to an ATen program: `torch.export`, in evaluation mode, with composite operators kept whole."""

from __future__ import annotations

import io
import logging
import sys
import threading
import warnings
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr, suppress
from typing import Any, Final

import torch
from torch import nn
from torch.export import ExportedProgram

from convoy.capture.copies import are_separate, copied_arguments
from convoy.capture.functionalize import functional
from convoy.capture.tracer_words import tracer_words
from convoy.errors import CaptureError

_EXPORTING: Final = threading.RLock()
"""One thread at a time: neither the exporter nor Python's filters of warnings and logs take two."""


def export_inference(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    """Export a module as it computes in evaluation mode, functional, for these very shapes.

    In-place operators become functional, and everything else stays the operator that the model called (conv2d, linear, batch
    norm, pooling, attention), so that what is not optimised runs as PyTorch runs it.

    Raises:
        CaptureError: the model cannot be exported, with the exporter's own words.
    """
    if not are_separate(args, kwargs):  # the exporter takes them for the same in every later call
        args, kwargs = copied_arguments(args, kwargs)
    try:
        with tracing(model):
            try:
                with torch.no_grad():
                    return _export(model, args, kwargs)
            except IndexError:
                # torch 2.13 miscounts the arguments where a model ends in another grad mode than it is exported in.
                with torch.enable_grad():
                    return _export(model, args, kwargs)
    except Exception as error:  # the exporter runs the user's forward: anything may come out of it
        raise CaptureError(f"the model cannot be exported: {tracer_words(error)}") from error


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    return functional(torch.export.export(model, args, kwargs, strict=False))


@contextmanager
def tracing(model: nn.Module) -> Generator[None]:
    """One thread at a time, with a module in evaluation mode, and no words of the tracer's on the screen."""
    with _EXPORTING, evaluation_mode(model), quiet():
        yield


@contextmanager
def evaluation_mode(model: nn.Module) -> Generator[None]:
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
def quiet() -> Generator[None]:
    """Keep the exporter's log, warnings and prints off the screen: what it has to say when it fails is in its exception.

    What it prints is the graph until the fault, some thousand lines for a detector. Other threads print meanwhile as ever.
    """
    before = logging.root.manager.disable
    logging.disable(max(before, logging.ERROR))
    try:
        with warnings.catch_warnings(), redirect_stderr(_OtherThreads(sys.stderr)):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class _OtherThreads(io.TextIOBase):
    """Passes on what all threads but this one write."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self._stream, self._silent = stream, threading.get_ident()

    def write(self, text: str) -> int:
        """Write, unless it is the silent thread that calls."""
        return len(text) if threading.get_ident() == self._silent else self._stream.write(text)

    def flush(self) -> None:
        """Flush what is written to."""
        self._stream.flush()
