"""The check of a net for inference: the tuned program against the stock module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from convoy.engines.flags import convolutions
from convoy.pipeline import verdict
from convoy.pipeline.check import Check, Side
from convoy.program import Program


class NetCheck(Check):
    """Outputs of stock module and program.

    cuDNN searches from the stock module's first call on: PyTorch keeps the first plan of a convolution that it finds.

    Args:
        model: the stock module.
        args: its inputs.
        kwargs: its keyword inputs.
        flops: operations of a call (`verdict.exact_outputs`).
        cuda: whether they lie on a GPU.
    """

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, flops: int, cuda: bool
    ) -> None:
        self.cuda = cuda
        self._model, self._args, self._kwargs = model, args, kwargs
        with self.context():
            self._exact = verdict.exact_outputs(model, args, kwargs, flops)

    @contextmanager
    def context(self) -> Iterator[None]:
        """No gradients, and convolutions as PyTorch runs them."""
        with torch.no_grad(), convolutions("as_torch", torch.device("cuda" if self.cuda else "cpu")):
            yield

    def stock(self) -> Side:
        """The stock module: on a GPU as one graph, where it can be captured."""
        model, args, kwargs = self._model, self._args, self._kwargs
        errors = verdict.errors_against(model(*args, **kwargs), self._exact)
        runs: dict[str, Callable[[], object]] = {"torch.eager": lambda: model(*args, **kwargs)}
        if self.cuda:
            runs = verdict.baseline_run(runs["torch.eager"], lambda: verdict.stock_graph(model, args, kwargs))
        ((name, run),) = runs.items()
        return Side(name, errors, run)

    def ours(self, program: Program) -> Side:
        """The program: on a GPU without the copies of inputs and outputs."""
        args, kwargs = self._args, self._kwargs
        errors = verdict.errors_against(program(args, kwargs), self._exact)
        run = program.runnable.replay if self.cuda else lambda: program(args, kwargs)  # type: ignore[union-attr]
        return Side("convoy", errors, run)
