"""The baseline on a GPU: PyTorch's own run, captured as one CUDA graph if possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from convoy.engines.torch_flags import convolutions
from convoy.program.cuda.recording import CAPTURE_FAILURES, recording


def baseline_run(
    run: Callable[[], object], capture: Callable[[], Callable[[], object]]
) -> dict[str, Callable[[], object]]:
    """PyTorch's own run on a GPU under its name: `torch.graph`, or `torch.eager` where it cannot be captured.

    Args:
        run: launches it once.
        capture: captures it, and gives what replays it.
    """
    try:
        return {"torch.graph": capture()}
    except torch.OutOfMemoryError:
        raise
    except CAPTURE_FAILURES:
        return {"torch.eager": run}


def stock_graph(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], object]:
    """The stock module captured as one CUDA graph, as PyTorch users do it by hand: the baseline on a GPU.

    cudnn.benchmark is on while it warms up, so that the captured kernels are those that cuDNN found fastest.
    """

    def run() -> object:
        with torch.no_grad():
            return model(*args, **kwargs)

    return capture_stock(run, reads=(model, args, kwargs))


def capture_stock(run: Callable[[], object], *, reads: object) -> Callable[[], object]:
    """What a function launches, captured as one CUDA graph on one stream.

    Args:
        run: launches the work.
        reads: what must live as long as the graph: the graph holds addresses alone.
    """
    stream = torch.cuda.Stream()
    with convolutions("as_torch", stream.device):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with recording(graph, stream):
            kept = run()

    def replay() -> object:
        graph.replay()
        return kept

    replay.reads = reads  # pyright: ignore[reportFunctionMemberAccess]
    return replay
