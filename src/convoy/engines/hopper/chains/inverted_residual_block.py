"""Sizes of the blocks that `inverted_residual.cu` and `expand_depthwise.cu` compute."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.problem.spec import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class InvertedResidual:
    """y = conv1x1(act2(depthwise(act1(conv1x1(x))))), + x where there is a residual; or that without its last layer. NHWC.

    Attributes:
        n: images.
        h: height of x.
        w: width of x.
        c: channels of x.
        mid: channels between the convolutions.
        k: channels of y; `mid` without a last layer.
        taps: side of the depthwise filter, 3 or 5, with padding that keeps the size at stride 1.
        stride: of the depthwise convolution, 1 or 2.
        dtype: fp16 or bf16, of every tensor.
        activations: behind the first and the second convolution.
        residual: whether x is added.
        projects: whether the last layer, the second 1x1 convolution, is a part of it.
    """

    n: int
    h: int
    w: int
    c: int
    mid: int
    k: int
    taps: int
    stride: int
    dtype: str
    activations: tuple[str, str]
    residual: bool
    projects: bool = True

    @property
    def p(self) -> int:
        """Height of y."""
        return (self.h - 1) // self.stride + 1

    @property
    def q(self) -> int:
        """Width of y."""
        return (self.w - 1) // self.stride + 1

    @property
    def projected(self) -> int:
        """Filters of the last layer; 0 without one."""
        return self.k if self.projects else 0

    @property
    def flops(self) -> int:
        """Operations; a multiply-add counts as two."""
        before, after = self.n * self.h * self.w, self.n * self.p * self.q
        return 2 * self.mid * (before * self.c + after * (self.taps * self.taps + self.projected))

    @property
    def weight_bytes(self) -> int:
        """Of all weights."""
        return DTYPE_BYTES[self.dtype] * self.mid * (self.c + self.taps * self.taps + self.projected)

    @property
    def bytes_min(self) -> int:
        """X read once, y written once, and the weights."""
        values = self.n * (self.h * self.w * self.c + self.p * self.q * self.k)
        return values * DTYPE_BYTES[self.dtype] + self.weight_bytes
