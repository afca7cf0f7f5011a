"""cuda.gated_1x1: squeeze-and-excitation with the 1x1 convolution behind it, in two launches (docs/kernels/gates.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

import torch

from convoy.engines.base import Buffers, Engine, Executable, Packed
from convoy.engines.gates.gated_1x1_pattern import Gated1x1, gated_1x1s
from convoy.engines.gates.gated_1x1_tile import GatedTile, tiles
from convoy.engines.gates.squeeze_excitation import MOST_PARTS
from convoy.engines.gates.squeeze_excitation import tiles as squeeze_tiles
from convoy.engines.gpu.device_tensors import as_floats, dense_nhwc, scratch
from convoy.engines.gpu.gpu_support_checks import subgraph_support, values_support
from convoy.engines.hopper.nvrtc_kernel import Function, SpillError, absence, compile_cubin, pointer
from convoy.engines.hopper.nvrtc_source import kernel_source, nvrtc_options
from convoy.errors import LaunchError
from convoy.graph.ir import Graph
from convoy.problem import Knobs, Problem, SubgraphProblem
from convoy.support import Support
from convoy.target import Target

_MOST_SETTINGS: Final = 6
"""By estimate: on an H100 the best setting of thirteen of fourteen blocks at batch 8 and 32 was among the first six."""

MOST_GATES: Final = 480 * 20
"""Weights of the second layer: every block of the second launch reads all of them. On an H100 both launches took 0.57 to 1.15
times as long as the block and a linear layer apart with up to 4096 weights, 0.82 to 1.05 with 480 channels of 20, and 1.02 to
1.83 with 672 and more."""

_SHARED_BYTES: Final = {False: 99 << 10, True: 232448}
"""Of a block at most: before capability 9.0 (the least of 8.0 to 8.9), and from it."""

_WAYS: Final[tuple[dict[str, int], ...]] = ({}, {"MIN_BLOCKS_PER_SM": 1}, {"MIN_BLOCKS_PER_SM": 1, "MOST_HELD": 0})
"""To compile, in turn, until no kernel spills registers: the assembler may choose more blocks beside each other; it is told that
one is enough; and the first layer's weights are loaded when they are needed."""


