"""The text of a CUDA kernel for one build: settings as macros, the instructions' wrappers, the product of the wanted size."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Final

ACTIVATIONS: Final = ("none", "relu", "relu6", "silu", "hardswish", "hardsigmoid", "sigmoid", "gelu")
"""An epilogue's words; the kernels know them by their number."""

INSTRUCTIONS: Final = {
    "fp16": ("k16.f32.f16.f16", ", 0, 0"),
    "bf16": ("k16.f32.bf16.bf16", ", 0, 0"),
    "fp32": ("k8.f32.tf32.tf32", ""),
}
"""dtype → the end of wgmma's name, and the arguments that only half types have (neither operand is transposed)."""


@cache
def text(name: str) -> str:
    """A file of this package."""
    return (files("convoy.engines.cuda") / name).read_text(encoding="utf-8")


def product(columns: int, dtype: str) -> str:
    """`multiply(d, a, b)`: d += A · B^T for 64 rows and `columns` columns of 32 bytes, both operands from shared memory."""
    ending, transposes = INSTRUCTIONS[dtype]
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        f"DEVICE void multiply(float (&d)[{count}], u64 a, u64 b) {{\n"
        f'  asm volatile("wgmma.mma_async.sync.aligned.m64n{columns}{ending} {{{registers}}}, %{count}, %{count + 1}, 1, 1, 1'
        f'{transposes};\\n"\n    : {outputs} : "l"(a), "l"(b));\n}}\n'
    )


def defines(settings: Mapping[str, int]) -> str:
    """Macros."""
    return "".join(f"#define {name} {value}\n" for name, value in settings.items())


def source(kernel: str, settings: Mapping[str, int], dtype: str) -> str:
    """Everything that the compiler gets for `kernel`.cu."""
    return defines(settings) + text("hopper.cuh") + product(settings["BN"], dtype) + text(f"{kernel}.cu")
