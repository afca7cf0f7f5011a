"""Checks of the tensors that GPU kernels read and write: dense, aligned; and TMA descriptors of explicit sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch

from convoy.engines.base import Buffers
from convoy.errors import LaunchError

ALIGNMENT: Final = 16
"""Bytes: kernels read vectors of 16 bytes, cuDNN's plans are made for such addresses, TMA takes no others."""


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if its address is none that kernels take: a view of a larger tensor may begin anywhere."""
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def aligned_on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """As `aligned`; a tensor of the host as it is, because kernels there take any address."""
    return aligned(tensor) if tensor.is_cuda else tensor


def dense_nhwc(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if it is dense NHWC, or a dense matrix, and 16-byte aligned; raises LaunchError otherwise."""
    dense = tensor.is_contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor.is_contiguous()
    if not dense:
        raise LaunchError(f"{name}: strides {tuple(tensor.stride())} are not those of a dense channels_last tensor")
    if tensor.data_ptr() % ALIGNMENT:
        raise LaunchError(f"{name}: its memory starts at {tensor.data_ptr():#x}, which is no multiple of 16 bytes")
    return tensor


def as_images(tensor: torch.Tensor) -> torch.Tensor:
    """A volume [n, c, d, h, w] in channels_last_3d as an NHWC image [n, c, d * h, w] of the same memory; others as they are."""
    if tensor.dim() != 5:
        return tensor
    n, c, d, h, w = tensor.shape
    return tensor.view(n, c, d * h, w) if tensor.numel() else tensor.flatten(2, 3)


def sliced_nhwc(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if it is dense NHWC, or a 16-byte aligned channel slice of one; raises LaunchError otherwise."""
    if tensor.dim() == 4 and not tensor.is_contiguous(memory_format=torch.channels_last):
        _, _, h, w = tensor.shape
        pitch = tensor.stride(3)
        whole = pitch >= tensor.shape[1] and pitch * tensor.element_size() % 16 == 0
        if not whole or tensor.stride() != (h * w * pitch, 1, w * pitch, pitch) or tensor.data_ptr() % 16:
            says = "are not those of some channels of a channels_last tensor, 16-byte aligned"
            raise LaunchError(f"{name}: strides {tuple(tensor.stride())} {says}")
        return tensor
    return dense_nhwc(name, tensor)


def pitch_of(tensor: torch.Tensor) -> int:
    """Elements from one pixel of an NHWC tensor, or row of a matrix, to the next; the number of channels if it is dense."""
    if tensor.dim() != 4:
        return tensor.shape[1]
    return tensor.shape[1] if tensor.is_contiguous(memory_format=torch.channels_last) else tensor.stride(3)


def fits_tma(dtype: torch.dtype, pitch: int, offset: int) -> bool:
    """Whether TMA can address a channel slice: pixels, and the slice in a pixel, start at multiples of 16 bytes."""
    return pitch * dtype.itemsize % 16 == 0 and offset * dtype.itemsize % 16 == 0


def checked(
    buffers: Buffers, residual: bool, *, slices: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x, y and the residual of a launch, each dense and aligned; with `slices`, y may be a channel slice of a larger tensor."""
    x = dense_nhwc("x", buffers.args[0])
    result = buffers.results[0]
    if result is None:
        raise LaunchError("y: no tensor was given to write to")
    y = sliced_nhwc("y", result) if slices else dense_nhwc("y", result)
    return x, y, dense_nhwc("residual", buffers.args[1]) if residual else None


def scratch(workspace: torch.Tensor | None, needed: int) -> torch.Tensor | None:
    """The workspace, or None if none is needed; raises LaunchError if it is too small."""
    if needed and (workspace is None or workspace.numel() < needed):
        given = 0 if workspace is None else workspace.numel()
        raise LaunchError(f"workspace: got {given} bytes, expected at least {needed}")
    return workspace if needed else None


def as_floats(workspace: torch.Tensor, elements: int) -> torch.Tensor:
    """The first bytes of the workspace as `elements` fp32 numbers."""
    return workspace[: 4 * elements].view(torch.float32)


def descriptor(base: torch.Tensor, shape: Sequence[int], block: Sequence[int], strides: Sequence[int] = ()) -> Any:
    """A TMA descriptor over the memory at `base`; strides are in elements, dense by default."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if not strides:
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return TensorDescriptor(base, list(shape), list(strides), list(block))


def vector(size: int) -> int:
    """The largest power of two, at most 16, that divides a size."""
    return min(16, size & -size)


def round_tf32(weight: torch.Tensor) -> torch.Tensor:
    """An fp32 weight rounded to TF32's ten bits; other dtypes are unchanged.

    The tensor core truncates its operands, so every product is slightly too small. Rounding one operand first, half away
    from zero, halves that bias (measured on an H100: relative error 7.7e-4 before, 4.6e-4 after). The TMA unit rounds
    the other operand if it is loaded by TMA (`KernelBuild.rounded`).
    """
    if weight.dtype != torch.float32:
        return weight
    bits = weight.contiguous().view(torch.int32)
    rounded = torch.bitwise_and(bits + 0x1000, -0x2000)
    return torch.where(weight.isfinite(), rounded.view(torch.float32), weight)
