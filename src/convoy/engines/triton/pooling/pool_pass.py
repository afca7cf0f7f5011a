"""The kernel that pools what lies in memory: a convolution's result, or the parts of its sum (`kernels/pooled_kernels.py`)."""

from __future__ import annotations

import math

import torch

from convoy.engines.triton.triton_build import KernelBuild, TritonKernel, interpreting
from convoy.problem import Epilogue, Pool
from convoy.support import Support
from convoy.target import Target

LARGEST_WINDOW = 64
"""Pixels. One thread reads a whole window: what pools an image to one pixel wants a kernel of another kind."""

_MOST_UNROLLED = 36
"""Loads of one thread that are written out, so that all are on their way at once."""

_VECTOR_BYTES = 16
_BLOCKS_PER_UNIT = 2


def window_support(pool: Pool) -> Support:
    """Whether a window is small enough for one thread."""
    size = pool.window_h * pool.window_w
    return (
        Support.yes()
        if size <= LARGEST_WINDOW
        else Support.no(f"pools windows of at most {LARGEST_WINDOW}, got {size}")
    )


class ReduceWindows:
    """Adds the parts of a split sum, applies the epilogue and pools; or only pools a complete result.

    Args:
        engine: the engine's id, for messages.
        size: n, k, p and q before the pooling.
        splits: number of partial sums, fp32 and dense NHWC one after another; 1 for a complete result.
        dtypes: dtype of the input and of the result.
        epilogue: includes the pooling; bias, residual and activation come before it.
        target: the GPU to compile for.
    """

    def __init__(
        self, engine: str, size: tuple[int, int, int, int], splits: int, dtypes: tuple[str, str], epilogue: Epilogue,
        target: Target,
    ) -> None:  # fmt: skip
        from convoy.engines.triton.kernels.pooled_kernels import reduce_windows  # pyright: ignore[reportUnknownVariableType]

        pool = epilogue.pool
        assert pool is not None
        self.n, self.k, self.p, self.q = size
        self.y_h, self.y_w = pool.size(self.p, self.q)
        self.vector, self.block = self._vector(dtypes, target.units)
        dependent = target.capability >= 90 and not interpreting()
        _, dtype = dtypes
        signature = {
            "parts": f"*{dtypes[0]}", "y": f"*{dtype}", "residual": f"*{dtype}" if epilogue.residual else "none",
            "bias": f"*{dtype}" if epilogue.bias else "none",
        } | dict.fromkeys(("elements", "conv_elements", "p", "q", "k", "y_h", "y_w"), "i32")  # fmt: skip
        constants = {
            "SPLITS": splits, "BLOCK": self.block, "ACTIVATION": epilogue.activation, "WINDOW_H": pool.window_h,
            "WINDOW_W": pool.window_w, "STRIDE_H": pool.stride_h, "STRIDE_W": pool.stride_w, "PAD_H": pool.pad_h,
            "PAD_W": pool.pad_w, "AVERAGE": pool.kind == "avg", "COUNT_PAD": pool.count_include_pad,
            "UNROLLED": pool.window_h * pool.window_w * splits <= _MOST_UNROLLED, "VECTOR": self.vector,
            "WAIT": dependent,
        }  # fmt: skip
        pointers = ["parts", "y", "residual", "bias"]
        warps = max(1, self.block // 32)
        build = KernelBuild(
            engine, reduce_windows, signature, constants, pointers, warps, 1, dependent=dependent, tensor_cores=False
        )
        self.kernel = TritonKernel(build, target)

    @property
    def elements(self) -> int:
        """Values of the result."""
        return self.n * self.k * self.y_h * self.y_w

    def _vector(self, dtypes: tuple[str, str], units: int) -> tuple[int, int]:
        """Channels of a thread and threads of a block: wide where there is enough to do, else enough blocks for the device."""
        widest = _VECTOR_BYTES // (4 if "fp32" in dtypes else 2)
        vector = math.gcd(widest, self.k)
        block = 128
        while block > 32 and self.elements < _BLOCKS_PER_UNIT * units * block * vector:
            block //= 2
        while vector > 2 and self.elements < _BLOCKS_PER_UNIT * units * block * vector:
            vector //= 2
        return vector, block

    def launch(
        self, parts: torch.Tensor, y: torch.Tensor, residual: torch.Tensor | None, bias: torch.Tensor | None
    ) -> None:
        """Pool `parts` into y; both are dense NHWC."""
        units = self.elements // self.vector
        if units == 0:
            return
        conv_units = self.n * self.k * self.p * self.q // self.vector
        sizes = [units, conv_units, self.p, self.q, self.k // self.vector, self.y_h, self.y_w]
        self.kernel((-(-units // self.block), 1, 1), [parts, y, residual, bias, *sizes])
