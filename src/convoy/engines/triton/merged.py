"""triton.merged: parallel 1x1 convolutions of one input in one launch, each result in its own tensor (docs/kernels/triton.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch

from convoy.engines.base import Buffers, Engine, Executable, Packed
from convoy.engines.gpu.device_tensors import dense_nhwc, descriptor, fits_tma, pitch_of, sliced_nhwc
from convoy.engines.gpu.gpu_support_checks import INDEX_LIMIT
from convoy.engines.subgraph import parse_subgraph
from convoy.engines.triton.igemm_swap_ab_launch import box_type, pack_bias, pack_tiles
from convoy.engines.triton.triton_build import (
    TORCH_DTYPE,
    KernelBuild,
    TritonKernel,
    device_support,
    interpreting,
    shared_limit,
)
from convoy.engines.triton.triton_igemm_swap_ab import block_channels
from convoy.engines.triton.triton_tile_search import candidate_tiles
from convoy.engines.triton.triton_tiles import ConvView, TritonTile, estimate_us
from convoy.errors import InputError, LaunchError
from convoy.graph.ir import Graph, Node
from convoy.graph.layers import conv_problem
from convoy.problem import ConvProblem, Knobs, Problem, SubgraphProblem, kind_in_words
from convoy.regions.activation import activation_of
from convoy.regions.merge import LAYOUT, MAX_MERGED
from convoy.support import Support
from convoy.target import Target

_SIZES = ("tiles_k", "end0", "end1", "end2", "iterations")


@dataclass(frozen=True, slots=True)
class Merge:
    """A merge of parallel convolutions, read from a subgraph.

    Attributes:
        parts: the convolutions, without their epilogues, in the order of their weights.
        results: for each part, the index of its result in the subgraph.
        biased: whether they have biases.
        activation: their activation.
        dynamic: whether weights and biases are inputs after x, as in training, and not constants.
    """

    parts: tuple[ConvProblem, ...]
    results: tuple[int, ...]
    biased: bool
    activation: str
    dynamic: bool = False

    @property
    def dtype(self) -> str:
        """Of every tensor."""
        return self.parts[0].x_dtype

    def view(self, block_k: int) -> ConvView:
        """The product, its filters padded to whole tiles."""
        first = self.parts[0]
        pixels = first.n * first.h * first.w
        filters = sum(-(-part.k // block_k) * block_k for part in self.parts)
        return ConvView(1, 1, pixels, first.c, filters, 1, pixels)


@lru_cache(maxsize=256)
def merge_of(text: str) -> Merge | str:
    """The merge that a subgraph's text describes, or the reason why it is none."""
    try:
        graph = parse_subgraph(text)
        layers = [node for node in graph.nodes if node.op == "conv2d"]
        if not 2 <= len(layers) <= MAX_MERGED or not graph.inputs:
            return f"merges 2 to {MAX_MERGED} convolutions of one input"
        ends = [_end(graph, node) for node in layers]
        parts = [conv_problem(graph, node) for node in layers]
    except InputError as error:
        return str(error)
    if len(graph.nodes) != sum(1 + bool(word) for _, word in ends) or len({word for _, word in ends}) > 1:
        return "needs convolutions with the same activation and no other operator"
    x, *dynamic = graph.inputs
    names = [*(value.name for value in graph.constants()), *dynamic]
    expected = [name for node in layers for name in list(node.refs())[1:]]
    biased = {node.args[2] is not None for node in layers}
    known = names == expected and (not dynamic or len(dynamic) == len(expected))
    if not known or len(biased) > 1 or {next(node.refs()) for node in layers} != {x}:
        return "needs convolutions of one input with separate weights, and a bias in all or none"
    if sorted(graph.outputs) != sorted(name for name, _ in ends):
        return "needs each convolution's result as an output, and no other output"
    for part in parts:
        plain = part.is_pointwise and part.stride_h == part.stride_w == part.groups == 1
        if not plain or part.x_dtype not in ("fp16", "bf16") or part.c % 8 or part.k % 8:
            return "needs 1x1 filters of stride 1 in fp16 or bf16, c and k multiples of 8"
    places = tuple(graph.outputs.index(name) for name, _ in ends)
    return Merge(tuple(parts), places, biased == {True}, ends[0][1] or "none", bool(dynamic))


def _end(graph: Graph, layer: Node) -> tuple[str, str]:
    """A convolution's last value and its activation's word; empty where it has none."""
    users = graph.users(layer.outputs[0])
    word = activation_of(users[0]) if len(users) == 1 else ""
    return (users[0].outputs[0], word) if word else (layer.outputs[0], "")


