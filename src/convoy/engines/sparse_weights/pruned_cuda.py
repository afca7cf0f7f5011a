"""pruned.cuda: convolutions on pruned weights by CUDA code made for their mask, compiled by NVRTC.

    y = activation(conv(x, weight) + bias + residual)    -->    one kernel, one FFMA a non-zero weight and pixel

As in `pruned.c`, zeros of the mask are not read, values may change under one mask, and `pack` refuses a weight with a value
where the mask has none. Building needs no GPU; binaries are kept in the user's cache. See docs/kernels/sparse-weights.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from convoy.engines.activations import finish
from convoy.engines.base import Buffers, Engine, Executable, Knobs, Packed
from convoy.engines.hopper.nvrtc_kernel import Function, absence, pointer
from convoy.engines.sparse_weights.codegen.cuda_writer import ELEMENT
from convoy.engines.sparse_weights.codegen.emit_cuda import ACTIVATIONS, GeneratedCuda, emit
from convoy.engines.sparse_weights.codegen.kernel_ir import MaskKernel, verify
from convoy.engines.sparse_weights.codegen.link_cubins import compile_units, unlinked
from convoy.engines.sparse_weights.codegen.lower_mask import Cut, positions, walk
from convoy.engines.sparse_weights.codegen.plane_layout import PlaneLayout
from convoy.engines.sparse_weights.generated_tile import GeneratedTile, template
from convoy.engines.sparse_weights.generated_tile_cost import estimate_us
from convoy.engines.sparse_weights.generated_tile_space import tile_config_of, tile_configs
from convoy.engines.sparse_weights.mask_check import check_zeros
from convoy.engines.sparse_weights.mask_support_checks import cuda_convolution
from convoy.errors import LaunchError
from convoy.problem import ConvProblem, Problem
from convoy.support import Support
from convoy.target import Target
from convoy.typed_torch import from_numpy

MOST_NONZEROS: Final = 150_000
"""16 cores compile 105 000 in 5 s, 210 000 and more in 10 to 18 (commit 60bf1b2), and `pruned.direct` is several times as fast on
such layers."""

UNLINKED_NONZEROS: Final = 8_000
"""Non-zeros, at most, if units cannot be linked: one core then compiles everything."""

_INDEX_LIMIT: Final = 2**31


@dataclass(frozen=True, slots=True)
class Written:
    """The code of a problem with one tile configuration, before it is compiled."""

    layout: PlaneLayout
    kernel: MaskKernel
    places: NDArray[np.int64]
    source: GeneratedCuda


def write(problem: ConvProblem, config: GeneratedTile, values: Sequence[float] | None = None) -> Written:
    """The code of a problem.

    Args:
        problem: a convolution that `PrunedCuda` supports.
        config: the tile configuration.
        values: the weight, flattened, to make immediates of; None: values are data.
    """
    assert problem.mask is not None
    layout = template(problem, config)
    cut = Cut(config.filters, config.channels, config.code_bytes, staged=True, splits=config.splits)
    kernel, places = walk(positions(problem.mask), layout, config.lanes, cut)
    verify(kernel, problem.k)
    epilogue = problem.epilogue
    order: list[int] = places.tolist()
    immediates = None if values is None else [values[place] for place in order]
    source = emit(
        kernel, layout, bias=epilogue.bias, residual=epilogue.residual, activation=_fused(problem),
        shared_bytes=config.shared_bytes, values=immediates,
    )  # fmt: skip
    return Written(layout, kernel, places, source)


def _fused(problem: ConvProblem) -> str:
    activation = problem.epilogue.activation
    return activation if activation in ACTIVATIONS else "none"


class PrunedCudaExecutable(Executable):
    """One problem's kernel."""

    def __init__(self, problem: ConvProblem, config: GeneratedTile, target: Target) -> None:
        assert problem.mask is not None
        written = write(problem, config)
        source = written.source
        self._epilogue = problem.epilogue
        self._following = "none" if _fused(problem) == problem.epilogue.activation else problem.epilogue.activation
        self._mask = from_numpy(positions(problem.mask))
        packed = np.array(source.packed, np.int64)
        last = problem.weight_spec.elements  # a zero is put behind the weight
        held = np.append(written.places, last)[packed] if len(packed) else np.full(1, last)
        self._places = from_numpy(held)
        self._aligned = source.aligned
        self._bytes = config.vectors * ELEMENT[problem.x_dtype][1]
        self._dependent = target.capability >= 90
        self._blocks, self._threads = source.blocks, source.threads
        cubin = compile_units(
            PrunedCuda.id, source.head, source.bodies, target, (f"--maxrregcount={config.registers}",)
        )
        self._function = Function(PrunedCuda.id, cubin, source.name, source.shared_bytes)
        self.workspace_bytes = 0

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Values in fp32 in the order of use, every step's padded; then the bias in fp32."""
        weight = constants[0].detach()
        check_zeros(weight, self._mask)
        flat = torch.cat([weight.reshape(-1).float(), weight.new_zeros(1, dtype=torch.float32)])
        return flat[self._places.to(weight.device)], *(c.detach().float().contiguous() for c in constants[1:])

    def resident_bytes(self, constants: Packed) -> int:
        """Values and bias, and the code itself, which is ten times as large."""
        return super().resident_bytes(constants) + len(self._function.cubin)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One kernel, on the current stream."""
        values, *bias = buffers.constants
        x, y, epilogue = buffers.args[0], buffers.results[0], self._epilogue
        assert y is not None
        if y.data_ptr() % self._bytes:
            raise LaunchError(
                f"{PrunedCuda.id}: y lies at {y.data_ptr():#x}, and is written {self._bytes} bytes at once"
            )
        if x.data_ptr() % self._aligned:
            raise LaunchError(
                f"{PrunedCuda.id}: x lies at {x.data_ptr():#x}, and is read {self._aligned} bytes at once"
            )
        arguments = (
            pointer(x), pointer(values), pointer(bias[0] if epilogue.bias else None),
            pointer(buffers.args[1] if epilogue.residual else None), pointer(y),
        )  # fmt: skip
        device = x.device.index or 0
        self._function.launch(device, self._blocks, self._threads, arguments, dependent=self._dependent)
        if self._following != "none":
            finish(y, None, None, self._following)


class PrunedCuda(Engine):
    """Specialised CUDA C for forward convolutions in fp32 and fp16, nchw."""

    id = "pruned.cuda"
    devices = ("cuda",)
    version = 4
    family = "direct"
    trusted = False
    reads_mask = True
    quick_settings = 6

    def supports(self, problem: Problem, target: Target) -> Support:
        """Forward convolutions in nchw whose mask is there and not too large."""
        if not (support := cuda_convolution(problem, target)):
            return support
        assert isinstance(problem, ConvProblem)
        assert problem.mask is not None
        largest = max(s.elements for s in (problem.x_spec, problem.weight_spec, problem.y_spec))
        if 2 * largest >= _INDEX_LIMIT:
            return Support.no(f"indexes tensors of fewer than 2^30 elements, got {largest}")
        nonzeros = problem.mask.nonzeros
        if nonzeros > MOST_NONZEROS:
            return Support.no(f"writes code for at most {MOST_NONZEROS} non-zero weights, got {nonzeros}")
        if absence():
            return Support.no(absence())
        if nonzeros > UNLINKED_NONZEROS and unlinked():
            return Support.no(f"{unlinked()}, for {nonzeros} non-zero weights")
        if not tile_configs(problem, target):
            return Support.no("needs shared memory for two stages of one input channel")
        return Support.yes()

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Threads along a tile (`lanes`), pixels of a thread (`vectors`), `filters` of a group, `splits` of its taps.

        What a model of the kernel thinks fastest, best first; see `cuda_model`.
        """
        assert isinstance(problem, ConvProblem)
        return [config.knobs for config in tile_configs(problem, target)]

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float | None:
        """The cost model's estimate."""
        assert isinstance(problem, ConvProblem)
        return estimate_us(problem, tile_config_of(problem, knobs, target), target)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Write the code and compile it; no GPU is needed."""
        assert isinstance(problem, ConvProblem)
        return PrunedCudaExecutable(problem, tile_config_of(problem, knobs, target), target)


ENGINE = PrunedCuda()
