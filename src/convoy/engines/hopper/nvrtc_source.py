"""The source of a CUDA kernel for one build: text, headers, parameters and wgmma instructions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

from convoy.errors import InputError

ACTIVATIONS: Final = ("none", "relu", "relu6", "silu", "hardswish", "hardsigmoid", "sigmoid", "gelu")
"""Activations of an epilogue. The kernels use their index (`enum Activation` in activation.cuh)."""

DIVIDING: Final = ("silu", "hardswish", "hardsigmoid", "sigmoid")
"""Activations with a division. An exact division calls a function for some operands; 30 instructions in all."""

INSTRUCTIONS_HEADER: Final = "wgmma_instructions.cuh"
_CONFIG_SUFFIX: Final = "_config.cuh"
_INCLUDE: Final = re.compile(r"^#include <([\w./]+)>$", re.MULTILINE)
_PARAMETER: Final = re.compile(
    r"^(?P<start>#define |  )(?P<name>[A-Z]\w*)(?P<between> = | )(?P<value>\w+)", re.MULTILINE
)

_OPERANDS: Final = {
    "fp16": ("k16.f32.f16.f16", ", 0, 0"),
    "bf16": ("k16.f32.bf16.bf16", ", 0, 0"),
    "fp32": ("k8.f32.tf32.tf32", ""),
}
"""dtype → the end of the wgmma instruction's name, and the operands that only half types have (no matrix is transposed)."""


@dataclass(frozen=True, slots=True)
class CudaSource:
    """CUDA C++ for NVRTC.

    Attributes:
        name: of the file, for messages.
        text: of the file.
        headers: (name, text) of every header that it includes, directly or not.
    """

    name: str
    text: str
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> tuple[str, ...]:
        """All text that determines the compiled code."""
        return (self.text, *(part for header in self.headers for part in header))


def nvrtc_options(activation: str, dtype: str) -> tuple[str, ...]:
    """NVRTC's options for an activation and the dtype of the results.

    If results are rounded to a half type, a division may be off by two units in the last place of fp32 (see activation.cuh).
    """
    divides = activation in DIVIDING and dtype in ("fp16", "bf16")
    return ("--prec-div=false", "--define-macro=FAST_DIVISION") if divides else ()


@cache
def header_text(name: str) -> str:
    """A header of `include/`; raises FileNotFoundError if it does not exist."""
    return (files("convoy.engines.hopper") / "include" / name).read_text(encoding="utf-8")


@cache
def kernel_text(kernel: str) -> str:
    """Text of `kernels/<kernel>.cu`."""
    return (files("convoy.engines.hopper") / "kernels" / f"{kernel}.cu").read_text(encoding="utf-8")


def included(text: str) -> Iterator[str]:
    """Names of the headers that a text includes with angle brackets."""
    yield from _INCLUDE.findall(text)


def closure(text: str, replaced: Mapping[str, str] | None = None) -> dict[str, str]:
    """Every header that a text includes, directly or not: name → text.

    Args:
        text: CUDA C++.
        replaced: texts to use in place of headers of `include/`.
    """
    found: dict[str, str] = {}
    waiting = list(included(text))
    while waiting:
        name = waiting.pop(0)
        if name not in found:
            found[name] = replaced[name] if replaced and name in replaced else header_text(name)
            waiting += included(found[name])
    return found


def parameter_defaults(header: str) -> dict[str, int]:
    """Names and values of the parameters in a header `<kernel>_config.cuh`."""
    return {found["name"]: int(found["value"].rstrip("uUlL"), 0) for found in _PARAMETER.finditer(header)}


def config_header(header: str, parameters: Mapping[str, int]) -> str:
    """A header `<kernel>_config.cuh` with the values of a build.

    Args:
        header: its text, with defaults.
        parameters: values by name; the others keep their defaults.

    Raises:
        InputError: the header has no such parameter.
    """
    if unknown := sorted(set(parameters) - set(parameter_defaults(header))):
        raise InputError("parameters", ", ".join(unknown), "names of parameters in the kernel's header")

    def line(found: re.Match[str]) -> str:
        value = parameters.get(found["name"], found["value"])
        return f"{found['start']}{found['name']}{found['between']}{value}"

    return _PARAMETER.sub(line, header)


