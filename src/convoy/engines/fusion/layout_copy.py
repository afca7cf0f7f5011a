"""cuda.layout: copies between nchw and nhwc, turned in registers or shared memory (layout_copy.cuh; docs/kernels/fusion.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from convoy.engines.base import Buffers, Engine, Executable
from convoy.engines.fusion.fusion import LEAST_CAPABILITY
from convoy.engines.fusion.kernel_code import HEADERS, header_text
from convoy.engines.fusion.lowering import INDEX_LIMIT
from convoy.engines.fusion.stages import UNITS
from convoy.engines.hopper.nvrtc_kernel import Function, absence, compile_cubin, pointer
from convoy.engines.hopper.nvrtc_source import CudaSource, defines
from convoy.engines.subgraph import torch_format
from convoy.errors import LaunchError
from convoy.problem import DTYPE_BYTES, Knobs, LayoutProblem, Problem, TensorSpec, kind_in_words
from convoy.support import Support
from convoy.target import Target

FEW_CHANNELS: Final = 8
"""Channels up to which a thread has all of some pixels."""

TILE: Final = 64
_THREADS: Final = {True: 128, False: 256}
_TYPES: Final = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}
_LAUNCH_US, _BYTES_US = 1.5, 1.6e6


@dataclass(frozen=True, slots=True)
class CopyCode:
    """The kernel of one copy: its source, the threads of a block, and the blocks."""

    source: CudaSource
    threads: int
    blocks: int


def copy_code(problem: LayoutProblem) -> CopyCode:
    """The kernel of a copy."""
    n, c, h, w = problem.spec.shape
    few, size = c <= FEW_CHANNELS, DTYPE_BYTES[problem.spec.dtype]
    width = next(each for each in (16, 8, 4, 2, 1) if each * size <= 16 and h * w % each == 0)
    threads = _THREADS[few]
    values = {
        "IMAGES": n, "CHANNELS": c, "PIXELS": h * w, "TO_NHWC": int(problem.layout == "nhwc"), "FEW": int(few),
        "WIDTH": width, "TILE": TILE, "THREADS": threads,
    }  # fmt: skip
    text = "".join(f"#include <{name}>\n" for name in HEADERS)  # before the macros, whose names they use
    text += f"{defines(values)}typedef {_TYPES[size]} Value;\n#include <layout_copy.cuh>\n"
    headers = tuple((name, header_text(name)) for name in (*HEADERS, "layout_copy.cuh"))
    groups = -(-n * h * w // width // threads)
    blocks = groups if few else n * -(-c // TILE) * -(-h * w // TILE)
    return CopyCode(CudaSource("layout_copy.cu", text, headers), threads, blocks)


class LayoutCopyExecutable(Executable):
    """The kernel of one copy."""

    def __init__(self, engine: str, problem: LayoutProblem, target: Target) -> None:
        self._engine = engine
        self._formats = [torch_format(layout, 4) for layout in (problem.source, problem.layout)]
        self._dependent = target.capability >= 90
        self.code = copy_code(problem)
        cubin, self.log = compile_cubin(engine, self.code.source, target)
        self.function = Function(engine, cubin, "layout_copy", shared_bytes=0)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One launch."""
        del workspace
        y = buffers.results[0]
        if y is None:
            raise LaunchError(f"{self._engine}: no tensor was given to write to")
        for tensor, layout in zip((buffers.args[0], y), self._formats, strict=True):
            if not tensor.is_contiguous(memory_format=layout) or tensor.data_ptr() % 16:
                raise LaunchError(
                    f"{self._engine}: strides {tuple(tensor.stride())} are not dense, or not 16-byte aligned"
                )
        arguments = [pointer(buffers.args[0]), pointer(y)]
        device = y.device.index or 0
        self.function.launch(device, self.code.blocks, self.code.threads, arguments, dependent=self._dependent)


class LayoutCopyEngine(Engine):
    """Copies of values of 1, 2, 4 and 8 bytes."""

    id = "cuda.layout"
    family = "direct"
    devices = ("cuda",)
    trusted = False
    fuses_subgraphs = True
    builds_in_threads = True

    def supports(self, problem: Problem, target: Target) -> Support:
        """Copies between nchw and nhwc, on capability 8.0 and newer."""
        if not isinstance(problem, LayoutProblem):
            return Support.no(f"copies between memory formats, got {kind_in_words(problem)}")
        if target.capability < LEAST_CAPABILITY:
            return Support.no(f"needs a CUDA device of capability 8.0 or newer, got {target.name}")
        if {problem.source, problem.layout} != {"nchw", "nhwc"}:
            return Support.no(f"copies between nchw and nhwc, got {problem.source} to {problem.layout}")
        if not 0 < problem.spec.elements < INDEX_LIMIT:
            return Support.no(f"needs tensors of 1 to 2^31 - 1 elements, got {problem.spec.elements}")
        reason = absence()
        return Support.no(reason) if reason else Support.yes()

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float | None:
        """A launch and a pass over memory."""
        del knobs
        return _LAUNCH_US + problem.bytes_min / (_BYTES_US * max(target.units, 1) / UNITS)

    def samples(self) -> Sequence[Problem]:
        """An image in fp16."""
        return (LayoutProblem(TensorSpec((1, 3, 224, 224), "fp16"), "nchw", "nhwc"),)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile; needs no GPU."""
        del knobs
        assert isinstance(problem, LayoutProblem)
        return LayoutCopyExecutable(self.id, problem, target)


ENGINE = LayoutCopyEngine()
