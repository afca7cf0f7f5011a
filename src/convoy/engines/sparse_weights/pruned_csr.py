"""pruned.csr: direct convolution over weights in compressed sparse rows with stored index arrays (`hopper/csr.cu`).

    y = activation(conv(x, weight) + bias + residual)    -->    pad; then for each filter: sum of value * padded[place +
    offset]

See Escoin (Chen, arXiv 1802.10280). It is the reference for generated code: it takes the same masks, however many non-zeros
they have. As in `pruned.cuda`, zeros of the mask are not read, and `pack` refuses a weight with a value where the mask has
none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from convoy.engines.base import Buffers, Engine, Executable, Knobs, Packed
from convoy.engines.gpu.device_tensors import scratch
from convoy.engines.hopper.nvrtc_kernel import Function, absence, compile_cubin, pointer, structure
from convoy.engines.hopper.nvrtc_source import ACTIVATIONS, kernel_source
from convoy.engines.sparse_weights.codegen.lower_mask import positions
from convoy.engines.sparse_weights.mask_check import check_zeros
from convoy.engines.sparse_weights.mask_support_checks import cuda_convolution
from convoy.problem import ConvProblem, Problem
from convoy.support import Support
from convoy.target import Target
from convoy.typed_torch import from_numpy

THREADS: Final = 128
_BYTES: Final = {"fp32": 4, "fp16": 2}
_INDEX_LIMIT: Final = 2**31


def padded(problem: ConvProblem) -> tuple[int, int]:
    """Height and width of a padded image."""
    return problem.h + 2 * problem.pad_h, problem.w + 2 * problem.pad_w


def sizes(problem: ConvProblem) -> dict[str, int]:
    """The kernels' run-time sizes, in the order of their structure."""
    height, width = padded(problem)
    return {
        "pixels": problem.n * problem.p * problem.q, "k": problem.k, "q": problem.q, "pq": problem.p * problem.q,
        "c": problem.c, "h": problem.h, "w": problem.w, "pad_h": problem.pad_h, "pad_w": problem.pad_w,
        "padded_h": height, "padded_w": width, "stride_h": problem.stride_h, "stride_w": problem.stride_w,
        "planes": problem.n * problem.c * height * width,
    }  # fmt: skip


def parameters(problem: ConvProblem, knobs: Knobs) -> dict[str, int]:
    """The values of `csr_config.cuh`."""
    epilogue = problem.epilogue
    return {
        "HALF": int(problem.x_dtype == "fp16"), "THREADS": THREADS, "PIXELS": knobs.integer("pixels"),
        "HAS_BIAS": int(epilogue.bias), "HAS_RESIDUAL": int(epilogue.residual),
        "ACTIVATION": ACTIVATIONS.index(epilogue.activation),
    }  # fmt: skip


class Rows:
    """A mask in compressed sparse rows.

    Attributes:
        starts: int32 [k + 1], each filter's first entry and the end.
        offsets: int32, each entry's input from a pixel's first one on, in the padded image.
        places: int64, each entry's value in the weight, flattened.
    """

    def __init__(self, problem: ConvProblem) -> None:
        assert problem.mask is not None
        mask = positions(problem.mask)
        height, width = padded(problem)
        filters, channel, r, s = np.nonzero(mask)
        channel += filters // (problem.k // problem.groups) * (problem.c // problem.groups)
        offsets = (channel * height + r * problem.dilation_h) * width + s * problem.dilation_w
        counts = mask.sum(axis=(1, 2, 3))
        self.starts = from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
        self.offsets = from_numpy(offsets.astype(np.int32))
        self.places = from_numpy(np.flatnonzero(mask))

    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Starts, and entries int32 [entries, 2]: an offset, and the bits of a value in fp32."""
        device = weight.device
        values = weight.contiguous().view(-1)[self.places.to(device)].float().view(torch.int32)
        return self.starts.to(device), torch.stack([self.offsets.to(device), values], dim=1).contiguous()


class RowsExecutable(Executable):
    """Both kernels for one problem."""

    def __init__(self, problem: ConvProblem, knobs: Knobs, target: Target) -> None:
        assert problem.mask is not None
        self.problem, self.pixels = problem, knobs.integer("pixels")
        cubin, self.log = compile_cubin(PrunedCsr.id, kernel_source("csr", parameters(problem, knobs)), target)
        self._pad, self._multiply = (Function(PrunedCsr.id, cubin, name, 0) for name in ("pad", "csr"))
        self._mask = from_numpy(positions(problem.mask))
        self._rows = Rows(problem)
        self._sizes = structure("Sizes", sizes(problem))
        self.workspace_bytes = workspace_bytes(problem)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Starts, entries, and the bias as it is."""
        weight = constants[0].detach()
        check_zeros(weight, self._mask)
        return (*self._rows.pack(weight), *(bias.detach().contiguous() for bias in constants[1:]))

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Pad, where there is padding; then multiply."""
        problem, epilogue = self.problem, self.problem.epilogue
        starts, entries, *bias = buffers.constants
        x, y = buffers.args[0], buffers.results[0]
        device = x.device.index or 0
        copied = scratch(workspace, self.workspace_bytes)
        planes = x if copied is None else copied
        if copied is not None:
            blocks = -(-problem.n * problem.c * padded(problem)[0] * padded(problem)[1] // THREADS)
            self._pad.launch(device, blocks, THREADS, [pointer(x), pointer(planes), self._sizes])
        blocks = -(-problem.n * problem.p * problem.q // (THREADS * self.pixels)) * problem.k
        arguments = [
            pointer(planes), pointer(starts), pointer(entries), pointer(bias[0] if epilogue.bias else None),
            pointer(buffers.args[1] if epilogue.residual else None), pointer(y), self._sizes,
        ]  # fmt: skip
        self._multiply.launch(device, blocks, THREADS, arguments)


def workspace_bytes(problem: ConvProblem) -> int:
    """The padded input; none where nothing is padded."""
    if not problem.pad_h and not problem.pad_w:
        return 0
    return -(-_BYTES[problem.x_dtype] * sizes(problem)["planes"] // 256) * 256


class PrunedCsr(Engine):
    """Index arrays; see `hopper/csr.cu`."""

    id = "pruned.csr"
    family = "direct"
    devices = ("cuda",)
    offered_by_default = False
    trusted = False
    reads_mask = True

    def supports(self, problem: Problem, target: Target) -> Support:
        """Forward convolutions in nchw, fp32 and fp16, whose mask is there."""
        if not (support := cuda_convolution(problem, target)):
            return support
        assert isinstance(problem, ConvProblem)
        largest = max(sizes(problem)["planes"], problem.y_spec.elements)
        if largest >= _INDEX_LIMIT:
            return Support.no(f"indexes tensors of fewer than 2^31 elements, got {largest}")
        return Support.no(absence()) if absence() else Support.yes()

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """`pixels` of a thread: as many as leave each multiprocessor a few blocks."""
        assert isinstance(problem, ConvProblem)
        pixels = problem.n * problem.p * problem.q
        most = pixels * problem.k / (THREADS * 4 * target.units)
        return [Knobs.of(pixels=count) for count in (4, 2, 1) if count <= max(most, 1)]

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """The padded input."""
        assert isinstance(problem, ConvProblem)
        return workspace_bytes(problem)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile; no GPU is needed."""
        assert isinstance(problem, ConvProblem)
        return RowsExecutable(problem, knobs, target)


ENGINE = PrunedCsr()