class Gated1x1Executable(Executable):
    """Both kernels of one problem."""

    def __init__(self, engine: str, problem: Gated1x1, tile: GatedTile, target: Target) -> None:
        self.problem, self.tile, self.dependent = problem, tile, target.capability >= 90
        self.last_readers = {0: -1, 1: -1}  # x and the residual
        self.workspace_bytes = tile.squeeze.workspace_bytes(problem.block)
        cubin, self.log = self._compiled(engine, target)
        squeezed, _ = tile.squeeze.shared_bytes(problem.block)
        self.squeeze = Function(engine, cubin, "squeeze", squeezed)
        self.gated = Function(engine, cubin, "gated", tile.shared_bytes(problem))

    def _compiled(self, engine: str, target: Target) -> tuple[bytes, str]:
        """Compile without spills."""
        parameters = self.tile.parameters(self.problem, dependent=self.dependent)
        options = nvrtc_options(self.problem.block.outer, self.problem.block.dtype)
        *ways, last = (kernel_source("gated_1x1", {**parameters, **way}) for way in _WAYS)
        for source in ways:
            with suppress(SpillError):
                return compile_cubin(engine, source, target, options)
        return compile_cubin(engine, last, target, options)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Weights as [channels, hidden], [hidden, channels] and [filters, channels], each with its bias in fp32, or None."""
        given = iter(constants)
        found: list[torch.Tensor | None] = []
        for index, bias in enumerate((*self.problem.block.biases, self.problem.bias)):
            weight = next(given).detach().flatten(1)
            found.append((weight.t() if index < 2 else weight).contiguous())
            found.append(next(given).detach().float().contiguous() if bias else None)
        return tuple(found)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """The first layer's parts, then the rest."""
        problem, tile, result = self.problem, self.tile, buffers.results[0]
        space = scratch(workspace, self.workspace_bytes)
        if result is None or space is None:
            raise LaunchError("cuda.gated_1x1: no tensor was given to write to")
        x, y = dense_nhwc("x", buffers.args[0]), dense_nhwc("y", result)
        residual = dense_nhwc("residual", buffers.args[1]) if problem.residual else None
        first, bias, second, shift, weight, product_bias = buffers.constants
        parts = as_floats(space, self.workspace_bytes // 4)
        device, grid = x.device.index or 0, tile.squeeze.parts(problem.block) * problem.block.images
        self.squeeze.launch(
            device, grid, tile.squeeze.threads, [*map(pointer, (x, first, parts))], dependent=self.dependent
        )
        rest = [*map(pointer, (x, bias, second, shift, parts, weight, product_bias, residual, y))]
        self.gated.launch(device, tile.grid(problem), tile.threads, rest, dependent=self.dependent)


class Gated1x1Engine(Engine):
    """The block, the convolution, and the residual and the ReLU behind it; see `gated_1x1.cu`."""

    id = "cuda.gated_1x1"
    family = "implicit_gemm"
    devices = ("cuda",)
    trusted = False
    builds_in_threads = True
    fuses_subgraphs = True
    estimates_subgraphs = True

    def samples(self) -> Sequence[Problem]:
        """The first one of EfficientNet-B0."""
        gate, image = "fp16[1,32,1,1]", "fp16[1,32,112,112]"
        places = "(1, 1), (0, 0), (1, 1), 1)"
        text = (
            f"graph 1\ninput %v0: {image}\nconstant %w0: fp16[8,32,1,1]\nconstant %w1: fp16[32,8,1,1]\n"
            "constant %w2: fp16[16,32,1,1]\n"
            f"%v1: {gate} = aten.mean.dim(%v0, (2, 3), True)\n%v2: fp16[1,8,1,1] = conv2d(%v1, %w0, None, {places}\n"
            f"%v3: fp16[1,8,1,1] = aten.silu.default(%v2)\n%v4: {gate} = conv2d(%v3, %w1, None, {places}\n"
            f"%v5: {gate} = aten.sigmoid.default(%v4)\n%v6: {image} = aten.mul.Tensor(%v0, %v5)\n"
            f"%v7: fp16[1,16,112,112] = conv2d(%v6, %w2, None, {places}\nreturn %v7\n"
        )
        return (SubgraphProblem(text, "nhwc"),)

    def fusions(self, graph: Graph) -> Iterable[Sequence[str]]:
        """Each squeeze-and-excitation block with the 1x1 convolution behind it."""
        return gated_1x1s(graph)

    def supports(self, problem: Problem, target: Target) -> Support:
        """Blocks of NHWC images in fp16 or bf16, on capability 8.0 and newer; channels and filters in multiples of 8."""
        does = "computes squeeze-and-excitation with the 1x1 convolution behind it"
        if not (found := subgraph_support(problem, target, does)):
            return found
        assert isinstance(problem, SubgraphProblem)
        if reason := absence():
            return Support.no(reason)
        read = Gated1x1.of(problem)
        if read is None:
            return Support.no(f"{does}, got another subgraph")
        block = read.block
        if block.dtype not in ("fp16", "bf16"):
            return Support.no(f"needs fp16 or bf16, got {block.dtype}")
        pixels = block.images * block.pixels
        if not (found := values_support(block.dtype, pixels * max(block.channels, read.filters))):
            return found
        if block.channels % 8 or read.filters % 8 or not 0 < block.channels <= 128 * MOST_PARTS:
            return Support.no(f"needs channels and filters as multiples of 8, got {block.channels} and {read.filters}")
        if not 0 < block.hidden * block.channels <= MOST_GATES:
            return Support.no(f"needs 1 to {MOST_GATES} weights of a layer, got {block.hidden} x {block.channels}")
        if not pixels or not read.filters:
            return Support.no(
                f"needs images and filters, got {block.images} of {block.pixels} pixels, {read.filters} filters"
            )
        return found if self._ranked(read, target) else Support.no("needs more shared memory than a block has")

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """The configurations with the lowest estimates, by rising estimated time."""
        return [tile.knobs for tile in self._ranked(_known(problem), target)]

    @staticmethod
    def _ranked(problem: Gated1x1, target: Target) -> list[GatedTile]:
        hopper, units = target.capability >= 90, target.units
        squeeze = min(squeeze_tiles(problem.block, units), key=lambda tile: tile.squeeze_us(problem.block, units))
        found = tiles(problem, squeeze, units, _SHARED_BYTES[hopper])
        ranked = sorted(found, key=lambda tile: tile.guess_us(problem, units, hopper=hopper))
        return ranked[:_MOST_SETTINGS]

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """The first layer's parts."""
        return GatedTile.of(knobs).squeeze.workspace_bytes(_known(problem).block)

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """See `GateTile.squeeze_us` and `GatedTile.guess_us`."""
        read, tile = _known(problem), GatedTile.of(knobs)
        rest = tile.guess_us(read, target.units, hopper=target.capability >= 90)
        return tile.squeeze.squeeze_us(read.block, target.units) + rest

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile both kernels; needs no GPU."""
        return Gated1x1Executable(self.id, _known(problem), GatedTile.of(knobs), target)


def _known(problem: Problem) -> Gated1x1:
    assert isinstance(problem, SubgraphProblem)
    read = Gated1x1.of(problem)
    assert read is not None
    return read


ENGINE = Gated1x1Engine()
