"""The text of a CUDA kernel for one build: settings as macros, the instructions' wrappers, the product of the wanted size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Final

ACTIVATIONS: Final = ("none", "relu", "relu6", "silu", "hardswish", "hardsigmoid", "sigmoid", "gelu")
"""An epilogue's words; the kernels know them by their number."""

DIVIDING: Final = ("silu", "hardswish", "hardsigmoid", "sigmoid")
"""Activations with a division. One that is exact to the last bit takes a call for some operands, in 30 instructions."""


def options(activation: str, dtype: str) -> tuple[str, ...]:
    """NVRTC's options: where the result is rounded to a half type, a division within two units of fp32's last place will do.

    See `activation.cuh` for what it makes of SiLU and the sigmoid then.
    """
    divides = activation in DIVIDING and dtype in ("fp16", "bf16")
    return ("--prec-div=false", "--define-macro=HALF_RESULTS") if divides else ()


INSTRUCTIONS: Final = {
    "fp16": ("k16.f32.f16.f16", ", 0, 0"),
    "bf16": ("k16.f32.bf16.bf16", ", 0, 0"),
    "fp32": ("k8.f32.tf32.tf32", ""),
}
"""dtype → the end of wgmma's name, and the arguments that only half types have (neither operand is transposed)."""


@cache
def text(name: str) -> str:
    """A file of this package."""
    return (files("convoy.engines.hopper") / name).read_text(encoding="utf-8")


def product(columns: int, dtype: str, *, name: str = "multiply", adds: bool = True, turned: int = 0) -> str:
    """`multiply(d, a, b)`: d += A · B^T for 64 rows and `columns` columns of 32 bytes, both operands from shared memory.

    Where it does not add, d = A · B^T. Of half values, so many operands are `turned`, A before B: they lie as 16 rows of 64
    values, further ones of B as more of these.
    """
    ending, transposes = INSTRUCTIONS[dtype]
    transposes = f", 1, {turned - 1}" if turned else transposes
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        f"DEVICE void {name}(float (&d)[{count}], u64 a, u64 b) {{\n"
        f'  asm volatile("wgmma.mma_async.sync.aligned.m64n{columns}{ending} {{{registers}}}, '
        f"%{count}, %{count + 1}, {int(adds)}, 1, 1"
        f'{transposes};\\n"\n    : {outputs} : "l"(a), "l"(b));\n}}\n'
    )


def sparse_product(columns: int, dtype: str) -> str:
    """`multiply_sparse<half>(d, a, b, metadata)`: as `product`, over 32 columns of A of which 16 are there, as `metadata` says.

    `half` says which lanes of every four have the metadata: the first two or the last two (PTX ISA, sparsity selector).
    """
    kind = {"fp16": "f16", "bf16": "bf16"}[dtype]
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    operands = ", ".join(f"%{count + i}" for i in range(4)) + ", 1, 1, 1, 0, 0"
    name = f"wgmma.mma_async.sp.sync.aligned.m64n{columns}k32.f32.{kind}.{kind}"
    return (
        f"template <int HALF> DEVICE void multiply_sparse(float (&d)[{count}], u64 a, u64 b, u32 metadata) {{\n"
        f'  asm volatile("{name} {{{registers}}}, {operands};\\n"\n'
        f'    : {outputs} : "l"(a), "l"(b), "r"(metadata), "n"(HALF));\n}}\n'
    )


def defines(settings: Mapping[str, int]) -> str:
    """Macros."""
    return "".join(f"#define {name} {value}\n" for name, value in settings.items())


SWAPPED: Final = ("activation", "exchange", "ring", "swapped", "staged")
"""What kernels whose rows are filters share, beside the device's two headers."""


FIRST: Final = ("hopper", "hopper_more", "activation")
"""What the first layer's kernel wants."""


def swapped_source(kernel: str, settings: Mapping[str, int], dtype: str, *, sparse: bool = False) -> str:
    """Everything that the compiler gets for a kernel whose rows are filters; `sparse` products take 2:4 weights."""
    headers = "".join(text(f"{name}.cuh") for name in ("hopper", "hopper_more", *SWAPPED))
    columns = settings["BN"]
    made = (sparse_product if sparse else product)(columns, dtype)
    if kernel == "swapped" and not sparse:
        made += product(columns, dtype, name="multiply_fresh", adds=False)
        made += product(columns, dtype, name="multiply_turned", turned=1) if dtype != "fp32" else ""
    return defines(settings) + headers + made + swapped_text(kernel)


def wgrad_source(settings: Mapping[str, int], dtype: str) -> str:
    """The same for the weight's gradient."""
    headers = "".join(text(f"{name}.cuh") for name in ("hopper", "hopper_more"))
    made = product(settings["BN"], dtype, name="multiply_both", turned=2)
    return defines(settings) + headers + made + wgrad_text()


def wgrad_text() -> str:
    """The kernel without the device's names."""
    return "".join(text(name) for name in ("exchange.cuh", "ring.cuh", "wgrad.cuh", "shares.cuh", "wgrad.cu"))


def tile_text(settings: Mapping[str, int], headers: str) -> str:
    """The kernel of depthwise tiles behind some headers, which know nothing of its one-letter sizes."""
    return _behind(headers, settings, ("BF16", "ACTIVATION"), "depthwise_sums.cuh", "depthwise_tile.cu")


def first_source(settings: Mapping[str, int], dtype: str) -> str:
    """The same for the first layer's kernel."""
    headers = "".join(text(f"{name}.cuh") for name in FIRST)
    return first_text(settings, headers + product(settings["BN"], dtype, name="multiply_plain"))


def first_text(settings: Mapping[str, int], headers: str) -> str:
    """The kernel behind some headers, which know nothing of its one-letter sizes."""
    results = "first_half" if settings["BYTES"] == 2 else "first_full"
    asked = ("BN", "BF16", "BYTES", "ACTIVATION")
    return _behind(headers, settings, asked, f"{results}.cuh", "first_image.cuh", "first.cu")


def _behind(headers: str, settings: Mapping[str, int], asked: Sequence[str], *parts: str) -> str:
    early = {name: settings[name] for name in asked}  # what the headers ask
    late = {name: value for name, value in settings.items() if name not in early}
    return defines(early) + headers + defines(late) + "".join(text(part) for part in parts)


def swapped_text(kernel: str) -> str:
    """Such a kernel without what it shares with others, in the order of its parts."""
    own = ("shares", "swapped_room", "swapped_copy", "swapped_split", "swapped_wide") if kernel == "swapped" else ()
    parts = [f"{part}.cuh" for part in own]
    return "".join(text(name) for name in (*parts, f"{kernel}.cu"))


def plain_source(kernel: str, settings: Mapping[str, int], *, more: Sequence[str] = ()) -> str:
    """The same for kernels without tensor cores; `more` names headers besides."""
    headers = "".join(text(f"{name}.cuh") for name in ("plain", "activation", *more))
    return defines(settings) + headers + text(f"{kernel}.cu")


def source(kernel: str, settings: Mapping[str, int], dtype: str) -> str:
    """Everything that the compiler gets for `kernel`.cu."""
    headers = "".join(text(f"{name}.cuh") for name in ("hopper", "activation", "exchange", "ring"))
    return defines(settings) + headers + product(settings["BN"], dtype) + text(f"{kernel}.cu")
