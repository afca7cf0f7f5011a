"""cuda.first_layer: the first layer and the pooling behind it in one launch (docs/kernels/first-layers.md)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import ClassVar, Final

import torch

from convoy.engines.base import Buffers, Executable, Packed
from convoy.engines.gpu.device_tensors import checked, fits_tma, pitch_of, round_tf32
from convoy.engines.gpu.gpu_support_checks import first_layer_support
from convoy.engines.hopper.first_layer_tile_config import (
    FILTERS,
    MOST_CHANNELS,
    MOST_COLUMNS,
    FirstLayerTile,
    Layer,
    forms,
    in_slices,
)
from convoy.engines.hopper.hopper_support_checks import hopper_alone
from convoy.engines.hopper.nvrtc_kernel import Function, compile_cubin, pointer
from convoy.engines.hopper.nvrtc_source import kernel_source, nvrtc_options, wgmma_function
from convoy.engines.tiled_kernel import TiledKernelEngine
from convoy.engines.triton.pooling.pool_windows import unpooled
from convoy.engines.triton.triton_build import TORCH_DTYPE
from convoy.errors import InputError
from convoy.problem import ConvProblem, Problem
from convoy.support import Support
from convoy.target import Target

_MONOTONE: Final = ("none", "relu", "relu6")
"""Monotone activations: the largest activation is the activation of the largest value."""


class FirstLayerExecutable(Executable):
    """The kernel of one tile configuration for one problem."""

    def __init__(self, engine: str, problem: ConvProblem, form: FirstLayerTile, target: Target) -> None:
        self.problem, self.layer = problem, Layer(problem, form)
        if not self.layer.fits:
            raise InputError(
                "knobs", str(form.knobs), f"fewer warpgroups: {self.layer.shared_bytes} bytes of shared memory"
            )
        products = wgmma_function(self.layer.columns, problem.x_dtype)
        source = kernel_source("first_layer", self.layer.parameters(), products)
        options = nvrtc_options(problem.epilogue.activation, problem.x_dtype)
        cubin, self.log = compile_cubin(engine, source, target, options)
        self.function = Function(engine, cubin, "first_layer", self.layer.shared_bytes)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The weight by `in_slices`, and the bias."""
        weight = constants[0].detach()
        weight = in_slices(round_tf32(weight) if weight.dtype == torch.float32 else weight, self.layer)
        return (weight, *(bias.detach().contiguous() for bias in constants[1:]))

    def accept_slice(self, result: int, pitch: int, offset: int) -> bool:
        """Whether pixels and the slice start at multiples of 16 bytes."""
        return fits_tma(TORCH_DTYPE[self.problem.y_dtype], pitch, offset)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Launch the kernel; an empty batch needs none."""
        del workspace
        if not self.problem.n:
            return
        x, y, _ = checked(buffers, residual=False, slices=True)
        bias = buffers.constants[1] if self.problem.epilogue.bias else None
        arguments = [
            pointer(x), pointer(buffers.constants[0]), pointer(y), pointer(bias), ctypes.c_int(pitch_of(y))
        ]  # fmt: skip
        grid, threads = self.problem.n * self.layer.tiles, 128 * self.layer.form.warpgroups
        self.function.launch(x.device.index or 0, grid, threads, arguments, dependent=True)


class FirstLayerEngine(TiledKernelEngine[FirstLayerTile]):
    """Overlapping windows in shared memory, and a max-pooling in registers; see `first_layer.cu`."""

    id = "cuda.first_layer"
    devices = ("cuda",)
    writes_slices = True
    version = 1
    family = "implicit_gemm"
    trusted = False
    builds_in_threads = True
    quick_settings = 4
    tile_config = FirstLayerTile
    dtypes: ClassVar[frozenset[str]] = frozenset({"fp16", "bf16"})
    strides: ClassVar[frozenset[int]] = frozenset({2, 4})
    """Supported strides along the width."""

    def supports(self, problem: Problem, target: Target) -> Support:
        """First layers of up to 4 channels and 64 filters on Hopper, with a 3x3 max-pooling behind or none."""
        base = unpooled(problem) if isinstance(problem, ConvProblem) and problem.epilogue.pool else problem
        found = first_layer_support(base, target, MOST_CHANNELS, empty=True)
        if not found or not (found := hopper_alone(target)):
            return found
        assert isinstance(problem, ConvProblem)
        if problem.x_dtype not in self.dtypes:
            return Support.no(f"needs {' or '.join(sorted(self.dtypes, reverse=True))}, got {problem.x_dtype}")
        if problem.epilogue.residual:
            return Support.no("adds no residual")
        if problem.stride_w not in self.strides:
            words = " or ".join(map(str, sorted(self.strides)))
            return Support.no(f"needs a stride of {words} along the width, got {problem.stride_w}")
        if problem.k > FILTERS or problem.k % 8:
            return Support.no(f"needs at most {FILTERS} filters, a multiple of 8, got {problem.k}")
        pool = problem.epilogue.pool
        if problem.q > MOST_COLUMNS[pool is not None]:
            return Support.no(f"computes rows of at most {MOST_COLUMNS[pool is not None]} results, got {problem.q}")
        if pool is not None:
            sizes = (pool.kind, pool.window_h, pool.window_w, pool.stride_h, pool.stride_w)
            if sizes != ("max", 3, 3, 2, 2) or pool.pad_h != pool.pad_w:
                return Support.no(f"pools by the largest of 3x3 with stride 2 and one padding, got {pool}")
            if problem.epilogue.activation not in _MONOTONE:
                return Support.no(f"pools behind {', '.join(_MONOTONE)}, got {problem.epilogue.activation}")
        if not Layer(problem, FirstLayerTile(1, 1)).fits:
            return Support.no("the weight and the image rows of one output row do not fit into shared memory")
        return Support.yes()

    def tile_configs(self, problem: ConvProblem, units: int) -> Sequence[FirstLayerTile]:
        """Configurations that fit, by rising estimate."""
        return sorted(forms(problem), key=lambda form: Layer(problem, form).guess_us(units))

    def estimate_tile_us(self, problem: ConvProblem, form: FirstLayerTile, units: int) -> float:
        """See `Layer.guess_us`."""
        return Layer(problem, form).guess_us(units)

    def build_tile(self, problem: ConvProblem, form: FirstLayerTile, target: Target) -> Executable:
        """Compile one configuration; needs no GPU."""
        return FirstLayerExecutable(self.id, problem, form, target)


ENGINE = FirstLayerEngine()
