"""IR to x86-64 assembly inside C: the segments alone, for AVX-512 and AVX2. No torch here.

gcc's code for the same segments in C is correct but slow, in two ways: it loads an input again for every use instead of sharing
it and copies sums (half the speed, gcc 12), and it takes 0.1 ms a non-zero. The assembler takes a tenth of that; ResNet-50
has 2.3 million non-zeros at a sparsity of 0.9. A compiler cannot improve straight-line code: registers are as in the IR. For
other CPUs the segments are C (`emit_c`).

Registers: sums first, then inputs in turn, then broadcast values if an instruction cannot take them from memory. The calling
convention is System V's: x, w and y are in rdi, rsi and rdx, and no vector register is preserved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from convoy.engines.sparse_weights.codegen.kernel_ir import Group, MaskKernel, Segment


@dataclass(frozen=True, slots=True)
class Registers:
    """The vector registers of an instruction set.

    Attributes:
        count: how many.
        word: a register's name without its number.
        lanes: floats of one.
        spreads: whether a multiply-add takes a value from memory to all lanes.
        clear: the instruction that makes a register zero.
    """

    count: int
    word: str
    lanes: int
    spreads: bool
    clear: str


SETS: Final = {
    "avx512": Registers(32, "zmm", 16, True, "vpxord"),
    "avx2": Registers(16, "ymm", 8, False, "vxorps"),
}
"""By `Target.arch`."""


def fits(kernel: MaskKernel, arch: str) -> bool:
    """Whether a kernel's sums fit the registers of an instruction set, besides an input and a value."""
    found = SETS.get(arch)
    if found is None or found.lanes != kernel.lanes:
        return False
    largest = max((len(group.filters) for group in kernel.groups), default=0)
    return kernel.vectors * largest + kernel.vectors + 1 <= found.count


def function(kernel: MaskKernel, group: Group, segment: Segment, name: str, pitch: int, arch: str) -> str:
    """One segment for one tile as a function of C's calling convention.

    Args:
        kernel: the kernel.
        group: the segment's group.
        segment: the code.
        name: the function's name.
        pitch: floats from one filter's sums to the next one's.
        arch: a key of `SETS`.
    """
    found, vectors = SETS[arch], kernel.vectors
    sums = len(group.filters) * vectors
    values = 0 if found.spreads and vectors == 1 else 1
    inputs = max(1, (found.count - sums - values) // vectors)
    register = [f"%{found.word}{index}" for index in range(found.count)]
    value = register[-1]
    lines = [f".hidden {name}", f".globl {name}", f".type {name}, @function", ".p2align 4", f"{name}:"]
    for index in range(sums):
        total, v = divmod(index, vectors)
        at = 4 * (total * pitch + v * kernel.lanes)
        one = register[index]
        lines.append(f"{found.clear} {one}, {one}, {one}" if segment.begins else f"vmovups {at}(%rdx), {one}")
    first = segment.loads[0].uses[0][1] if segment.loads else 0
    for turn, load in enumerate(segment.loads):
        start = sums + turn % inputs * vectors
        taken = register[start : start + vectors]
        for v, one in enumerate(taken):
            lines.append(f"vmovups {4 * (load.offset + v * kernel.lanes)}(%rdi), {one}")
        for total, used in load.uses:
            place = f"{4 * (used - first)}(%rsi)"
            if values:
                lines.append(f"vbroadcastss {place}, {value}")
            for v, one in enumerate(taken):
                factor = value if values else f"{place}{{1to{found.lanes}}}"
                lines.append(f"vfmadd231ps {factor}, {one}, {register[total * vectors + v]}")
    for index in range(sums):
        total, v = divmod(index, vectors)
        lines.append(f"vmovups {register[index]}, {4 * (total * pitch + v * kernel.lanes)}(%rdx)")
    lines += ["vzeroupper", "ret", f".size {name}, .-{name}"]
    quoted = "\n".join(f'"{line}\\n"' for line in lines)
    return f'__asm__(".text\\n"\n{quoted});\n'
