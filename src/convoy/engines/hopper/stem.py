"""cuda.stem: the first layer, few channels and a wide filter, as an implicit GEMM over windows (docs/kernels/first-layers.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from convoy.engines.base import Buffers, Engine, Executable, Packed
from convoy.engines.gpu.device_tensors import checked, scratch
from convoy.engines.gpu.gpu_support_checks import first_layer_support
from convoy.engines.hopper.hopper_support_checks import hopper_alone
from convoy.engines.hopper.igemm import Form, ImplicitGemmExecutable, estimate_us, forms
from convoy.engines.hopper.nvrtc_kernel import Function, compile_cubin, pointer, structure
from convoy.engines.hopper.nvrtc_source import defines, text
from convoy.engines.hopper.tensor_maps import PixelMap
from convoy.problem import ConvProblem, Knobs, Problem
from convoy.problem.spec import DTYPE_BYTES
from convoy.support import Support
from convoy.target import Target

MOST_CHANNELS = 4
_COPY_BYTES_NS = 2500.0
_COPY_NS = 1500.0


@dataclass(frozen=True)
class Windows:
    """How the image is arranged, and the convolution that is left.

    The copy is [n, groups, columns, rows of a group, vector]: a group holds `stride_h` rows, so that the windows of an output
    row begin at a group, and neighbouring windows lie `stride_w` columns apart and overlap. What one window holds of a group
    is one run of memory: it takes the place of the channels, and the groups that of the filter's rows.
    """

    problem: ConvProblem

    @cached_property
    def vector(self) -> int:
        """Channels of the copy: 4, or 8 where windows would not begin at multiples of 16 bytes."""
        p = self.problem
        return 4 if p.stride_h * p.stride_w * 4 * DTYPE_BYTES[p.x_dtype] % 16 == 0 else 8

    @property
    def taps(self) -> int:
        """Groups that a window reaches over."""
        return -(-self.problem.r // self.problem.stride_h)

    @property
    def groups(self) -> int:
        """Of an image."""
        return self.problem.p + self.taps - 1

    @property
    def columns(self) -> int:
        """Of a row, a multiple of the stride."""
        return (
            -(-((self.problem.q - 1) * self.problem.stride_w + self.problem.s) // self.problem.stride_w)
            * self.problem.stride_w
        )

    @property
    def cell(self) -> int:
        """Elements of one column of a group."""
        return self.problem.stride_h * self.vector

    @property
    def bytes(self) -> int:
        """Of the copy."""
        p = self.problem
        return p.n * self.groups * self.columns * self.cell * DTYPE_BYTES[p.x_dtype]

    @cached_property
    def left(self) -> ConvProblem:
        """What is computed on the copy: windows as channels, filters of `taps` x 1, no stride and no padding."""
        p = self.problem
        return replace(
            p, c=p.s * self.cell, h=self.groups, w=p.q, r=self.taps, s=1, pad_h=0, pad_w=0, stride_h=1, stride_w=1
        )  # fmt: skip

    def macros(self) -> dict[str, int]:
        """The copying kernel's settings."""
        p = self.problem
        return {
            "BYTES": DTYPE_BYTES[p.x_dtype], "BF16": int(p.x_dtype == "bf16"), "C": p.c, "VECTOR": self.vector,
            "ROWS": p.stride_h, "DEPENDENT": 1,
        }  # fmt: skip

    def source(self) -> str:
        """Its text."""
        return defines(self.macros()) + text("hopper.cuh") + text("stem.cu")

    def sizes(self) -> dict[str, int]:
        """Its run-time sizes, in the order of its structure."""
        p = self.problem
        return {
            "groups": self.groups, "columns": self.columns, "h": p.h, "w": p.w, "pad_h": p.pad_h, "pad_w": p.pad_w,
        }  # fmt: skip

    def pixel_map(self, rows: int) -> PixelMap:
        """Windows for the copies: as of `left`, but a stride of the convolution apart."""
        return replace(PixelMap.of(self.left, rows), strides=self.strides)

    @property
    def strides(self) -> tuple[int, int, int]:
        """Bytes from one window, one group, one image to the next."""
        p, each = self.problem, DTYPE_BYTES[self.problem.x_dtype]
        group = self.columns * self.cell * each
        return p.stride_w * self.cell * each, group, self.groups * group

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """[k, c, r, s] as filters over windows, [k, window, taps, 1]."""
        k, c, r, s = weight.shape
        p = self.problem
        wide = torch.nn.functional.pad(weight, (0, 0, 0, self.taps * p.stride_h - r, 0, self.vector - c))
        wide = wide.reshape(k, self.vector, self.taps, p.stride_h, s)
        return wide.permute(0, 4, 3, 1, 2).reshape(k, s * self.cell, self.taps, 1)


