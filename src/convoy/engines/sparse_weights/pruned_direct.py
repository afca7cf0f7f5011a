"""pruned.direct: direct sparse convolution with positions as data, on all of a GPU even for few pixels (`hopper/direct.cu`).

    y = activation(conv(x, weight) + bias + residual)    -->    for each filter: sum of value * staged[offset + position]

See Park et al. ("Faster CNNs with Direct Sparse Convolutions and Guided Pruning", ICLR 2017, arXiv 1608.01409) and Escoin
(Chen, arXiv 1802.10280). A multiprocessor must fetch the code of `pruned.cuda`, which differs by mask; here the code is the
same for every mask of a shape, and compiled in less than a second. As in `pruned.cuda`, zeros of the mask are not read,
values may change under one mask, and `pack` refuses a weight with a value where the mask has none. See
docs/kernels/sparse-weights.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from convoy.engines.base import Buffers, Engine, Executable, Knobs, Packed
from convoy.engines.hopper.nvrtc_kernel import Function, absence, compile_cubin, pointer
from convoy.engines.hopper.nvrtc_source import kernel_source, nvrtc_options
from convoy.engines.sparse_weights.codegen.lower_mask import positions
from convoy.engines.sparse_weights.direct_sparse_cost import estimate_us, fits, tile_configs
from convoy.engines.sparse_weights.direct_sparse_entries import entries_of
from convoy.engines.sparse_weights.direct_sparse_tile import (
    FLAT,
    FOURS,
    MOST_PHASES,
    MOST_STRIDE,
    DirectGeometry,
    DirectTile,
    starts_of_phases,
    tile_config_of,
)
from convoy.engines.sparse_weights.generated_tile import block_bytes
from convoy.engines.sparse_weights.mask_check import check_zeros
from convoy.engines.sparse_weights.mask_support_checks import cuda_convolution
from convoy.errors import LaunchError
from convoy.problem import ConvProblem, Problem
from convoy.support import Support
from convoy.target import Target
from convoy.typed_torch import from_numpy

_INDEX_LIMIT: Final = 2**31
_ALIGNED: Final = 16


class DirectConvolution(Executable):
    """One problem's kernel, and its mask's entries."""

    def __init__(self, problem: ConvProblem, config: DirectTile, target: Target) -> None:
        assert problem.mask is not None
        self.geometry, self._epilogue = DirectGeometry(problem, config), problem.epilogue
        mask = positions(problem.mask)
        entries = entries_of(mask, self.geometry)
        self._mask = from_numpy(mask)
        self._words, self._begins, self._values, self._places = (
            from_numpy(a) for a in (entries.words, entries.begins, entries.values, entries.places)
        )
        cubin, self.log = _compiled(self.geometry, target)
        self.function = Function(
            PrunedDirect.id, cubin, "direct", self.geometry.asked(entries.most, block_bytes(target))
        )
        self._dependent = target.capability >= 90
        self._aligned = self.geometry.copy in (FLAT, FOURS)
        self.workspace_bytes = 0

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Lists with values in their places, where each begins, and the bias in fp32."""
        weight = constants[0].detach()
        check_zeros(weight, self._mask)
        device = weight.device
        words = self._words.to(device, copy=True)
        values = weight.reshape(-1)[self._places.to(device)].float()
        words[self._values.to(device)] = values.view(torch.int32)
        return words, self._begins.to(device), *(c.detach().float().contiguous() for c in constants[1:])

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One kernel, on the current stream."""
        words, begins, *bias = buffers.constants
        x, y, config = buffers.args[0], buffers.results[0], self.geometry.config
        if self._aligned and x.data_ptr() % _ALIGNED:
            raise LaunchError(f"{PrunedDirect.id}: x lies at {x.data_ptr():#x}, and is read {_ALIGNED} bytes at once")
        arguments = [
            pointer(x), pointer(words), pointer(begins), pointer(bias[0] if self._epilogue.bias else None),
            pointer(buffers.args[1] if self._epilogue.residual else None), pointer(y),
        ]  # fmt: skip
        self.function.launch(
            x.device.index or 0,
            self.geometry.grid,
            config.threads,
            arguments,
            cluster=config.slices,
            dependent=self._dependent,
        )


def _compiled(geometry: DirectGeometry, target: Target) -> tuple[bytes, str]:
    """A cubin and its log."""
    problem = geometry.problem
    options = nvrtc_options(problem.epilogue.activation, problem.x_dtype)
    return compile_cubin(PrunedDirect.id, kernel_source("direct", geometry.parameters()), target, options)


class PrunedDirect(Engine):
    """Offsets and values as data; see `cuda/direct.cu`."""

    id = "pruned.direct"
    family = "direct"
    devices = ("cuda",)
    trusted = False
    reads_mask = True
    quick_settings = 6

    def supports(self, problem: Problem, target: Target) -> Support:
        """Forward convolutions in nchw, fp32 and fp16, whose mask is there."""
        if not (support := cuda_convolution(problem, target)):
            return support
        assert isinstance(problem, ConvProblem)
        largest = max(s.elements for s in (problem.x_spec, problem.weight_spec, problem.y_spec))
        if 2 * largest >= _INDEX_LIMIT:
            return Support.no(f"indexes tensors of fewer than 2^30 elements, got {largest}")
        most = max(map(len, starts_of_phases(problem)))
        if most > MOST_PHASES or max(problem.stride_h, problem.stride_w) > MOST_STRIDE:
            return Support.no(f"needs at most {MOST_PHASES} phases of the stride, got {most}")
        if absence():
            return Support.no(absence())
        if not fits(problem, target):
            return Support.no("needs one filter's entries and its channels' part of a tile in shared memory")
        return Support.yes()

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Positions of a lane (`vectors`), `filters` of a block and of `each` warp; `slices` and `parts` of channels.

        What a model of the kernel thinks fastest, best first; see `direct_form` and `direct_model`.
        """
        assert isinstance(problem, ConvProblem)
        return [config.knobs for config in tile_configs(problem, target)]

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float | None:
        """The cost model's estimate."""
        assert isinstance(problem, ConvProblem)
        return estimate_us(problem, tile_config_of(knobs), target)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile; no GPU is needed."""
        assert isinstance(problem, ConvProblem)
        return DirectConvolution(problem, tile_config_of(knobs), target)


ENGINE = PrunedDirect()
