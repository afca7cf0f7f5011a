"""cuda.inverted_residual: an inverted residual block in one kernel, `inverted_residual.cu` (docs/kernels/chains.md).

y = conv1x1(act2(depthwise(act1(conv1x1(x))))), + x where there is a residual: the blocks of MobileNetV2, and those of other nets
that have no gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from convoy.engines.base import Buffers, Engine, Executable, Packed
from convoy.engines.gpu.device_tensors import dense_nhwc
from convoy.engines.gpu.gpu_support_checks import subgraph_support
from convoy.engines.hopper import hopper_support_checks
from convoy.engines.hopper.chains.inverted_residual_block import InvertedResidual
from convoy.engines.hopper.chains.inverted_residual_cost import estimate_inverted_us, inverted_tiles
from convoy.engines.hopper.chains.inverted_residual_problem import (
    InvertedResidualProblem,
    inverted_residual_of,
    inverted_sample,
)
from convoy.engines.hopper.chains.inverted_residual_tile_config import InvertedTile
from convoy.engines.hopper.chains.inverted_residual_weights import pack_last_bias, pack_slices
from convoy.engines.hopper.nvrtc_kernel import Function, SpillError, compile_cubin, pointer
from convoy.engines.hopper.nvrtc_source import DIVIDING, kernel_source, nvrtc_options
from convoy.errors import InputError, LaunchError
from convoy.problem import Knobs, Problem, SubgraphProblem
from convoy.support import Support
from convoy.target import Target

_SHARED_BYTES: Final = {False: 99 << 10, True: 227 << 10}
"""Of a block of threads at most: before capability 9.0 (the least of 8.0 to 8.9), and from it."""


class InvertedResidualExecutable(Executable):
    """The kernel of one tile configuration for one inverted residual block, or for one without its last layer.

    Args:
        engine: the engine's id, for messages.
        problem: the block.
        tile: the tile configuration.
        target: the device.

    Raises:
        InputError: the kernel cannot compute the block so.
        CompileError: NVRTC refused the source, or spilled registers.
    """

    def __init__(self, engine: str, problem: InvertedResidualProblem, tile: InvertedTile, target: Target) -> None:
        block = problem.block
        refusal = tile.refusal(block, _shared_limit(target))
        if target.capability < 90 and tile.cluster > 1:
            refusal = f"needs capability 9.0 for clusters, got {target.arch}"
        if refusal:
            raise InputError("knobs", str(tile.knobs), f"a tile configuration that fits; this one {refusal}")
        self.problem, self.tile, self.dependent = problem, tile, target.capability >= 90
        kernel = "inverted_residual" if block.projects else "expand_depthwise"
        cubin, self.log = self._compiled(engine, kernel, target)
        self.function = Function(engine, cubin, kernel, tile.shared_bytes(block))

    def _compiled(self, engine: str, kernel: str, target: Target) -> tuple[bytes, str]:
        """Compile for as many blocks as a multiprocessor may have; where that spills registers, for one."""
        block = self.problem.block
        parameters = self.tile.parameters(block, hopper=self.dependent)
        divides = next((word for word in block.activations if word in DIVIDING), "none")
        options = nvrtc_options(divides, block.dtype)
        try:
            return compile_cubin(engine, kernel_source(kernel, parameters), target, options)
        except SpillError:
            fewer = kernel_source(kernel, {**parameters, "MIN_BLOCKS": 1})
            return compile_cubin(engine, fewer, target, options)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The slices of the weights as the kernel copies them, and the last layer's bias in fp32."""
        weights = [constants[index] for index in self.problem.weights]
        biases = [constants[index] if index >= 0 else None for index in self.problem.biases]
        block = self.problem.block
        slices = pack_slices(weights, biases[:2], block, self.tile)
        return (slices, pack_last_bias(biases[2], block, weights[0])) if block.projects else (slices,)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One launch."""
        del workspace
        x, result = dense_nhwc("x", buffers.args[0]), buffers.results[0]
        if result is None:
            raise LaunchError("y: no tensor was given to write to")
        y = dense_nhwc("y", result)
        arguments = [*map(pointer, (x, *buffers.constants, y))]
        grid, threads = self.tile.grid(self.problem.block), 32 * self.tile.warps
        device, cluster = x.device.index or 0, self.tile.cluster
        self.function.launch(device, grid, threads, arguments, cluster=cluster, dependent=self.dependent)


class InvertedResidualEngine(Engine):
    """Tiles of y with all channels inside, a slice of them at a time, nothing between in memory; see `inverted_residual.cu`."""

    id = "cuda.inverted_residual"
    version = 1
    family = "implicit_gemm"
    devices = ("cuda",)
    trusted = False
    builds_in_threads = True
    patterns = ("inverted",)
    quick_settings = 6
    estimates_subgraphs = True

    def supports(self, problem: Problem, target: Target) -> Support:
        """Subgraphs that are such a block, in NHWC and half precision, on capability 8.0 and newer, with channels by eights."""
        if not (found := subgraph_support(problem, target, "computes the convolutions of a subgraph")):
            return found
        assert isinstance(problem, SubgraphProblem)
        if reason := hopper_support_checks.absence():
            return Support.no(reason)
        read = self.read(problem.text)
        if isinstance(read, str):
            return Support.no(read)
        if not _tiles(read.block, target):
            return Support.no(f"no tile fits shared memory and registers for {read.block}")
        return Support.yes()

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Tile configurations by rising estimated time."""
        return [tile.knobs for tile in _tiles(self._block(problem), target)]

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """The cost model's estimate."""
        hopper = target.capability >= 90
        return estimate_inverted_us(self._block(problem), InvertedTile.of(knobs), target.units, hopper=hopper)

    def samples(self) -> Sequence[Problem]:
        """MobileNetV2's third block."""
        return (inverted_sample(),)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile one configuration; needs no GPU."""
        return InvertedResidualExecutable(self.id, self._found(problem), InvertedTile.of(knobs), target)

    def read(self, text: str) -> InvertedResidualProblem | str:
        """The block that a subgraph's text describes, or the reason why it is none."""
        return inverted_residual_of(text)

    def _found(self, problem: Problem) -> InvertedResidualProblem:
        assert isinstance(problem, SubgraphProblem)
        found = self.read(problem.text)
        assert isinstance(found, InvertedResidualProblem)
        return found

    def _block(self, problem: Problem) -> InvertedResidual:
        return self._found(problem).block


def _shared_limit(target: Target) -> int:
    return _SHARED_BYTES[target.capability >= 90]


def _tiles(block: InvertedResidual, target: Target) -> Sequence[InvertedTile]:
    return inverted_tiles(block, target.units, _shared_limit(target), hopper=target.capability >= 90)


ENGINE = InvertedResidualEngine()