class MergedExecutable(Executable):
    """One tile for one merge."""

    def __init__(self, engine: str, merge: Merge, tile: TritonTile, target: Target) -> None:
        self.merge, self.tile, self.view = merge, tile, merge.view(tile.block_k)
        self.tiles = [-(-part.k // tile.block_k) for part in merge.parts]
        if self.view.pixels:
            self.kernel = TritonKernel(self._build(engine), target)

    def _build(self, engine: str) -> KernelBuild:
        import triton.language as tl

        from convoy.engines.triton.kernels.merged_kernel import merged_conv  # pyright: ignore[reportUnknownVariableType]

        tile, merge, dtype = self.tile, self.merge, self.merge.dtype
        box = box_type(dtype, [tile.pixels, tile.block_k])
        signature = {
            "x": box_type(dtype, [tile.pixels, tile.block_c]), "w": box_type(dtype, [tile.block_k, tile.block_c]),
            **{f"y{i}": box if i < len(merge.parts) else "none" for i in range(MAX_MERGED)},
            "bias": f"*{dtype}" if merge.biased else "none",
        } | dict.fromkeys(_SIZES, "i32")  # fmt: skip
        constants: dict[str, Any] = {
            "BLOCK_K": tile.block_k, "BLOCK_P": tile.pixels, "BLOCK_C": tile.block_c,
            "ACTIVATION": merge.activation, "DTYPE": {"fp16": tl.float16, "bf16": tl.bfloat16}[dtype],
            "WAIT": tile.pdl and not interpreting(),
        }  # fmt: skip
        return KernelBuild(engine, merged_conv, signature, constants, ["bias"], tile.warps, tile.stages, tile.pdl)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """All weights in tile order, one after another; the biases likewise. Nothing where they are args."""
        if not constants:
            return ()
        step = 2 if self.merge.biased else 1
        weight = torch.cat([pack_tiles(w, self.tile) for w in constants[::step]])
        if not self.merge.biased:
            return (weight,)
        return weight, torch.cat([pack_bias(b, self.tile.block_k) for b in constants[1::2]])

    def accept_slice(self, result: int, pitch: int, offset: int) -> bool:
        """Where TMA can describe the slice."""
        return self.view.pixels > 0 and fits_tma(TORCH_DTYPE[self.merge.dtype], pitch, offset)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One launch."""
        del workspace
        view, tile = self.view, self.tile
        if not view.pixels:
            return
        x = dense_nhwc("x", buffers.args[0])
        packed = self.pack(buffers.args[1:]) if self.merge.dynamic else buffers.constants
        weight, bias = packed[0], packed[1] if self.merge.biased else None
        places: list[Any] = [None] * MAX_MERGED
        for index, (part, result) in enumerate(zip(self.merge.parts, self.merge.results, strict=True)):
            y = buffers.results[result]
            if y is None:
                raise LaunchError(f"result {result}: no tensor was given to write to")
            y = sliced_nhwc(f"result {result}", y)
            places[index] = descriptor(y, [view.pixels, part.k], [tile.pixels, tile.block_k], [pitch_of(y), 1])
        ends = [*accumulate(self.tiles), *[sum(self.tiles)] * MAX_MERGED][: MAX_MERGED - 1]
        self.kernel(
            (-(-view.pixels // tile.pixels) * sum(self.tiles), 1, 1),
            [
                descriptor(x, [view.pixels, view.c], [tile.pixels, tile.block_c]),
                descriptor(weight, list(weight.shape), [tile.block_k, tile.block_c]),
                *places, bias, sum(self.tiles), *ends, tile.iterations(view),
            ],
        )  # fmt: skip


class MergedEngine(Engine):
    """One product for several convolutions; see `kernels/merged.py`."""

    id = "triton.merged"
    family = "gemm"
    devices = ("cuda",)
    writes_slices = True
    patterns = ("merge",)
    trusted = False

    def supports(self, problem: Problem, target: Target) -> Support:
        """Subgraphs of such convolutions, in NHWC and half precision, on Hopper."""
        if not isinstance(problem, SubgraphProblem):
            return Support.no(f"merges the convolutions of a subgraph, got {kind_in_words(problem)}")
        if not (found := device_support(target, 90)):
            return found
        if problem.layout != LAYOUT:
            return Support.no(f"needs layout {LAYOUT}, got {problem.layout}")
        merge = merge_of(problem.text)
        if isinstance(merge, str):
            return Support.no(merge)
        largest = max(max(part.x_spec.elements, part.y_spec.elements) for part in merge.parts)
        return Support.yes() if largest < INDEX_LIMIT else Support.no("indexes tensors of fewer than 2^31 elements")

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Tiles by rising estimated time."""
        merge = _merge(problem)
        tiles: list[TritonTile] = []
        for block_k in (64, 128):
            view = merge.view(block_k)
            tiles += candidate_tiles(
                view, block_cs=block_channels(view), pixels=(16, 32, 64, 128, 256), ks=(block_k,), units=target.units,
                limit=12, splits=(1,), shared=shared_limit(target),
            )  # fmt: skip
        tiles.sort(key=lambda tile: estimate_us(merge.view(tile.block_k), tile, target.units))
        return [replace(tile, pdl=True).knobs for tile in tiles]

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """The tiles' cost model."""
        merge, tile = _merge(problem), TritonTile.of(knobs)
        return estimate_us(merge.view(tile.block_k), tile, target.units)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile one tile."""
        return MergedExecutable(self.id, _merge(problem), TritonTile.of(knobs), target)


def _merge(problem: Problem) -> Merge:
    assert isinstance(problem, SubgraphProblem)
    merge = merge_of(problem.text)
    assert isinstance(merge, Merge)
    return merge


ENGINE = MergedEngine()