class ImageCopy:
    """The copying kernel for one problem."""

    def __init__(self, engine: str, windows: Windows, target: Target) -> None:
        self.windows = windows
        cubin, self.log = compile_cubin(engine, windows.source(), target)
        self.function = Function(engine, cubin, "pad_image", 0)

    def launch(self, x: torch.Tensor, room: torch.Tensor) -> None:
        """From an image to the windows' order."""
        windows = self.windows
        arguments = [pointer(x), pointer(room), structure("Sizes", windows.sizes())]
        blocks = windows.problem.n * windows.groups
        self.function.launch(x.device.index or 0, blocks, 256, arguments, dependent=True)


class StemExecutable(Executable):
    """One form for one problem: a copy, and the implicit GEMM on it."""

    def __init__(self, engine: str, problem: ConvProblem, form: Form, target: Target) -> None:
        self.problem, self.windows = problem, Windows(problem)
        self.workspace_bytes = self.windows.bytes
        self.product = ImplicitGemmExecutable(engine, self.windows.left, form, target)
        self.product.pixel_map = self.windows.pixel_map(form.pixels)
        self.copy = ImageCopy(engine, self.windows, target)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Filters over windows."""
        return self.product.pack([self.windows.pack(constants[0].detach()), *constants[1:]])

    def accept_slice(self, result: int, pitch: int, offset: int) -> bool:
        """What the product accepts."""
        return self.product.accept_slice(result, pitch, offset)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Two launches."""
        if self.problem.n == 0:
            return
        x, _, _ = checked(buffers, self.problem.epilogue.residual, slices=True)
        room = scratch(workspace, self.workspace_bytes)
        assert room is not None
        self.copy.launch(x, room)
        self.product.multiply(room, buffers)


class StemEngine(Engine):
    """Windows of a rearranged image; see `stem.cu` and `implicit_gemm.cu`."""

    id = "cuda.stem"
    family = "implicit_gemm"
    devices = ("cuda",)
    writes_slices = True
    trusted = False
    quick_settings = 3

    def supports(self, problem: Problem, target: Target) -> Support:
        """At most four channels, no groups, no dilation, on Hopper; fp32 as TF32 where the numerics allow."""
        if not (found := first_layer_support(problem, target, MOST_CHANNELS, empty=True)):
            return found
        if not (found := hopper_alone(target)):
            return found
        assert isinstance(problem, ConvProblem)
        whole = 16 // DTYPE_BYTES[problem.x_dtype]
        if problem.k % whole:
            return Support.no(f"needs k as a multiple of {whole}, got {problem.k}")
        windows = Windows(problem)
        if windows.left.c % whole:
            return Support.no(f"needs windows of whole 16 bytes, got {windows.left.c} elements")
        if windows.bytes >= 1 << 31 or not windows.pixel_map(64).fits(windows.left):
            return Support.no("needs a smaller filter or fewer images")
        return Support.yes()

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Forms by guessed time."""
        assert isinstance(problem, ConvProblem)
        return [form.knobs for form in forms(Windows(problem).left, target.units)]

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """The rearranged image."""
        assert isinstance(problem, ConvProblem)
        return Windows(problem).bytes

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """The product's guess, and reading the image and writing the copy; dearer than both by what 30 rows of an H200 say."""
        assert isinstance(problem, ConvProblem)
        windows = Windows(problem)
        moved = windows.bytes + problem.x_spec.size_bytes
        guess = estimate_us(windows.left, Form.of(knobs), target.units) + (_COPY_NS + moved / _COPY_BYTES_NS) / 1000
        return max(guess, 1.9 * guess - 2.6)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile one form."""
        assert isinstance(problem, ConvProblem)
        return StemExecutable(self.id, problem, Form.of(knobs), target)


ENGINE = StemEngine()
