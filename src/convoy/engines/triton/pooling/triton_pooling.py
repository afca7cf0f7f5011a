"""triton.pooling: a single pooling, NHWC, 16 bytes of neighbouring channels per thread (docs/kernels/triton.md)."""

from __future__ import annotations

import math

import torch

from convoy.engines.base import Buffers, Engine, Executable
from convoy.engines.gpu.device_tensors import checked
from convoy.engines.subgraph import pooling_of, torch_support
from convoy.engines.triton.pooling.pool_pass import ReduceWindows, window_support
from convoy.engines.triton.triton_build import TORCH_DTYPE, device_support
from convoy.problem import Epilogue, Knobs, Pool, Problem, SubgraphProblem, TensorSpec, kind_in_words
from convoy.support import Support
from convoy.target import Target

_LAUNCH_US, _BYTES_US = 1.2, 2.2e6
_INDEX_LIMIT = 2**31


class _TritonPooling(Executable):
    def __init__(self, engine: str, pool: Pool, spec: TensorSpec, target: Target) -> None:
        n, c, h, w = spec.shape
        self._empty = spec.elements == 0
        self.windows = ReduceWindows(engine, (n, c, h, w), 1, (spec.dtype, spec.dtype), Epilogue(pool=pool), target)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One launch."""
        del workspace
        if not self._empty:
            x, y, _ = checked(buffers, residual=False)
            self.windows.launch(x, y, None, None)


class PoolingEngine(Engine):
    """Maximum and average, any stride and padding, windows of at most 64 pixels."""

    id = "triton.pooling"
    family = "direct"
    devices = ("cuda",)
    trusted = False

    def supports(self, problem: Problem, target: Target) -> Support:
        """Subgraphs of one pooling, in NHWC and fp16, bf16 or fp32, on capability 8.0 and newer."""
        if not isinstance(problem, SubgraphProblem):
            return Support.no(f"computes poolings, got {kind_in_words(problem)}")
        if not (found := device_support(target, 80)):
            return found
        if problem.layout != "nhwc":
            return Support.no(f"needs layout nhwc, got {problem.layout}")
        if not (found := torch_support(problem)):
            return found
        pooling = pooling_of(problem)
        if pooling is None:
            return Support.no("computes a single pooling, got another subgraph")
        pool, spec = pooling
        if spec.dtype not in TORCH_DTYPE:
            return Support.no(f"needs fp16, bf16 or fp32, got {spec.dtype}")
        if spec.elements >= _INDEX_LIMIT:
            return Support.no(f"indexes tensors of fewer than 2^31 elements, got {spec.elements}")
        return window_support(pool)

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float | None:
        """A pass over memory."""
        del knobs, target
        assert isinstance(problem, SubgraphProblem)
        pooling = pooling_of(problem)
        assert pooling is not None
        pool, spec = pooling
        written = math.prod(pool.size(*spec.shape[2:])) * math.prod(spec.shape[:2])
        return _LAUNCH_US + (spec.size_bytes + written * spec.size_bytes // max(1, spec.elements)) / _BYTES_US

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile for one size."""
        del knobs
        assert isinstance(problem, SubgraphProblem)
        pooling = pooling_of(problem)
        assert pooling is not None
        return _TritonPooling(self.id, *pooling, target)


ENGINE = PoolingEngine()
