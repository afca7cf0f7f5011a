"""cuda.swapped: convolution with filters as the rows of its products, by `igemm_swap_ab.cu` (docs/kernels/hopper.md).

y = activation(conv(x, weight) + bias + residual)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from convoy.engines.base import Buffers, Executable, Packed
from convoy.engines.gpu.device_tensors import checked, fits_tma, pitch_of, round_tf32
from convoy.engines.hopper.hopper_support_checks import copied_product
from convoy.engines.hopper.igemm_swap_ab_limits import ROW_BYTES
from convoy.engines.hopper.igemm_swap_ab_tensor_maps import pixel_map, result_map
from convoy.engines.hopper.igemm_swap_ab_tile_config import SwapAbTile
from convoy.engines.hopper.igemm_swap_ab_tile_search import estimate_us, forms
from convoy.engines.hopper.igemm_swap_ab_variants import WideForm
from convoy.engines.hopper.nvrtc_kernel import Function, compile_cubin, pointer, structure
from convoy.engines.hopper.nvrtc_source import kernel_source, nvrtc_options, wgmma_function, wgmma_sparse_function
from convoy.engines.tiled_kernel import TiledKernelEngine
from convoy.errors import InputError
from convoy.problem import ConvProblem, Problem
from convoy.support import Support
from convoy.target import Target

_TORCH: Final = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

_PIECES: Final = 8
"""Vectors of 16 bytes in a row of a block."""


def in_blocks(weight: torch.Tensor, form: SwapAbTile) -> torch.Tensor:
    """The weight in the order of the copies: [tiles of filters, blocks, filters of a tile, channels of a block].

    A block is one tap and 128 bytes of channels, in the 128-byte swizzle. With a halo the taps of one block of channels follow
    each other, otherwise the blocks of channels of one tap. Missing filters and channels are zeros.

    Args:
        weight: [k, c, r, s].
        form: the tile configuration.
    """
    k, c, r, s = weight.shape
    filters, together = form.filters, form.filters * form.cluster
    channels = ROW_BYTES // weight.element_size()
    rows = weight.permute(0, 2, 3, 1).reshape(k, r * s, c)
    rows = torch.nn.functional.pad(rows, (0, -c % channels, 0, 0, 0, -k % together))
    pieces = rows.view(-1, filters, r * s, rows.shape[2] // channels, _PIECES, channels // _PIECES)
    row = torch.arange(filters, device=weight.device)[:, None]
    place = torch.arange(_PIECES, device=weight.device)[None, :] ^ (row % 8)
    swizzled = pieces.gather(4, place[None, :, None, None, :, None].expand_as(pieces))
    order = (0, 3, 2, 1, 4, 5) if form.halo else (0, 2, 3, 1, 4, 5)
    return swizzled.permute(order).reshape(rows.shape[0] // filters, -1, filters, channels).contiguous()


def products(dtype: str, form: SwapAbTile) -> str:
    """The wgmma functions of a kernel for operands of a dtype."""
    if form.sparse:
        return wgmma_sparse_function(form.pixels, dtype)
    made = wgmma_function(form.pixels, dtype)
    made += wgmma_function(form.pixels, dtype, name="wgmma_zero_init", adds=False)
    made += wgmma_function(form.pixels, dtype, name="wgmma_transposed_a", transposed=1) if dtype != "fp32" else ""
    return made


class SwappedExecutable(Executable):
    """The kernel of one tile configuration for one problem.

    Args:
        engine: the engine's id, for messages.
        problem: that the engine got.
        form: the tile configuration.
        target: the device.
    """

    def __init__(self, engine: str, problem: ConvProblem, form: SwapAbTile, target: Target) -> None:
        if not form.fits(problem):
            raise InputError(
                "knobs", str(form.knobs), f"a halo only where it fits: 3x3, stride 1, padding 1; got {problem}"
            )
        self.problem, self.form, self.units = problem, form, target.units
        source = kernel_source("igemm_swap_ab", form.parameters(problem), products(problem.x_dtype, form))
        options = nvrtc_options(problem.epilogue.activation, problem.y_dtype)
        cubin, self.log = compile_cubin(engine, source, target, options)
        self.function = Function(engine, cubin, "igemm_swap_ab", form.shared_bytes)
        self.pixel_map = pixel_map(problem, form)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The weight in the order of the copies, and the bias."""
        return (self.in_order(constants[0].detach()), *(bias.detach().contiguous() for bias in constants[1:]))

    def in_order(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight by `in_blocks`, fp32 rounded to TF32."""
        return in_blocks(round_tf32(weight), self.form)

    def weight_argument(self, weight: torch.Tensor) -> Any:
        """The kernel's argument for the packed weight."""
        return pointer(weight)

    def accept_slice(self, result: int, pitch: int, offset: int) -> bool:
        """Whether pixels and the slice start at multiples of 16 bytes."""
        return fits_tma(_TORCH[self.problem.y_dtype], pitch, offset)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Launch the kernel; an empty batch needs none."""
        del workspace
        if self.problem.n:
            self.multiply(buffers.args[0], buffers)

    def multiply(
        self, pixels: torch.Tensor, buffers: Buffers, scales: Sequence[torch.Tensor | None] = (None, None)
    ) -> None:
        """Launch the kernel.

        Args:
            pixels: the tensor that the pixel map describes: x, or its planes.
            buffers: of the launch.
            scales: 1 / scale of x and of every filter, if there are planes.
        """
        problem, form = self.problem, self.form
        x, y, residual = checked(buffers, problem.epilogue.residual, slices=True)
        weight, bias = buffers.constants[0], buffers.constants[1] if problem.epilogue.bias else None
        arguments = [
            self.pixel_map.encode(problem.x_dtype, pixels), self.weight_argument(weight), pointer(y),
            pointer(residual), pointer(bias), structure("Sizes", form.sizes(problem, pitch_of(y))),
        ]  # fmt: skip
        if form.staged:
            arguments += [
                result_map(problem, form, pitch_of(y)).encode(problem.y_dtype, y),
                result_map(problem, form, problem.k).encode(problem.y_dtype, y if residual is None else residual),
            ]
        if form.wide:
            arguments += [pointer(scale) for scale in scales]
        device, threads, size = x.device.index or 0, 128 * (form.consumers + 1), form.cluster * form.split
        clusters = form.units(problem)
        if form.split == 1 and form.staged < 2:  # otherwise a block has memory for the sums or results of one tile
            clusters = min(clusters, self.function.clusters(device, threads, size))
        self.function.launch(device, clusters * size, threads, arguments, cluster=size, dependent=True)


class SwappedForms(TiledKernelEngine[SwapAbTile]):
    """Base of the engines of `igemm_swap_ab.cu`: tile configurations for the convolution that the kernel computes."""

    version = 1
    family = "implicit_gemm"
    trusted = False
    builds_in_threads = True
    quick_settings = 6
    tile_config = SwapAbTile

    def computed(self, problem: ConvProblem) -> ConvProblem:
        """The convolution that the kernel computes for a problem."""
        return problem

    def tile_configs(self, problem: ConvProblem, units: int) -> Sequence[SwapAbTile]:
        """See `igemm_swap_ab_tile_search`."""
        return forms(self.computed(problem), units, self.tile_config_class(problem))

    def estimate_tile_us(self, problem: ConvProblem, form: SwapAbTile, units: int) -> float:
        """See `igemm_swap_ab_tile_search.estimate_us`."""
        return estimate_us(self.computed(problem), form, units)


class SwappedEngine(SwappedForms):
    """Filters as rows, copies ahead of the products, splits and halos; see `igemm_swap_ab.cu`."""

    id = "cuda.swapped"
    devices = ("cuda",)
    writes_slices = True

    def supports(self, problem: Problem, target: Target) -> Support:
        """Dense NHWC convolutions on Hopper, with c and k multiples of 16 bytes; fp32 as TF32 if the numerics allow it."""
        return copied_product(problem, target)

    def tile_config_class(self, problem: ConvProblem) -> type[SwapAbTile]:
        """`WideForm` for fp32 results, otherwise `SwapAbTile`."""
        return WideForm if problem.x_dtype == "fp32" else SwapAbTile

    def build_tile(self, problem: ConvProblem, form: SwapAbTile, target: Target) -> Executable:
        """Compile one configuration; needs no GPU."""
        return SwappedExecutable(self.id, problem, form, target)


ENGINE = SwappedEngine()
