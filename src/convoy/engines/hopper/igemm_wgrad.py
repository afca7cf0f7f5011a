"""cuda.wgrad: gradients of a weight, whose operands are not packed, by `igemm_wgrad.cu` (docs/kernels/training.md)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from convoy.engines.base import Buffers, Executable
from convoy.engines.gpu.device_tensors import as_floats, scratch
from convoy.engines.hopper.hopper_support_checks import im2col
from convoy.engines.hopper.igemm_dynamic_weight import half_product
from convoy.engines.hopper.igemm_wgrad_tile_config import IgemmWgradTile
from convoy.engines.hopper.igemm_wgrad_tile_search import estimate_us, forms
from convoy.engines.hopper.nvrtc_kernel import Function, compile_cubin, pointer, structure
from convoy.engines.hopper.nvrtc_source import kernel_source, wgmma_function
from convoy.engines.tiled_kernel import TiledKernelEngine
from convoy.engines.triton.igemm_swap_ab_launch import ReduceSplits
from convoy.engines.triton.triton_wgrad import asked
from convoy.problem import ConvProblem, Epilogue, Knobs, Problem
from convoy.support import Support
from convoy.target import Target


class WeightGradientExecutable(Executable):
    """The kernel of one tile configuration for one problem.

    Args:
        engine: the engine's id, for messages.
        problem: a weight gradient.
        form: the tile configuration.
        target: the device.
    """

    def __init__(self, engine: str, problem: ConvProblem, form: IgemmWgradTile, target: Target) -> None:
        self.problem, self.form = problem, form
        self.workspace_bytes = share_bytes(problem, form)
        products = wgmma_function(form.columns, problem.x_dtype, name="wgmma_transposed_ab", transposed=2)
        source = kernel_source("igemm_wgrad", form.parameters(problem), products)
        cubin, self.log = compile_cubin(engine, source, target)
        self.function = Function(engine, cubin, "igemm_wgrad", form.shared_bytes)
        self.sizes = structure("Sizes", form.sizes(problem)) if problem.n else None
        self.x_map, self.dy_map = form.x_map(problem), form.dy_map(problem)
        self.reduce = None
        if self.workspace_bytes:
            self.reduce = ReduceSplits(
                engine, problem.weight_spec.elements, problem.c, form.shares, problem.weight_dtype, Epilogue(), target
            )

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Launch the kernel, and a second one if shares are added in memory; an empty batch needs none."""
        x, dy, dweight = asked(self.problem, buffers)
        if self.sizes is None:
            dweight.zero_()
            return
        partial = scratch(workspace, self.workspace_bytes)
        sums = None if partial is None else as_floats(partial, self.form.shares * dweight.numel())
        self.multiply(x, dy, dweight if sums is None else sums)
        if self.reduce is not None and sums is not None:
            self.reduce.launch(sums, dweight, None, None)

    def multiply(self, x: torch.Tensor, dy: torch.Tensor, out: torch.Tensor) -> None:
        """Launch the kernel, which writes the gradient, or the sums of every share."""
        problem, form = self.problem, self.form
        arguments = [
            self.x_map.encode(problem.x_dtype, x), self.dy_map.encode(problem.y_dtype, dy), pointer(out), self.sizes,
        ]  # fmt: skip
        device, threads = x.device.index or 0, 128 * (form.consumers + 1)
        clusters = form.units(problem)
        if form.split == 1:  # otherwise the ring buffer holds the sums of one tile
            clusters = min(clusters, self.function.clusters(device, threads, 1))
        self.function.launch(device, clusters * form.split, threads, arguments, cluster=form.split, dependent=True)


def share_bytes(problem: ConvProblem, form: IgemmWgradTile) -> int:
    """Workspace bytes for the fp32 sums of the shares; 0 if there is one share."""
    return 4 * form.shares * problem.weight_spec.elements if problem.n and form.shares > 1 else 0


class WeightGradientEngine(TiledKernelEngine[IgemmWgradTile]):
    """Weight gradients in half types."""

    id = "cuda.wgrad"
    devices = ("cuda",)
    version = 1
    family = "implicit_gemm"
    trusted = False
    builds_in_threads = True
    quick_settings = 6
    tile_config = IgemmWgradTile

    def supports(self, problem: Problem, target: Target) -> Support:
        """Weight gradients in fp16 or bf16 and NHWC on Hopper, c and k multiples of 8."""
        if not (found := half_product(problem, target, "wgrad")):
            return found
        assert isinstance(problem, ConvProblem)
        return im2col(problem)

    def tile_configs(self, problem: ConvProblem, units: int) -> Sequence[IgemmWgradTile]:
        """See `igemm_wgrad_tile_search`."""
        return forms(problem, units)

    def estimate_tile_us(self, problem: ConvProblem, form: IgemmWgradTile, units: int) -> float:
        """See `igemm_wgrad_tile_search.estimate_us`."""
        return estimate_us(problem, form, units)

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """Bytes of the shares' sums."""
        assert isinstance(problem, ConvProblem)
        return share_bytes(problem, IgemmWgradTile.of(knobs))

    def build_tile(self, problem: ConvProblem, form: IgemmWgradTile, target: Target) -> Executable:
        """Compile one configuration; needs no GPU."""
        return WeightGradientExecutable(self.id, problem, form, target)


ENGINE = WeightGradientEngine()
