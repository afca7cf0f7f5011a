"""cpu.pooling: a single pooling in NHWC, rows first and then columns, in C (pooling.c; docs/kernels/cpu.md).

%p = aten.max_pool2d.default(%x, (3, 3), (2, 2))       or another pooling
%f = aten.view.default(%p, (1, 9216))                  optional

or

%m = aten.mean.dim(%x, (2, 3), True)                   the mean of each image's channels, as [n, c, 1, 1] or as [n, c]
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

import torch

from convoy.engines.base import Executable, Packed
from convoy.engines.cpu.native_launch import Native, NativeExecutable
from convoy.engines.cpu.weight_tiles import STORED, storage_kernel
from convoy.engines.cpu_subgraph import CpuSubgraphEngine
from convoy.engines.subgraph import averages_images, parse_subgraph, pooling_of
from convoy.problem import Knobs, Pool, Problem, SubgraphProblem, TensorSpec
from convoy.target import Target

SOURCE: Final = Path(__file__).with_name("pooling.c")

BLOCK_FLOATS: Final = 4096
"""Of a reduced row, as in pooling.c."""

LINE: Final = 16
"""Floats of a cache line: a block of channels has no fewer, unless the tensor has."""

WIDEST: Final = BLOCK_FLOATS // LINE
"""Columns of the largest window that the kernel's block supports."""

_SIZES: Final = ("n", "c", "h", "w", "y_h", "y_w")
_WINDOW: Final = ("average", "window_h", "window_w", "stride_h", "stride_w", "pad_h", "pad_w", "count_include_pad")
_DIVISION: Final = ("block_c", "threads", "flat")


class _PoolingSizes(ctypes.Structure):
    """`Sizes` of pooling.c."""

    _fields_ = tuple((name, ctypes.c_int64) for name in (*_SIZES, *_WINDOW, *_DIVISION))


def channels_of_block(c: int, w: int) -> int:
    """Channels of a work item: as many as fit a reduced row, in whole cache lines, so that each row is read once."""
    return max(LINE, min(-(-c // LINE), BLOCK_FLOATS // (LINE * max(1, min(w, WIDEST)))) * LINE)


def _mean_of(problem: SubgraphProblem) -> tuple[Pool, TensorSpec] | None:
    """The mean that a subgraph consists of, as an average over the whole image, and its input; None for any other subgraph."""
    graph = parse_subgraph(problem.text)
    if len(graph.nodes) != 1 or graph.outputs != graph.nodes[0].outputs or not averages_images(graph, graph.nodes[0]):
        return None
    spec = graph.values[graph.inputs[0]].spec
    h, w = spec.shape[2:]
    return Pool("avg", h, w, h, w), spec


class _CpuPooling(NativeExecutable):
    def __init__(self, pool: Pool, spec: TensorSpec, *, flat: bool) -> None:
        n, c, h, w = spec.shape
        self._empty = spec.elements == 0
        y_h, y_w = pool.size(h, w)
        window = {name: getattr(pool, name) for name in _WINDOW[1:]}
        self._sizes = _PoolingSizes(
            n=n, c=c, h=h, w=w, y_h=y_h, y_w=y_w, average=pool.kind == "avg", **window,
            block_c=channels_of_block(c, w), threads=torch.get_num_threads(), flat=flat and y_h * y_w > 1,
        )  # fmt: skip
        self.use(storage_kernel(SOURCE, PoolingCpu.id, "convoy_pooling", spec.dtype))

    def native(self, constants: Packed) -> Native | None:
        """Rows, then columns."""
        del constants
        return None if self._empty else Native(self._sizes, (("arg", 0), ("result", 0)))


class PoolingCpu(CpuSubgraphEngine):
    """Maximum and average, any stride and padding, in fp32 or bf16, optionally with the view that flattens each image."""

    id = "cpu.pooling"
    devices = ("cpu",)
    native = True
    builds_in_threads = True
    patterns = ("pool",)
    does = "computes poolings"
    layouts = ("nhwc",)

    def refusal(self, problem: SubgraphProblem) -> str:
        """Refuses other dtypes than those of `STORED` and windows too wide for a block."""
        pooling = pooling_of(problem) or pooling_of(problem, flat=True) or _mean_of(problem)
        if pooling is None:
            return "computes a single pooling, got another subgraph"
        pool, spec = pooling
        if spec.dtype not in STORED:
            return f"needs {' or '.join(STORED)}, got {spec.dtype}"
        if min(pool.window_w, spec.shape[3]) > WIDEST:
            return f"needs windows of at most {WIDEST} columns, got {pool.window_w}"
        return ""

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """The library is compiled once for all problems."""
        del knobs, target
        assert isinstance(problem, SubgraphProblem)
        flat = pooling_of(problem, flat=True)
        pooling = flat or pooling_of(problem) or _mean_of(problem)
        assert pooling is not None
        return _CpuPooling(*pooling, flat=flat is not None)


ENGINE = PoolingCpu()
