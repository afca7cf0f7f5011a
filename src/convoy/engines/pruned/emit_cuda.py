"""IR to CUDA C: a thread a pixel, a row of blocks a group of filters, and a kernel that pads. No torch here.

A block of `lanes` threads computes a tile; each piece's planes are copied to shared memory before, the next piece's while this
one computes. Values are parameters of the kernel: those lie in constant memory, where a multiply-add takes them from for
nothing, and a launch keeps no state; or immediates, where they are known and will not change. Every name and number in the text
is made from integers and floats of checked data classes; no header is included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from convoy.engines.pruned.ir import Group, Kernel, Piece
from convoy.engines.pruned.layout import Layout

MOST_VALUES: Final = 8000
"""Values that are parameters of one kernel, at most: CUDA 12.1 and newer allow 32764 bytes on compute capability 7.0 and newer
(CUDA C++ Programming Guide, function parameters), pointers included. A group of filters may not have more."""

PART_VALUES: Final = 4000
"""Values of one module, about: NVRTC takes a millisecond or two for each, and modules are compiled side by side."""

PAD_THREADS: Final = 256

ACTIVATIONS: Final = ("none", "relu", "relu6")

ELEMENT: Final = {"fp32": ("float", 4), "fp16": ("unsigned short", 2)}
"""Storage type and its bytes; fp16 is converted by instructions, for which no header is needed."""


@dataclass(frozen=True, slots=True)
class Module:
    """One compilation unit with one kernel.

    Attributes:
        source: CUDA C.
        name: the kernel.
        grid: blocks: tiles, groups.
        threads: of a block.
        shared_bytes: dynamic shared memory of a block.
        values: [first, after) of the values that are its parameters; (0, 0) where they are immediates or there are none.
    """

    source: str
    name: str
    grid: tuple[int, int]
    threads: int
    shared_bytes: int
    values: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Source:
    """The kernels of a layer: first the one that pads, then the parts, which may run in any order or at once."""

    pad: Module
    parts: tuple[Module, ...]
    workspace_bytes: int


def emit(
    kernel: Kernel,
    layout: Layout,
    *,
    bias: bool,
    residual: bool,
    activation: str,
    values: Sequence[float] | None = None,
) -> Source:
    """The CUDA C code of a kernel.

    Args:
        kernel: verified code, staged, of one block that holds the whole batch.
        layout: its template.
        bias: whether a bias is added.
        residual: whether a residual is added.
        activation: one of `ACTIVATIONS`.
        values: numbers to make immediates of; None: values are parameters.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {ACTIVATIONS}")
    if layout.blocks != (1, 1):
        raise ValueError(f"{layout.blocks} blocks: CUDA code computes one block that holds the whole batch")
    element, size = ELEMENT[layout.problem.x_dtype]
    head = _head(kernel, layout, element, bias=bias, residual=residual, activation=activation)
    parts = tuple(_part(kernel, part, at, head, size, values) for at, part in enumerate(_parts(kernel)))
    count = kernel.planes * kernel.plane
    # At least one block: an empty mask has no planes, and a grid may not be empty.
    pad = Module(head + _pad(layout), "pad", (max(1, -(-count // PAD_THREADS)), 1), PAD_THREADS, 0, (0, 0))
    return Source(pad, parts, -(-size * count // 256) * 256)


def _head(kernel: Kernel, layout: Layout, element: str, *, bias: bool, residual: bool, activation: str) -> str:
    problem = layout.problem
    sizes = {
        "N": problem.n,
        "C": problem.c,
        "H": problem.h,
        "W": problem.w,
        "K": problem.k,
        "P": problem.p,
        "Q": problem.q,
        "STRIDE_H": problem.stride_h,
        "STRIDE_W": problem.stride_w,
        "PAD_H": problem.pad_h,
        "PAD_W": problem.pad_w,
        "PITCH": layout.pitch,
        "IMAGE_ROWS": layout.image_rows,
        "REACH_H": layout.reach_h,
        "PLANES": kernel.planes,
        "PLANE": kernel.plane,
        "PHASES": max(len(layout.phases), 1),
        "LANES": kernel.lanes,
        "VECTORS": kernel.vectors,
        "TILE": kernel.tile,
        "SPAN": kernel.span,
    }
    flags = {"BIAS": int(bias), "RESIDUAL": int(residual), "RELU": int(activation != "none")}
    flags |= {"RELU6": int(activation == "relu6"), "HALF": int(element != "float")}
    lines = [f"#define {name} {value}" for name, value in (sizes | flags).items()]
    return "\n".join([*lines, f"typedef {element} element;", _COMMON])


_COMMON: Final = """
#ifndef CONVOY_HOST /* tests compile the code for threads of a CPU, with words of their own for what follows */
static __device__ __forceinline__ float wide(element v)
{
#if HALF
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
    return f;
#else
    return v;
#endif
}

static __device__ __forceinline__ element narrow(float v)
{
#if HALF
    element h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
    return h;
#else
    return v;
#endif
}

#define COPY16(to, from) \\
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" \\
                 :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory")
#define COMMIT asm volatile("cp.async.commit_group;" ::: "memory")
#define WAIT(n) asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory")
#define SHARED extern __shared__ __align__(16) element staged[]
#endif
"""


def _pad(layout: Layout) -> str:
    """The kernel that writes planes: a thread an element."""
    phases = [(p.row, p.column, p.first, p.after) for p in layout.phases] or [(0, 0, 0, 0)]
    table = ", ".join(f"{{{', '.join(map(str, phase))}}}" for phase in phases)
    channels = ", ".join(map(str, layout.channels)) or "0"
    return f"""
static __constant__ int phases[][4] = {{{table}}};
static __constant__ int channels[] = {{{channels}}};
{_PAD}"""


_PAD: Final = """
extern "C" __global__ void __launch_bounds__(256) pad(const element *__restrict__ x, element *__restrict__ planes)
{
    const long long at = (long long)blockIdx.x * 256 + threadIdx.x;
    if (at >= (long long)PLANES * PLANE)
        return;
    const int plane = (int)(at / PLANE), place = (int)(at % PLANE);
    const int line = place / PITCH, column = place % PITCH;
    const int image = line / IMAGE_ROWS < N ? line / IMAGE_ROWS : N - 1;
    const int *phase = phases[plane % PHASES];
    const int h = (line - image * IMAGE_ROWS) * STRIDE_H + phase[0] - PAD_H;
    const int w = column * STRIDE_W + phase[1] - PAD_W;
    element v = 0;
    if (h >= 0 && h < H && column >= phase[2] && column < phase[3])
        v = x[(((long long)image * C + channels[plane / PHASES]) * H + h) * W + w];
    planes[at] = v;
}
"""


def _parts(kernel: Kernel) -> list[list[Group]]:
    """Groups that make one module: as many as its parameters hold, and its compiling should take."""
    parts: list[list[Group]] = []
    uses = 0
    for group in kernel.groups:
        if not parts or uses + group.uses > PART_VALUES:
            parts.append([])
            uses = 0
        parts[-1].append(group)
        uses += group.uses
    return parts


def _part(
    kernel: Kernel, groups: Sequence[Group], at: int, head: str, size: int, values: Sequence[float] | None
) -> Module:
    """The kernel of some groups, one a row of blocks."""
    pieces = [piece for group in groups for piece in group.pieces]
    used = [value for piece in pieces for load in piece.loads for _, value in load.uses]
    first, after = (used[0], used[-1] + 1) if used else (0, 0)
    held = bool(used) and values is None
    name = f"part_{at}"
    stages = max((len(piece.stage) for piece in pieces), default=0)
    buffers = min(2, max(sum(bool(piece.stage) for piece in group.pieces) for group in groups))
    lines = [head]
    if held:
        lines.append(f"struct values {{ float v[{after - first}]; }};")
    lines += [_STAGE, _RESULT, 'extern "C" __global__ void __launch_bounds__(LANES)']
    parameter = ", const __grid_constant__ struct values w" if held else ""
    lines.append(f"{name}(const element *__restrict__ planes, const float *__restrict__ bias,")
    lines.append(f"    const element *__restrict__ residual, element *__restrict__ y{parameter})")
    lines.append("{")
    lines.append("    const element *from = planes + (long long)blockIdx.x * TILE;")
    if buffers:
        lines.append("    SHARED;")
    lines.append("    switch (blockIdx.y) {")
    for row, group in enumerate(groups):
        lines.append(f"    case {row}: {{")
        sums = [(total, v) for total in range(len(group.filters)) for v in range(kernel.vectors)]
        lines.append(f"    float {', '.join(f'a{total}_{v} = 0' for total, v in sums)};")
        lines += _pieces(kernel, group, stages, first, values)
        lines += _results(kernel, group)
        lines.append("    } break;")
    lines += ["    }", "}", ""]
    grid = (kernel.positions // kernel.tile, len(groups))
    shared = buffers * stages * kernel.span * size
    return Module("\n".join(lines), name, grid, kernel.lanes, shared, (first, after) if held else (0, 0))


_STAGE: Final = """
/* Copy one tile's part of some planes to shared memory, 16 bytes a thread, without waiting for it. */
static __device__ __forceinline__ void stage(element *to, const element *from, int planes)
{
    const int many = 16 / sizeof(element), pieces = SPAN / many;
#pragma unroll 1
    for (int i = threadIdx.x; i < planes * pieces; i += LANES) {
        const int plane = i / pieces, place = i % pieces * many;
        COPY16(to + plane * SPAN + place, from + (long long)plane * PLANE + place);
    }
}
"""


def _pieces(kernel: Kernel, group: Group, stages: int, first: int, values: Sequence[float] | None) -> list[str]:
    """Every piece's multiply-adds, with the next one's planes on their way."""
    pieces = [piece for piece in group.pieces if piece.loads]
    lines = _staging(kernel, pieces[0], 0, stages) if pieces else []
    for index, piece in enumerate(pieces):
        last = index + 1 == len(pieces)
        if not last:
            lines += _staging(kernel, pieces[index + 1], (index + 1) % 2, stages)
        lines += [f"    WAIT({0 if last else 1});", "    __syncthreads();", "    {"]
        lines.append(f"    const element *x = staged + {index % 2 * stages * kernel.span} + threadIdx.x;")
        for load in piece.loads:
            places = [f"x[{load.offset + v * kernel.lanes}]" for v in range(kernel.vectors)]
            loaded = ", ".join(f"x{v} = wide({place})" for v, place in enumerate(places))
            lines.append(f"    {{ const float {loaded};")
            for total, value in load.uses:
                weight = f"w.v[{value - first}]" if values is None else _literal(values[value])
                products = [f"a{total}_{v} = fmaf(x{v}, {weight}, a{total}_{v});" for v in range(kernel.vectors)]
                lines.append("    " + " ".join(products))
            lines.append("    }")
        lines.append("    }")
        if not last:
            lines.append("    __syncthreads();")
    return lines


def _staging(kernel: Kernel, piece: Piece, buffer: int, stages: int) -> list[str]:
    """Copies of a piece's planes, neighbours by one loop."""
    base = buffer * stages * kernel.span
    lines: list[str] = []
    start = 0
    for at in range(1, len(piece.stage) + 1):
        if at == len(piece.stage) or piece.stage[at] != piece.stage[at - 1] + 1:
            place, plane = base + start * kernel.span, piece.stage[start]
            lines.append(f"    stage(staged + {place}, from + {plane}LL * PLANE, {at - start});")
            start = at
    return [*lines, "    COMMIT;"]


def _literal(value: float) -> str:
    """A float as C: exact, whatever it is."""
    if math.isnan(value):
        return "__int_as_float(0x7fc00000)"
    if math.isinf(value):
        return f"__int_as_float({'0x7f800000' if value > 0 else '0xff800000'})"
    return f"{float(value).hex()}f"


def _results(kernel: Kernel, group: Group) -> list[str]:
    """Sums to y, with what follows, where the position is a pixel."""
    lines: list[str] = []
    for v in range(kernel.vectors):
        lines.append("    {")
        lines.append(f"    const int at = blockIdx.x * TILE + {v * kernel.lanes} + threadIdx.x;")
        lines.append(
            "    const int line = at / PITCH, q = at % PITCH, image = line / IMAGE_ROWS, p = line % IMAGE_ROWS;"
        )
        lines.append("    if (q < Q && p < P && image < N) {")
        lines.append("        const long long to = ((long long)image * K * P + p) * Q + q;")
        for total, k in enumerate(group.filters):
            lines.append(f"        RESULT({k}, a{total}_{v});")
        lines.append("    }")
        lines.append("    }")
    return lines


_RESULT: Final = """#if BIAS
#define BIASED(k, v) ((v) + bias[k])
#else
#define BIASED(k, v) (v)
#endif
#if RESIDUAL
#define ADDED(k, v) ((v) + wide(residual[to + k##LL * P * Q]))
#else
#define ADDED(k, v) (v)
#endif
#if RELU6
#define ACTIVE(v) ((v) < 0 ? 0.0f : (v) > 6 ? 6.0f : (v))
#elif RELU
#define ACTIVE(v) ((v) < 0 ? 0.0f : (v))
#else
#define ACTIVE(v) (v)
#endif
#define RESULT(k, sum) { const float s = ADDED(k, BIASED(k, sum)); y[to + k##LL * P * Q] = narrow(ACTIVE(s)); }"""
