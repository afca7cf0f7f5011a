"""pruned.sparse24: convolutions whose weights are 2:4 sparse, on Hopper's sparse tensor cores (docs/kernels/sparse24.md).

    y = activation(conv(x, weight) + bias + residual)    -->    half the products, 0.56 of the weight's bytes

A mask will do where of every four neighbouring channels at most two have values, for each filter and tap. Values may change under
one mask; a value where the mask has none is refused when weights are packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch

from convoy.engines.base import Buffers, Executable, Packed
from convoy.engines.cuda.compiled import Function, absence, compile_cubin, pointer, structure
from convoy.engines.cuda.maps import PixelMap
from convoy.engines.cuda.source import masked_source, options
from convoy.engines.formed import FormedEngine
from convoy.engines.pruned.pairs import Packing, crowded
from convoy.engines.pruned.requirements import hopper_convolution
from convoy.engines.pruned.sparse24_form import Form
from convoy.engines.pruned.sparse24_forms import estimate_us, forms
from convoy.engines.pruned.sparse24_maps import pixel_map, result_map
from convoy.engines.pruned.values import check_zeros
from convoy.engines.pruned.walk import positions
from convoy.engines.triton.tensors import checked, fits_tma, pitch_of
from convoy.errors import InputError
from convoy.problem import ConvProblem, Problem, WeightMask
from convoy.support import Support
from convoy.target import Target

_TORCH: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}


@lru_cache(maxsize=256)
def _crowded(mask: WeightMask) -> int:
    return crowded(positions(mask))


class SparseExecutable(Executable):
    """One form for one problem."""

    def __init__(self, problem: ConvProblem, form: Form, target: Target) -> None:
        assert problem.mask is not None
        if not form.fits(problem):
            raise InputError(
                "knobs", str(form.knobs), f"a halo only where it fits: 3x3, stride 1, padding 1; got {problem}"
            )
        self.problem, self.form, self.units = problem, form, target.units
        text = masked_source("sparse24", form.macros(problem), problem.x_dtype, sparse=True)
        chosen = options(problem.epilogue.activation, problem.x_dtype)
        cubin, self.log = compile_cubin(Sparse24Engine.id, text, target, chosen)
        self.function = Function(Sparse24Engine.id, cubin, "sparse24", form.shared_bytes)
        self.pixel_map = pixel_map(problem, form)
        mask = positions(problem.mask)
        self._mask = torch.from_numpy(mask)
        self.packing = Packing(mask, form.filters, form.cluster, taps_first=form.halo > 0)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Values and metadata in the order in which they are copied; the bias as it is."""
        weight = constants[0].detach()
        check_zeros(weight, self._mask)
        return (self.packing.pack(weight), *(bias.detach().contiguous() for bias in constants[1:]))

    def accept_slice(self, result: int, pitch: int, offset: int) -> bool:
        """Where the slice keeps to sixteen bytes."""
        return fits_tma(_TORCH[self.problem.y_dtype], pitch, offset)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One launch."""
        del workspace
        problem, form = self.problem, self.form
        x, y, residual = checked(buffers, problem.epilogue.residual, slices=True)
        weight, bias = buffers.constants[0], buffers.constants[1] if problem.epilogue.bias else None
        arguments = [
            self.pixel_map.encode(problem.x_dtype, x), pointer(weight), pointer(y), pointer(residual), pointer(bias),
            structure("Sizes", form.sizes(problem, pitch_of(y))),
        ]  # fmt: skip
        if form.staged:
            arguments += [
                result_map(problem, form, pitch_of(y)).encode(problem.y_dtype, y),
                result_map(problem, form, problem.k).encode(problem.y_dtype, y if residual is None else residual),
            ]
        device, threads, size = x.device.index or 0, 128 * (form.consumers + 1), form.cluster * form.split
        clusters = form.units(problem)
        if form.split == 1 and form.staged < 2:  # otherwise sums or results have room for one tile
            clusters = min(clusters, self.function.clusters(device, threads, size))
        self.function.launch(device, clusters * size, threads, arguments, cluster=size, dependent=True)


class Sparse24Engine(FormedEngine[Form]):
    """Sparse products of compressed weights; see `cuda/sparse24.cu`."""

    id = "pruned.sparse24"
    version = 3
    quick_settings = 32
    """All of a space: half of these are tried before any is taken for the best."""

    family = "implicit_gemm"
    trusted = False
    reads_mask = True
    form = Form

    def supports(self, problem: Problem, target: Target) -> Support:
        """Forward convolutions on Hopper in fp16 or bf16 and NHWC, c and k multiples of 8, whose mask is 2:4 along c."""
        if not (support := hopper_convolution(problem, target)):
            return support
        assert isinstance(problem, ConvProblem)
        assert problem.mask is not None
        if not PixelMap.of(problem, 64).fits(problem):
            return Support.no("needs padding and filter under 128, and strides up to 8")
        if found := _crowded(problem.mask):
            return Support.no(f"needs at most two values in every four channels, got more in {found} fours")
        return Support.no(absence()) if absence() else Support.yes()

    def forms(self, problem: ConvProblem, units: int) -> Sequence[Form]:
        """See the function of this name."""
        return forms(problem, units)

    def guess_us(self, problem: ConvProblem, form: Form, units: int) -> float:
        """See `estimate_us` above."""
        return estimate_us(problem, form, units)

    def executable(self, problem: ConvProblem, form: Form, target: Target) -> Executable:
        """Compile one form; no GPU is needed."""
        return SparseExecutable(problem, form, target)


ENGINE = Sparse24Engine()