def kernel_source(kernel: str, parameters: Mapping[str, int], instructions: str = "") -> CudaSource:
    """The source of `kernels/<kernel>.cu` for one build.

    Args:
        kernel: the file's name without its suffix.
        parameters: values for its headers `*_config.cuh`.
        instructions: the wgmma functions of the build; empty if the kernel has none.

    Raises:
        InputError: none of its headers has such a parameter.
    """
    text = kernel_text(kernel)
    replaced = {INSTRUCTIONS_HEADER: f"#pragma once\n#include <wgmma.cuh>\n\n{instructions}"} if instructions else {}
    left = dict(parameters)
    for name, header in closure(text).items():
        if name.endswith(_CONFIG_SUFFIX):
            own = {parameter: left.pop(parameter) for parameter in parameter_defaults(header) if parameter in left}
            replaced[name] = config_header(header, own)
    if left:
        raise InputError("parameters", ", ".join(sorted(left)), "names of parameters in the kernel's headers")
    return CudaSource(f"{kernel}.cu", text, tuple(sorted(closure(text, replaced).items())))


def wgmma_function(columns: int, dtype: str, *, name: str = "wgmma", adds: bool = True, transposed: int = 0) -> str:
    """`name(d, a, b)`: d += A · B^T for 64 rows and `columns` columns over 32 bytes of each operand, both in shared memory.

    Args:
        columns: a multiple of 8 up to 256.
        dtype: of the operands; fp32 means TF32.
        name: of the function.
        adds: whether the product is added to d; otherwise it replaces d.
        transposed: how many operands are transposed, A before B: 0, 1 or 2; half types only.
    """
    ending, transposes = _OPERANDS[dtype]
    transposes = f", 1, {transposed - 1}" if transposed else transposes
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        f"DEVICE void {name}(float (&d)[{count}], u64 a, u64 b) {{\n"
        f'  asm volatile("wgmma.mma_async.sync.aligned.m64n{columns}{ending} {{{registers}}}, '
        f"%{count}, %{count + 1}, {int(adds)}, 1, 1"
        f'{transposes};\\n"\n    : {outputs} : "l"(a), "l"(b));\n}}\n'
    )


def wgmma_sparse_function(columns: int, dtype: str) -> str:
    """`wgmma_sparse<half>(d, a, b, metadata)`: d += A · B^T over 32 columns of A, of which 16 are stored.

    `metadata` tells which columns are stored. `half` selects the lanes of every four that provide it: the first two or the last
    two (PTX ISA, sparsity selector).
    """
    kind = {"fp16": "f16", "bf16": "bf16"}[dtype]
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    operands = ", ".join(f"%{count + i}" for i in range(4)) + ", 1, 1, 1, 0, 0"
    name = f"wgmma.mma_async.sp.sync.aligned.m64n{columns}k32.f32.{kind}.{kind}"
    return (
        f"template <int HALF> DEVICE void wgmma_sparse(float (&d)[{count}], u64 a, u64 b, u32 metadata) {{\n"
        f'  asm volatile("{name} {{{registers}}}, {operands};\\n"\n'
        f'    : {outputs} : "l"(a), "l"(b), "r"(metadata), "n"(HALF));\n}}\n'
    )


def defines(values: Mapping[str, int]) -> str:
    """Macro definitions, for generated code."""
    return "".join(f"#define {name} {value}\n" for name, value in values.items())


def reciprocal(divisor: int) -> tuple[int, int]:
    """Factor and shift with which `n * factor >> shift` is `n // divisor` for every n in [0, 2^31): `Divisor` in ring.cuh.

    The factor is a power of two divided by the divisor, rounded up, so it is too large by less than 1. The power is chosen so
    that n times this error stays under it (Granlund and Montgomery, Division by Invariant Integers, 1994).
    """
    shift = 31 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift
