"""The check of a net for inference: the tuned program against the stock module."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

import torch

from convoy.engines.torch_flags import convolutions
from convoy.pipeline.check import end_to_end
from convoy.pipeline.check.end_to_end_check import ComparedRun, EndToEndCheck
from convoy.pipeline.check.net_oracle import run_oracle
from convoy.pipeline.check.rounding import fixed_seed
from convoy.pipeline.check.stock_graph import baseline_run, stock_graph
from convoy.pipeline.isolation import IsolatedCopy
from convoy.pipeline.net import Net
from convoy.program import CudaGraphProgram, Program
from convoy.settings import Effort
from convoy.tuning_profile import phase

FIRST_SAMPLE: Final = 4
"""A first answer's float64 run on a CPU may take this many times fewer operations: it computes fewer images of a batch."""


class NetCheck(EndToEndCheck):
    """Compares the outputs of the stock module and of a program.

    cuDNN's search is on from the stock module's first call: PyTorch keeps the first plan that it finds for a convolution.

    Args:
        net: the captured net.
        isolated: a copy of the stock module and of its inputs.
        effort: `none` computes fewer images in float64.

    Attributes:
        baseline_errors: errors of the stock module's outputs.
        note: the reference, if it was not float64; else empty.
        wrong: warning that PyTorch's own outputs are wrong; empty if they are right.

    Raises:
        CaptureError: the captured graph does not compute what the module does.
    """

    def __init__(self, net: Net, isolated: IsolatedCopy, effort: Effort = Effort.QUICK) -> None:
        self.cuda = net.target.device == "cuda"
        self.warm = not self.cuda and effort is Effort.NONE  # the oracle runs the stock module, and `ours` the program
        self._model, self._args, self._kwargs = isolated.model, isolated.args, isolated.kwargs
        flops = sum(region.problems[0].flops for region in net.regions if len(region.nodes) == 1)
        flops *= FIRST_SAMPLE if effort is Effort.NONE else 1
        original = net.captured if net.original is None else net.original
        with self.context(), phase("check", "float64"):
            found = run_oracle(original, self._model, self._args, self._kwargs, flops=flops, cuda=self.cuda)
        self._exact, self.baseline_errors = found.exact, found.baseline
        self.note, self.wrong = found.note, found.wrong

    @contextmanager
    def context(self) -> Generator[None]:
        """No gradients, and convolutions as PyTorch runs them."""
        with torch.no_grad(), convolutions("as_torch", torch.device("cuda" if self.cuda else "cpu")):
            yield

    def stock(self) -> ComparedRun:
        """The stock module; on a GPU as one CUDA graph, if it can be captured."""
        model, args, kwargs = self._model, self._args, self._kwargs
        runs: dict[str, Callable[[], object]] = {"torch.eager": lambda: model(*args, **kwargs)}
        if self.cuda:
            runs = baseline_run(runs["torch.eager"], lambda: stock_graph(model, args, kwargs))
        ((name, run),) = runs.items()
        return ComparedRun(name, self.baseline_errors, run)

    def ours(self, program: Program) -> ComparedRun:
        """The program; on a GPU without the copies of inputs and outputs."""
        args, kwargs = self._args, self._kwargs
        with fixed_seed():
            errors = end_to_end.errors_against(program(args, kwargs), self._exact)
        runnable = program.runnable
        replay = runnable.replay if isinstance(runnable, CudaGraphProgram) else None
        run: Callable[[], object] = replay if replay is not None else lambda: program(args, kwargs)
        return ComparedRun("convoy", errors, run)
