"""pruned.c: convolutions on pruned weights by C code made for their mask, compiled by the host's compiler.

    y = activation(conv(x, weight) + bias + residual)    -->    one multiply-add a non-zero weight and vector of pixels

Weights that are zero in the mask are not read: where x is infinite or not a number, a dense convolution has a NaN and this has
none. Values may change under one mask, and use the same code; a value where the mask has none is refused when weights are
packed. Measurements and limits are in docs/engines/pruned.md.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import torch

from convoy.engines import host_compiler
from convoy.engines.activations import finish
from convoy.engines.base import Buffers, Engine, Executable, Knobs, Packed
from convoy.engines.conditions import plain_convolution
from convoy.engines.pruned.blocks import LANES, REGISTERS, plan, write
from convoy.engines.pruned.emit_c import FUSED, emit
from convoy.engines.pruned.values import check_zeros
from convoy.engines.pruned.walk import positions
from convoy.problem import ConvProblem, Problem
from convoy.support import Support
from convoy.target import Target

MOST_NONZEROS: Final = 80_000
"""Code of a megabyte (14 bytes a non-zero), half the second cache, and 10 s of two cores' compiling. Above, the code is read from
memory like data, four times as many bytes as the values have: an engine that reads indices does better."""

SMALL_COST: Final = 20_000
"""Multiply-adds of vectors that are not worth a second thread: 7 us of one core."""

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


class PrunedConvolution(Executable):
    """One problem's compiled code."""

    def __init__(self, problem: ConvProblem, knobs: Knobs) -> None:
        assert problem.mask is not None
        mask = positions(problem.mask)
        made = plan(problem, mask, knobs)
        kernel, places = write(problem, mask, made)
        epilogue = problem.epilogue
        fused = epilogue.activation if epilogue.activation in FUSED else "none"
        source = emit(kernel, made.layout, bias=epilogue.bias, residual=epilogue.residual, activation=fused)
        self._following = "none" if fused == epilogue.activation else epilogue.activation
        self._places = torch.from_numpy(places)
        self._mask = torch.from_numpy(mask)
        self._epilogue = epilogue
        self._threads = max(1, min(knobs.integer("threads"), source.cost // SMALL_COST))
        self.workspace_bytes = made.thread_bytes * knobs.integer("threads")
        self._run = _function(source.units)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The values in the order of the code, then the bias.

        Raises:
            InputError: the weight has a value where the mask has none.
        """
        weight = constants[0].detach()
        check_zeros(weight, self._mask)
        values = weight.contiguous().view(-1)[self._places].contiguous()
        return values, *(constant.detach().contiguous() for constant in constants[1:])

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Pad, multiply, finish: one call into the library."""
        values, *bias = buffers.constants
        y, epilogue = buffers.results[0], self._epilogue
        assert y is not None
        self._run(
            buffers.args[0].data_ptr(),
            values.data_ptr(),
            bias[0].data_ptr() if epilogue.bias else None,
            buffers.args[1].data_ptr() if epilogue.residual else None,
            y.data_ptr(),
            None if workspace is None else workspace.data_ptr(),
            min(self._threads, torch.get_num_threads()),
        )
        if self._following != "none":
            finish(y, None, None, self._following)


def _function(units: Sequence[str]) -> Any:
    threads = ("-fopenmp",) if host_compiler._openmp() else ()
    library = host_compiler.load_shared(host_compiler.compile_shared(units, (*FLAGS, *threads), PrunedC.id))
    function = library.convoy_pruned
    function.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int]
    function.restype = None
    return function


class PrunedC(Engine):
    """Specialised C for forward convolutions in fp32 and nchw."""

    id = "pruned.c"
    family = "direct"
    trusted = False
    reads_mask = True

    def supports(self, problem: Problem, target: Target) -> Support:
        """Forward convolutions in fp32 and nchw whose mask is there and not too large."""
        if target.device != "cpu":
            return Support.no(f"needs a CPU, got {target.device}")
        support = plain_convolution(problem)
        if not support or not isinstance(problem, ConvProblem):
            return support
        if not problem.weight_mask:
            return Support.no("computes pruned weights only, got a problem without a mask")
        if problem.mask is None:
            return Support.no(f"needs the positions of mask {problem.weight_mask}, got its digest alone")
        if problem.x_dtype != "fp32":
            return Support.no(f"needs fp32, got {problem.x_dtype}")
        if problem.layout != "nchw":
            return Support.no(f"needs layout nchw, got {problem.layout}")
        if problem.n == 0:
            return Support.no("needs a batch of at least 1, got 0")
        if problem.mask.nonzeros > MOST_NONZEROS:
            return Support.no(f"writes code for at most {MOST_NONZEROS} non-zero weights, got {problem.mask.nonzeros}")
        return host_compiler.compiler_support()

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """`filters` whose sums are in registers, `vectors` of pixels, `channels` of a piece."""
        assert isinstance(problem, ConvProblem)
        lanes, sums = LANES.get(target.arch, 4), REGISTERS.get(target.arch, 16) - 4
        fits = [vectors for vectors in (1, 2, 4) if vectors == 1 or problem.k * vectors <= sums]
        choices = [(fits[-1], 32), (fits[-1], 64), (fits[-1] * 2, 32), (fits[-1], 128), (fits[-1] * 2, 16)]
        return [
            Knobs.of(
                filters=min(problem.k, max(1, sums // vectors)),
                vectors=vectors,
                channels=channels,
                lanes=lanes,
                threads=target.units,
            )
            for vectors, channels in choices
            if channels <= max(32, problem.c) or channels == 32
        ]

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        assert isinstance(problem, ConvProblem)
        assert problem.mask is not None
        return plan(problem, positions(problem.mask), knobs).thread_bytes * knobs.integer("threads")

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Write the code and compile it."""
        assert isinstance(problem, ConvProblem)
        return PrunedConvolution(problem, knobs)


ENGINE = PrunedC()
