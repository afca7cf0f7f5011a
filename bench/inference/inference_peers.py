"""Whole nets by other frameworks, ready to be timed: what `inference.py` compares Convoy with, but for JAX (`jax_peer.py`)."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from bench.inference.jax_peer import NAME as JAX
from bench.shared.time_limit import COMPILE_S, within
from torch import nn

from convoy.compare.frameworks.torch_eager import captured_call
from convoy.compare.frameworks.torch_inductor import GPU_OPTIONS
from convoy.pipeline.check.stock_graph import stock_graph
from convoy.plan import Plan
from convoy.program.cuda.recording import forget_library_workspaces


@dataclass(frozen=True, slots=True)
class Run:
    """How a run is made.

    Attributes:
        peers: words of the peers that are wanted.
        effort: of Convoy's tuning.
        db: Convoy's database; None: the user's.
        time_s: seconds that tuning a net may take.
        end: when to be done, by `time.monotonic`.
        ablation: whether to time what merging and streams give.
    """

    peers: tuple[str, ...]
    effort: str
    db: Path | None
    time_s: float
    end: float
    ablation: bool = False

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.end - time.monotonic()


@dataclass(slots=True)
class Ready:
    """A provider that can be timed.

    Attributes:
        call: runs once.
        output: runs once and returns the result.
        compile_s: seconds until it could run.
        held: bytes that it holds beyond the model as it was.
        note: of its rows.
    """

    call: Callable[[], object]
    output: Callable[[], object]
    compile_s: float
    held: int
    note: str = ""
    plan: Plan | None = None


def compiled(model: nn.Module, x: torch.Tensor, name: str) -> Callable[[], object]:
    """Inductor's code with frozen weights, captured as one CUDA graph by hand; what replays it.

    Its options are this compilation's alone, and nothing resets Dynamo: the code of other providers stays as it was compiled.
    """
    fast = torch.compile(model, dynamic=False, options={"freezing": True, **GPU_OPTIONS[name]})
    with within(COMPILE_S):
        fast(x)
        torch.cuda.synchronize()
    return captured_call(lambda: fast(x))


def eager(model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    """The module as it is; cuDNN looks for its fastest kernels in the first calls."""
    for _ in range(3):
        model(x)
    return lambda: model(x)


WORDS = {
    "torch.eager": "eager",
    "torch.eager.nhwc": "eager",
    "torch.graph": "graph",
    "torch.graph.nhwc": "graph",
    "inductor.default": "inductor",
    "inductor.conv_1x1_as_mm": "inductor",
    "inductor.coordinate-descent": "coordinate-descent",
    "inductor.max-autotune": "max-autotune",
    JAX: "jax",
}
"""Providers, and the words that they are asked for by."""


def peers(model: nn.Module, x: torch.Tensor, run: Run) -> tuple[dict[str, Ready], dict[str, str]]:
    """The other ways to run the model, by provider name; and of those that failed, why."""
    nhwc = copy.deepcopy(model).to(memory_format=torch.channels_last)
    image = x.contiguous(memory_format=torch.channels_last)
    makers: dict[str, Callable[[], Callable[[], object]]] = {
        "torch.eager": lambda: eager(model, x),
        "torch.eager.nhwc": lambda: eager(nhwc, image),
        "torch.graph": lambda: stock_graph(model, (x,), {}),
        "torch.graph.nhwc": lambda: stock_graph(nhwc, (image,), {}),
        "inductor.default": lambda: compiled(nhwc, image, "default"),
        "inductor.conv_1x1_as_mm": lambda: compiled(nhwc, image, "conv_1x1_as_mm"),
        "inductor.coordinate-descent": lambda: compiled(nhwc, image, "coordinate descent"),
        "inductor.max-autotune": lambda: compiled(nhwc, image, "max-autotune"),
    }
    ready: dict[str, Ready] = {}
    failed: dict[str, str] = {}
    for name, make in makers.items():
        if WORDS[name] not in run.peers:
            continue
        if WORDS[name] == "max-autotune" and run.left_s < COMPILE_S:
            print(f"{name}: no time is left for {COMPILE_S} s of compiling", flush=True)
            continue
        before, begun = reserved(), time.perf_counter()
        try:
            call = make()
        except Exception as error:  # a peer that fails is said to have failed
            failed[name] = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
            print(f"{name}: {failed[name]}", flush=True)
            continue
        took = time.perf_counter() - begun
        ready[name] = Ready(call, call, took, reserved() - before)
    return ready, failed


def reserved() -> int:
    """Bytes that PyTorch holds on the device and needs: without its caches, and without the libraries' workspaces.

    Whoever captures a graph frees those; they would count as less than nothing for him.
    """
    forget_library_workspaces()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()
