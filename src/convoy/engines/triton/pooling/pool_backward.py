"""triton.pool_backward: backward passes of maximum and average poolings, NHWC, by gathering (docs/kernels/training.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from convoy.engines.base import Buffers, Engine, Executable
from convoy.engines.gpu.device_tensors import dense_nhwc, vector
from convoy.engines.gpu.gpu_support_checks import subgraph_support, values_support
from convoy.engines.subgraph import parse_subgraph
from convoy.engines.triton.triton_build import KernelBuild, TritonKernel, interpreting
from convoy.errors import LaunchError
from convoy.graph.ir import AVG_POOL_BACKWARD, MAX_POOL_BACKWARD, Graph, Node, Ref
from convoy.problem import DTYPE_BYTES, Knobs, Problem, SubgraphProblem
from convoy.regions.casts import is_cast
from convoy.support import Support
from convoy.target import Target

MOST_WINDOWS = 25
"""Windows that a pixel may lie in: they are unrolled."""

_LAUNCH_US, _BYTES_US, _CACHE_US = 1.5, 2.4e6, 8e6
"""Microseconds of a launch, bytes per microsecond from memory, and through an H100's L1 caches (estimates, not yet fitted)."""


@dataclass(frozen=True)
class PoolWindows:
    """The sizes of one backward pooling."""

    n: int
    c: int
    h: int
    w: int
    p: int
    q: int
    dtype: str
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    order: tuple[str, ...]
    """The role of each arg of the subgraph: `dy`, `x` or `indices`."""
    indices: str = ""
    """Dtype that a maximum pooling's indices are kept in; empty for an average."""
    divisor: int = 0
    """The divisor of every window of an average; 0: the window's number of pixels."""
    pads: bool = True
    """Whether an average counts the padding's pixels."""

    @property
    def even(self) -> int:
        """The divisor that all windows of an average share; 0 if they differ."""
        if self.divisor:
            return self.divisor
        sides = zip((self.h, self.w), (self.p, self.q), self.kernel, self.stride, self.padding, strict=True)
        stands_out = any((p - 1) * stride + k > size + 2 * pad for size, p, k, stride, pad in sides)
        return 0 if stands_out or (any(self.padding) and not self.pads) else math.prod(self.kernel)

    @property
    def covering(self) -> int:
        """Windows that a pixel lies in, at most."""
        return math.prod(-(-k // s) for k, s in zip(self.kernel, self.stride, strict=True))

    @property
    def elements(self) -> int:
        """Elements of the larger side."""
        return self.n * self.c * max(self.h * self.w, self.p * self.q)


def windows_of(problem: SubgraphProblem) -> PoolWindows | None:
    """The pooling gradient that a subgraph computes, perhaps with the cast that widens its indices; None if it is none."""
    graph = parse_subgraph(problem.text)
    *before, last = graph.nodes or (None,)
    if last is None or len(before) > (last.op == MAX_POOL_BACKWARD):
        return None
    return (
        _maximum(graph, last, before)
        if last.op == MAX_POOL_BACKWARD
        else _average(graph, last)
        if last.op == AVG_POOL_BACKWARD
        else None
    )


def _maximum(graph: Graph, node: Node, before: Sequence[Node]) -> PoolWindows | None:
    dy, x, kernel, stride, padding, dilation, _, indices = node.args
    if not (isinstance(dy, Ref) and isinstance(x, Ref) and isinstance(indices, Ref)):
        return None
    kept = indices.name
    if before:
        if not is_cast(before[0]) or before[0].outputs != (kept,):
            return None
        (kept,) = before[0].refs()
    roles = {dy.name: "dy", x.name: "x", kept: "indices"}
    sizes = _sizes(graph, roles)
    if sizes is None:
        return None
    window, step, pad = _pair(kernel), _pair(stride or kernel), _pair(padding)
    order = tuple(roles[v] for v in graph.inputs)
    return PoolWindows(*sizes, window, step, pad, _pair(dilation), order, indices=graph.values[kept].spec.dtype)


def _average(graph: Graph, node: Node) -> PoolWindows | None:
    dy, x, kernel, stride, padding, _, pads, divisor = node.args
    if not (isinstance(dy, Ref) and isinstance(x, Ref)):
        return None
    roles = {dy.name: "dy", x.name: "x"}
    sizes = _sizes(graph, roles)
    if sizes is None:
        return None
    window, step, pad = _pair(kernel), _pair(stride or kernel), _pair(padding)
    order = tuple(roles[v] for v in graph.inputs)
    return PoolWindows(*sizes, window, step, pad, (1, 1), order, divisor=cast("int", divisor or 0), pads=bool(pads))


def _sizes(graph: Graph, roles: Mapping[str, str]) -> tuple[int, int, int, int, int, int, str] | None:
    """n, c, h, w, p, q and dtype of a subgraph whose inputs have these roles; None if its inputs are others, or not images."""
    if len(graph.inputs) != len(set(roles.values())) or set(roles) != set(graph.inputs):
        return None
    names = {role: name for name, role in roles.items()}
    given, images = (graph.values[names[role]].spec for role in ("dy", "x"))
    if len(images.shape) != 4:
        return None
    n, c, h, w = images.shape
    return n, c, h, w, given.shape[2], given.shape[3], images.dtype


def _pair(arg: object) -> tuple[int, int]:
    """Both values of an argument that may be given as one."""
    sides = cast("tuple[int, ...]", arg) if isinstance(arg, tuple) else (cast("int", arg),)
    return int(sides[0]), int(sides[-1])


class PoolBackwardExecutable(Executable):
    """One tile of the kernel for one problem."""

    def __init__(self, engine: str, windows: PoolWindows, knobs: Knobs, target: Target) -> None:
        self.windows = windows
        self.block_p, self.block_c = knobs.integer("block_p"), knobs.integer("block_c")
        if windows.elements:
            dependent = target.capability >= 90 and not interpreting()
            self.kernel = TritonKernel(self._build(engine, knobs.integer("warps"), dependent), target)

    def _build(self, engine: str, warps: int, dependent: bool) -> KernelBuild:
        from convoy.engines.triton.kernels.pool_backward_kernels import avg_pool_backward, max_pool_backward  # pyright: ignore[reportUnknownVariableType]

        found = self.windows
        names = ("pixels", "h", "width", "p", "q", "c", "pad_h", "pad_w")
        pointers = {"dy": found.dtype, **({"indices": found.indices} if found.indices else {}), "dx": found.dtype}
        signature = {**{name: f"*{dtype}" for name, dtype in pointers.items()}, **dict.fromkeys(names, "i32")}
        constants = {
            "R": found.kernel[0], "S": found.kernel[1], "STRIDE_H": found.stride[0], "STRIDE_W": found.stride[1],
            "BLOCK_P": self.block_p, "BLOCK_C": self.block_c, "VECTOR": vector(found.c), "WAIT": dependent,
        }  # fmt: skip
        kernel = cast("Any", max_pool_backward)
        if not found.indices:
            kernel, signature = cast("Any", avg_pool_backward), {**signature, "share": "fp32"}
            constants |= {"EVEN": found.even > 0, "PADS": found.pads}
        return KernelBuild(engine, kernel, signature, constants, [*pointers], warps, 1, dependent, tensor_cores=False)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One launch."""
        del workspace
        found = self.windows
        if not found.elements:
            for result in buffers.results:
                assert result is not None
                result.zero_()
            return
        given = {name: dense_nhwc(name, t) for name, t in zip(found.order, buffers.args, strict=True) if name != "x"}
        (result,) = buffers.results
        if result is None:
            raise LaunchError("dx: no tensor was given to write to")
        pixels = found.n * found.h * found.w
        sizes = [
            pixels, found.h, found.w, found.p, found.q, found.c // vector(found.c), found.padding[0], found.padding[1],
        ]  # fmt: skip
        grid = (-(-pixels // self.block_p), -(-found.c // self.block_c), 1)
        tensors = [*(given[name] for name in ("dy", "indices") if name in given), dense_nhwc("dx", result)]
        share = [] if found.indices else [1.0 / (found.even or 1)]
        self.kernel(grid, [*tensors, *sizes, *share])


class PoolBackwardEngine(Engine):
    """Any stride and padding, no dilation; see `kernels/pool_backward.py`."""

    id = "triton.pool_backward"
    family = "direct"
    devices = ("cuda",)
    trusted = False

    def supports(self, problem: Problem, target: Target) -> Support:
        """Subgraphs of one pooling gradient, in NHWC and fp16, bf16 or fp32, on capability 8.0 and newer."""
        if not (found := subgraph_support(problem, target, "computes pooling gradients")):
            return found
        assert isinstance(problem, SubgraphProblem)
        windows = windows_of(problem)
        if windows is None:
            return Support.no("computes a single pooling gradient, got another subgraph")
        if not (found := values_support(windows.dtype, windows.elements)):
            return found
        if windows.dilation != (1, 1):
            return Support.no(f"needs dilation 1, got {windows.dilation}")
        if windows.covering > MOST_WINDOWS:
            return Support.no(f"needs pixels in at most {MOST_WINDOWS} windows, got {windows.covering}")
        return Support.yes()

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Tiles of 512 to 2048 elements, 16 bytes of gradient a thread and more."""
        assert isinstance(problem, SubgraphProblem)
        windows = windows_of(problem)
        assert windows is not None
        least = 1 << max(5, min(7, (windows.c - 1).bit_length()))
        found = [
            Knobs.of(block_p=elements // block_c, block_c=block_c, warps=warps)
            for elements, warps in ((1024, 4), (512, 2), (2048, 4), (1024, 2))
            for block_c in dict.fromkeys((least, max(32, least // 2)))
        ]
        return sorted(found, key=lambda knobs: self.estimate_us(problem, knobs, target) or 0.0)

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float | None:
        """Each tensor once from memory; indices and gradients of all windows through the first-level cache."""
        del target
        assert isinstance(problem, SubgraphProblem)
        found = windows_of(problem)
        assert found is not None
        item = 4 if found.dtype == "fp32" else 2
        pair = (DTYPE_BYTES[found.indices] if found.indices else 0) + item
        read = found.n * found.c * found.p * found.q * pair
        written = found.n * found.c * found.h * found.w * item
        waste = -(-found.c // knobs.integer("block_c")) * knobs.integer("block_c") / max(1, found.c)
        again = written // item * found.covering * pair * waste
        return _LAUNCH_US + max((read + written) / _BYTES_US, again / _CACHE_US)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile one tile."""
        assert isinstance(problem, SubgraphProblem)
        windows = windows_of(problem)
        assert windows is not None
        return PoolBackwardExecutable(self.id, windows, knobs, target)


ENGINE = PoolBackwardEngine()
