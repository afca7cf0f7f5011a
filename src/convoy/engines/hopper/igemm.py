"""cuda.implicit_gemm: convolution on Hopper's tensor cores with copies in im2col mode (docs/kernels/hopper.md)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from convoy.engines.base import Buffers, Executable, Packed
from convoy.engines.gpu.device_tensors import checked, fits_tma, pitch_of, round_tf32
from convoy.engines.hopper.hopper_support_checks import copied_product
from convoy.engines.hopper.igemm_tile_config import IgemmTile
from convoy.engines.hopper.igemm_tile_search import estimate_us, forms
from convoy.engines.hopper.nvrtc_kernel import Function, compile_cubin, pointer, structure
from convoy.engines.hopper.nvrtc_source import kernel_source, nvrtc_options, wgmma_function
from convoy.engines.hopper.tensor_maps import FilterMap, PixelMap
from convoy.engines.tiled_kernel import TiledKernelEngine
from convoy.problem import ConvProblem, Problem
from convoy.problem.spec import DTYPE_BYTES
from convoy.support import Support
from convoy.target import Target


class ImplicitGemmExecutable(Executable):
    """The kernel of one tile configuration for one problem."""

    def __init__(self, engine: str, problem: ConvProblem, form: IgemmTile, target: Target) -> None:
        self.problem, self.form, self.units = problem, form, target.units
        source = kernel_source("igemm", form.parameters(problem), wgmma_function(form.filters, problem.x_dtype))
        options = nvrtc_options(problem.epilogue.activation, problem.x_dtype)
        cubin, self.log = compile_cubin(engine, source, target, options)
        self.function = Function(engine, cubin, "igemm", form.shared_bytes)
        self.pixel_map = PixelMap.of(problem, form.pixels)
        self.filter_map = FilterMap.of(problem, form.filters // form.cluster)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The weight as [k, r, s, c], fp32 rounded to TF32; and the bias."""
        weight = round_tf32(constants[0].detach()).permute(0, 2, 3, 1).contiguous()
        return (weight, *(_aligned(bias.detach().contiguous()) for bias in constants[1:]))

    def accept_slice(self, result: int, pitch: int, offset: int) -> bool:
        """Whether pixels and the slice start at multiples of 16 bytes."""
        return fits_tma({2: torch.float16, 4: torch.float32}[DTYPE_BYTES[self.problem.y_dtype]], pitch, offset)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Launch the kernel; an empty batch needs none."""
        del workspace
        if self.problem.n:
            self.multiply(buffers.args[0], buffers)

    def multiply(self, pixels: torch.Tensor, buffers: Buffers) -> None:
        """Launch the kernel with `pixels` as the tensor that the pixel map describes."""
        problem, form = self.problem, self.form
        x, y, residual = checked(buffers, problem.epilogue.residual, slices=True)
        weight, bias = buffers.constants[0], buffers.constants[1] if problem.epilogue.bias else None
        units, size = form.units(problem), form.cluster * form.split
        most = (
            units if form.split > 1 else self.units // size
        )  # a split's sums use the ring buffer, so a cluster has one tile
        arguments = [
            self.pixel_map.encode(problem.x_dtype, pixels), self.filter_map.encode(problem.weight_dtype, weight),
            pointer(y), pointer(residual), pointer(bias), structure("Sizes", form.sizes(problem, pitch_of(y))),
        ]  # fmt: skip
        self.function.launch(
            x.device.index or 0, min(units, most) * size, 128 * (form.consumers + 1), arguments, cluster=size,
            dependent=True,
        )  # fmt: skip


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A 16-byte aligned tensor of the same values, because the kernel reads two bias values at once."""
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


class ImplicitGemmEngine(TiledKernelEngine[IgemmTile]):
    """TMA copies in im2col mode, producer and consumer warpgroups, tiles that fit the problem; see `igemm.cu`."""

    id = "cuda.implicit_gemm"
    devices = ("cuda",)
    writes_slices = True
    version = 3
    family = "implicit_gemm"
    trusted = False
    quick_settings = 3
    tile_config = IgemmTile

    def supports(self, problem: Problem, target: Target) -> Support:
        """Dense NHWC convolutions on Hopper, with c and k multiples of 16 bytes; fp32 as TF32 if the numerics allow it."""
        return copied_product(problem, target)

    def tile_configs(self, problem: ConvProblem, units: int) -> Sequence[IgemmTile]:
        """See `igemm_tile_search.forms`."""
        return forms(problem, units)

    def estimate_tile_us(self, problem: ConvProblem, form: IgemmTile, units: int) -> float:
        """See `igemm_tile_search.estimate_us`."""
        return estimate_us(problem, form, units)

    def build_tile(self, problem: ConvProblem, form: IgemmTile, target: Target) -> Executable:
        """Compile one configuration; needs no GPU."""
        return ImplicitGemmExecutable(self.id, problem, form, target)


ENGINE = ImplicitGemmEngine()
