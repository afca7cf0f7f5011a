"""pruned.c: convolutions on pruned weights by C code made for their mask, compiled by the host's compiler.

    y = activation(conv(x, weight) + bias + residual)    -->    one multiply-add a non-zero weight and vector of pixels

Weights that are zero in the mask are not read: where x is infinite or not a number, a dense convolution has a NaN and this has
none. Values may change under one mask, and use the same code; a value where the mask has none is refused when weights are
packed. Measurements and limits are in docs/kernels/sparse-weights.md.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from convoy.engines.activations import finish
from convoy.engines.base import Buffers, Engine, Executable, Knobs, Packed
from convoy.engines.compilers import host_compiler
from convoy.engines.cpu.native_launch import address
from convoy.engines.sparse_weights.codegen.cpu_blocking import LANES, REGISTERS, plan, write
from convoy.engines.sparse_weights.codegen.emit_c import FUSED, emit
from convoy.engines.sparse_weights.codegen.lower_mask import positions
from convoy.engines.sparse_weights.mask_check import check_zeros
from convoy.engines.sparse_weights.mask_support_checks import masked_convolution
from convoy.problem import ConvProblem, Problem
from convoy.support import Support
from convoy.target import Target
from convoy.typed_torch import from_numpy

MOST_NONZEROS: Final = 750_000
"""Code of 11 MB (15 bytes a non-zero), and 10 s of one core to write and assemble it. So much code comes from the last cache in
every launch: 512 filters of 3x3 over 512 channels of 7x7, on an EPYC of 2022, are 5 times as fast as dense with 236 thousand
non-zeros, twice with 708 thousand, and no faster with 1.2 million."""

MANY_NONZEROS: Final = 150_000
"""From here on one vector is tried alone: with two, code is twice as large."""

SMALL_COST: Final = 8_000
"""Multiply-adds of vectors that are worth a thread: 3 us of a core, about the cost of waking another thread."""

FLAGS: Final = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    "-Werror",
)


class PrunedCExecutable(Executable):
    """One problem's compiled code."""

    def __init__(self, problem: ConvProblem, knobs: Knobs, target: Target) -> None:
        assert problem.mask is not None
        mask = positions(problem.mask)
        made = plan(problem, mask, knobs)
        kernel, places = write(problem, mask, made)
        epilogue = problem.epilogue
        fused = epilogue.activation if epilogue.activation in FUSED else "none"
        arch = target.arch if sys.platform == "linux" else ""
        source = emit(kernel, made.layout, bias=epilogue.bias, residual=epilogue.residual, activation=fused, arch=arch)
        self._following = "none" if fused == epilogue.activation else epilogue.activation
        self._places = from_numpy(places)
        self._mask = from_numpy(mask)
        self._epilogue = epilogue
        self._threads = max(1, min(knobs.integer("threads"), source.cost // SMALL_COST))
        self.workspace_bytes = made.thread_bytes * knobs.integer("threads")
        library = _library(source.units)
        self._code_bytes = library.stat().st_size
        self._run = _function(library)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The values in the order of the code, then the bias.

        Raises:
            InputError: the weight has a value where the mask has none.
        """
        weight = constants[0].detach()
        check_zeros(weight, self._mask)
        values = weight.contiguous().view(-1)[self._places].contiguous()
        return values, *(constant.detach().contiguous() for constant in constants[1:])

    def resident_bytes(self, constants: Packed) -> int:
        """Values and bias, and the code itself, which is several times as large."""
        return super().resident_bytes(constants) + self._code_bytes

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Pad, multiply, finish: one call into the library."""
        values, *bias = buffers.constants
        y, epilogue = buffers.results[0], self._epilogue
        assert y is not None
        self._run(
            address(buffers.args[0]),
            address(values),
            address(bias[0]) if epilogue.bias else None,
            address(buffers.args[1]) if epilogue.residual else None,
            address(y),
            None if workspace is None else address(workspace),
            min(self._threads, torch.get_num_threads()),
        )
        if self._following != "none":
            finish(y, None, None, self._following)


def _library(units: Sequence[str]) -> Path:
    threads = ("-fopenmp",) if host_compiler.openmp_library() else ()
    return host_compiler.compile_shared(units, (*FLAGS, *threads), PrunedC.id)


def _function(path: Path) -> Any:
    function = host_compiler.load_shared(path).convoy_pruned
    function.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int]
    function.restype = None
    return function


class PrunedC(Engine):
    """Specialised C for forward convolutions in fp32 and nchw."""

    id = "pruned.c"
    family = "direct"
    devices = ("cpu",)
    trusted = False
    reads_mask = True

    def supports(self, problem: Problem, target: Target) -> Support:
        """Forward convolutions in fp32 and nchw whose mask is there and not too large."""
        if target.device != "cpu":
            return Support.no(f"needs a CPU, got {target.device}")
        if not (support := masked_convolution(problem)):
            return support
        assert isinstance(problem, ConvProblem)
        assert problem.mask is not None
        if problem.x_dtype != "fp32":
            return Support.no(f"needs fp32, got {problem.x_dtype}")
        if problem.layout != "nchw":
            return Support.no(f"needs layout nchw, got {problem.layout}")
        if problem.mask.nonzeros > MOST_NONZEROS:
            return Support.no(f"writes code for at most {MOST_NONZEROS} non-zero weights, got {problem.mask.nonzeros}")
        return host_compiler.compiler_support()

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """`filters` whose sums are in registers, `vectors` of pixels, `channels` of a segment."""
        assert isinstance(problem, ConvProblem)
        assert problem.mask is not None
        lanes, registers = LANES.get(target.arch, 4), REGISTERS.get(target.arch, 16)
        many = problem.mask.nonzeros > MANY_NONZEROS
        fits = [vectors for vectors in (1, 2, 4) if problem.k * vectors <= registers - 4]
        vectors = fits[-1] if fits and not many else 1
        choices = [(vectors, 32), (vectors, 64), (vectors, 128)]
        choices[1:1] = [] if many or vectors == 4 else [(2 * vectors, 32)]
        knobs = [
            Knobs.of(
                filters=min(problem.k, (registers - max(4, vectors + 2)) // vectors),
                vectors=vectors,
                channels=min(channels, max(32, problem.c)),
                lanes=lanes,
                threads=target.units,
            )
            for vectors, channels in choices
        ]
        return list(dict.fromkeys(knobs))

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        assert isinstance(problem, ConvProblem)
        assert problem.mask is not None
        return plan(problem, positions(problem.mask), knobs).thread_bytes * knobs.integer("threads")

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Write the code and compile it."""
        assert isinstance(problem, ConvProblem)
        return PrunedCExecutable(problem, knobs, target)


ENGINE = PrunedC()
