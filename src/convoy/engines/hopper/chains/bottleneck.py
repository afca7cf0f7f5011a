"""cuda.bottleneck: the three convolutions of a residual net's bottleneck in one kernel, `bottleneck.cu` (docs/kernels/chains.md).

y = act3(conv1x1(act2(conv3x3(act1(conv1x1(x))))) + residual), stride 1. On an H200 it is up to 1.4 times as fast as the layers'
own kernels with 64 channels inside, up to 1.1 times with 128, and half as fast with 256; the search measures both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from convoy.engines.base import Buffers, Engine, Executable, Packed
from convoy.engines.gpu.device_tensors import dense_nhwc, fits_tma, pitch_of, sliced_nhwc
from convoy.engines.hopper.chains.bottleneck_cost import estimate_us, tiles
from convoy.engines.hopper.chains.bottleneck_problem import BottleneckProblem, bottleneck_of, sample
from convoy.engines.hopper.chains.bottleneck_tile_config import BottleneckTile
from convoy.engines.hopper.chains.bottleneck_weights import pack_biases, pack_weights
from convoy.engines.hopper.hopper_support_checks import hopper_alone
from convoy.engines.hopper.nvrtc_kernel import Function, compile_cubin, pointer, structure
from convoy.engines.hopper.nvrtc_source import DIVIDING, kernel_source, nvrtc_options, wgmma_function
from convoy.errors import InputError, LaunchError
from convoy.problem import Knobs, Problem, SubgraphProblem, kind_in_words
from convoy.regions.block import LAYOUT
from convoy.support import Support
from convoy.target import Target


class BottleneckExecutable(Executable):
    """The kernel of one tile configuration for one bottleneck.

    Args:
        engine: the engine's id, for messages.
        problem: the bottleneck.
        tile: the tile configuration.
        target: the device.

    Raises:
        InputError: the kernel cannot compute the bottleneck so.
        CompileError: NVRTC refused the source, or made slow code.
    """

    def __init__(self, engine: str, problem: BottleneckProblem, tile: BottleneckTile, target: Target) -> None:
        block = problem.block
        if refusal := tile.refusal(block):
            raise InputError("knobs", str(tile.knobs), f"a tile configuration that fits; this one {refusal}")
        self.problem, self.tile = problem, tile
        self.last_readers = {}  # its only kernel reads x again, as the residual
        columns = dict.fromkeys((tile.rows * block.w, tile.span(block)))
        products = "".join(wgmma_function(count, block.dtype) for count in columns)
        divides = next((word for word in block.activations if word in DIVIDING), "none")
        options = nvrtc_options(divides, block.dtype)
        source = kernel_source("bottleneck", tile.parameters(block), products)
        cubin, self.log = compile_cubin(engine, source, target, options)
        self.function = Function(engine, cubin, "bottleneck", tile.shared_bytes(block))

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The weights in the order of the copies, and the biases in fp32."""
        block = self.problem.block
        weights = [constants[index].detach() for index in self.problem.weights]
        biases = [constants[index] if index >= 0 else None for index in self.problem.biases]
        return pack_weights(*weights), pack_biases(biases, (block.mid, block.mid, block.k), weights[0])

    def accept_slice(self, result: int, pitch: int, offset: int) -> bool:
        """Whether pixels and the slice start at multiples of 16 bytes."""
        return fits_tma(torch.float16, pitch, offset)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One launch."""
        del workspace
        block, tile = self.problem.block, self.tile
        x = dense_nhwc("x", buffers.args[self.problem.x])
        residual = dense_nhwc("residual", buffers.args[self.problem.residual])
        y = buffers.results[0]
        if y is None:
            raise LaunchError("y: no tensor was given to write to")
        y = sliced_nhwc("y", y)
        weights, biases = buffers.constants
        added = tile.pixel_map(block) if block.residual == "none" else tile.residual_map(block)
        arguments = [
            tile.pixel_map(block).encode(block.dtype, x), pointer(weights), pointer(biases),
            added.encode(block.dtype, residual), tile.result_map(block, pitch_of(y)).encode(block.dtype, y),
            structure("Sizes", tile.sizes(block)),
        ]  # fmt: skip
        device, threads = x.device.index or 0, 128 * (tile.consumers + 1)
        clusters = min(tile.rounds(block), self.function.clusters(device, threads, tile.cluster))
        self.function.launch(device, clusters * tile.cluster, threads, arguments, cluster=tile.cluster, dependent=True)


class BottleneckEngine(Engine):
    """Tiles of rows through all three layers, nothing between them in memory; see `bottleneck.cu`."""

    id = "cuda.bottleneck"
    version = 1
    family = "implicit_gemm"
    devices = ("cuda",)
    trusted = False
    builds_in_threads = True
    writes_slices = True
    patterns = ("block",)
    quick_settings = 4
    estimates_subgraphs = True

    def supports(self, problem: Problem, target: Target) -> Support:
        """Subgraphs that are such a bottleneck, in NHWC and half precision, on Hopper, with channels in multiples of 64."""
        if not isinstance(problem, SubgraphProblem):
            return Support.no(f"computes the convolutions of a subgraph, got {kind_in_words(problem)}")
        if problem.layout != LAYOUT:
            return Support.no(f"needs layout {LAYOUT}, got {problem.layout}")
        if not (found := hopper_alone(target)):
            return found
        bottleneck = bottleneck_of(problem.text)
        if isinstance(bottleneck, str):
            return Support.no(bottleneck)
        if not tiles(bottleneck.block, target.units):
            return Support.no(f"no tile fits shared memory and registers for {bottleneck.block}")
        return Support.yes()

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Tile configurations by rising estimated time."""
        return [tile.knobs for tile in tiles(_read(problem).block, target.units)]

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """The cost model's estimate."""
        return estimate_us(_read(problem).block, BottleneckTile.of(knobs), target.units)

    def samples(self) -> Sequence[Problem]:
        """ResNet-50's second block."""
        return (sample(),)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile one configuration; needs no GPU."""
        return BottleneckExecutable(self.id, _read(problem), BottleneckTile.of(knobs), target)


def _read(problem: Problem) -> BottleneckProblem:
    assert isinstance(problem, SubgraphProblem)
    found = bottleneck_of(problem.text)
    assert isinstance(found, BottleneckProblem)
    return found


ENGINE = BottleneckEngine()
