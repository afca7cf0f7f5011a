"""IR to CUDA C: one kernel; a row of blocks a group of filters, a thread some neighbouring pixels. No torch here.

A block computes a tile for one group. It copies the tile's part of the input, with padding inside, and the group's values to
shared memory, piece after piece, the next ones while this one computes; the code then takes words of neighbouring inputs and of
four values from there, so that nearly every instruction is a multiply-add. Where a kernel has splits, other warps compute
other taps of the same pixels, and their sums are added through shared memory. Each group is a function: units of some
functions are compiled side by side, and linked.

Values are data in memory. Read from a kernel's parameters, each pair of them cost an instruction of its own and a wait (ULDC,
seen in sm_90 code), and more than 8000 did not fit one launch. Immediates are written where the values are known and will not
change. Every name and number in the text is made from integers and floats of checked data classes; no header is included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from convoy.engines.pruned.ir import Group, Kernel, Piece
from convoy.engines.pruned.layout import Layout

UNIT_FMAS: Final = 4000
"""Multiply-add instructions of a compilation unit, about: NVRTC 13 takes half a millisecond for each, and units are compiled
side by side."""

ACTIVATIONS: Final = ("none", "relu", "relu6")

ELEMENT: Final = {"fp32": ("float", 4), "fp16": ("unsigned short", 2)}
"""Storage type and its bytes; fp16 is converted by instructions, for which no header is needed. Shared memory holds floats."""

WORD: Final = 4
"""Values of one load from shared memory."""

_ARGUMENTS: Final = (
    "const element *__restrict__ x, const float *__restrict__ values, const float *__restrict__ bias,\n"
    "    const element *__restrict__ residual, element *__restrict__ y"
)


@dataclass(frozen=True, slots=True)
class Step:
    """Pieces of a group that share a stage, one of each split that has one.

    Attributes:
        pieces: in the order of their splits.
        first: the first of their values.
        after: behind the last.
        packed: where the first stands among the packed values: a multiple of `WORD`.
    """

    pieces: tuple[Piece, ...]
    first: int
    after: int
    packed: int

    @property
    def stage(self) -> tuple[int, ...]:
        """Planes to copy."""
        return self.pieces[0].stage

    @property
    def floats(self) -> int:
        """Floats of shared memory that the values take."""
        return -(-(self.after - self.first) // WORD) * WORD


@dataclass(frozen=True, slots=True)
class Source:
    """The kernel of a layer.

    Attributes:
        head: CUDA C that every unit begins with.
        bodies: what follows it in each unit.
        name: the kernel.
        blocks: tiles times groups; tiles of one group are neighbours.
        threads: of a block.
        shared_bytes: dynamic shared memory of a block.
        packed: for each packed float the value that it is, or -1: padding; empty where values are immediates.
    """

    head: str
    bodies: tuple[str, ...]
    name: str
    blocks: int
    threads: int
    shared_bytes: int
    packed: tuple[int, ...]


def steps(kernel: Kernel) -> list[list[Step]]:
    """By group, its pieces as steps; pieces without code are left out."""
    found: list[list[Step]] = []
    first = packed = 0
    for group in kernel.groups:
        found.append([])
        for pieces in _together([piece for piece in group.pieces if piece.loads]):
            after = first + sum(piece.uses for piece in pieces)
            found[-1].append(Step(tuple(pieces), first, after, packed))
            packed += found[-1][-1].floats
            first = after
    return found


def _together(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    step: list[Piece] = []
    for piece in pieces:
        if step and (piece.split <= step[-1].split or piece.stage != step[-1].stage):
            yield step
            step = []
        step.append(piece)
    if step:
        yield step


def buffers_of(kernel: Kernel, shared_bytes: int) -> tuple[int, int]:
    """How many steps are in shared memory at once, and floats of one: all of a group's, or as many as fit, two at least."""
    found = steps(kernel)
    floats = max((kernel.span * len(step.stage) + step.floats for group in found for step in group), default=0)
    most = max(map(len, found), default=0)
    return min(most, max(2, shared_bytes // (4 * max(floats, 1)))), floats


def emit(
    kernel: Kernel,
    layout: Layout,
    *,
    bias: bool,
    residual: bool,
    activation: str,
    shared_bytes: int,
    values: Sequence[float] | None = None,
) -> Source:
    """The CUDA C code of a kernel.

    Args:
        kernel: verified code, staged, of one block that holds the whole batch.
        layout: its template.
        bias: whether a bias is added.
        residual: whether a residual is added.
        activation: one of `ACTIVATIONS`.
        shared_bytes: shared memory that a block's steps may fill, about; two are there at once whatever they take.
        values: numbers to make immediates of; None: values are data.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {ACTIVATIONS}")
    if layout.blocks != (1, 1):
        raise ValueError(f"{layout.blocks} blocks: CUDA code computes one block that holds the whole batch")
    if kernel.vectors not in (1, 2, 4):
        raise ValueError(f"{kernel.vectors} pixels of a thread: words have 1, 2 or 4")
    writer = _Writer(kernel, layout, steps(kernel), buffers_of(kernel, shared_bytes), values)
    head = writer.head(bias=bias, residual=residual, activation=activation)
    parts = _parts(kernel)
    bodies = ["\n".join(map(writer.function, part)) for part in parts]
    main = writer.kernel()
    bodies = [f"{bodies[0]}\n{main}"] if len(bodies) == 1 else [*bodies, main]
    held = [step for group in writer.steps for step in group] if values is None else []
    packed = [[*range(step.first, step.after), *[-1] * (step.floats - step.after + step.first)] for step in held]
    return Source(
        f"{head}\n", tuple(bodies), "convolve", writer.tiles * len(kernel.groups), writer.threads, writer.shared_bytes,
        tuple(place for step in packed for place in step),
    )  # fmt: skip


def _parts(kernel: Kernel) -> list[list[int]]:
    """Groups that make one unit."""
    parts: list[list[int]] = []
    fmas = 0
    for at, group in enumerate(kernel.groups):
        more = group.uses * kernel.vectors
        if not parts or fmas + more > UNIT_FMAS:
            parts.append([])
            fmas = 0
        parts[-1].append(at)
        fmas += more
    return parts


class _Writer:
    """What all units of a kernel share."""

    def __init__(
        self,
        kernel: Kernel,
        layout: Layout,
        found: list[list[Step]],
        buffers: tuple[int, int],
        values: Sequence[float] | None,
    ) -> None:
        self.code, self.layout, self.steps, self.values = kernel, layout, found, values
        self.buffers, self.floats = buffers
        self.tiles = kernel.positions // kernel.tile
        self.threads = kernel.lanes * kernel.splits
        self.planes = max((len(step.stage) for group in found for step in group), default=0)
        sums = max(len(group.filters) for group in kernel.groups) * kernel.tile * kernel.splits
        self.shared_bytes = 4 * max(self.buffers * self.floats, sums if kernel.splits > 1 else 0)

    def head(self, *, bias: bool, residual: bool, activation: str) -> str:
        """Sizes and flags as macros, and the functions that all groups use."""
        kernel, layout, problem = self.code, self.layout, self.layout.problem
        element = ELEMENT[problem.x_dtype][0]
        phases = [(p.row, p.column, p.first, p.after) for p in layout.phases] or [(0, 0, 0, 0)]
        run = len(phases) == 1 and self._is_run(layout.channels)
        sizes = {
            "N": problem.n, "C": problem.c, "H": problem.h, "W": problem.w, "K": problem.k, "P": problem.p, "Q": problem.q,
            "STRIDE_H": problem.stride_h, "STRIDE_W": problem.stride_w, "PAD_H": problem.pad_h, "PAD_W": problem.pad_w,
            "PITCH": layout.pitch, "IMAGE_ROWS": layout.image_rows, "PHASES": len(phases), "LANES": kernel.lanes,
            "VECTORS": kernel.vectors, "SPLITS": kernel.splits, "TILE": kernel.tile, "SPAN": kernel.span,
            "TILES": self.tiles, "THREADS": self.threads, "ALONG": along(kernel.span, max(self.planes, 1), self.threads),
        }  # fmt: skip
        flags = {
            "BIAS": int(bias), "RESIDUAL": int(residual), "RELU": int(activation != "none"),
            "RELU6": int(activation == "relu6"), "HALF": int(element != "float"),
            "WIDE_STORES": int(element == "float" and kernel.vectors > 1 and problem.q % kernel.vectors == 0
                               and layout.pitch % kernel.vectors == 0),
        }  # fmt: skip
        lines = [f"#define {name} {value}" for name, value in (sizes | flags).items()]
        table = ", ".join(f"{{{', '.join(map(str, phase))}}}" for phase in phases)
        lines += [f"typedef {element} element;", _COMMON]
        if run:
            row, column, first, after = phases[0]
            where = {"ROW": row, "COLUMN": column, "FIRST": first, "AFTER": after}
            where["CHANNEL"] = layout.channels[0] if layout.channels else 0
            lines += [f"#define {name} {value}" for name, value in where.items()]
            lines.append(_STAGE_RUN)
        lines.append(f"static __constant__ int phases[][4] = {{{table}}};")
        lines.append(f"static __constant__ int channels[] = {{{', '.join(map(str, layout.channels)) or '0'}}};")
        return "\n".join([*lines, _STAGE_LIST, _STAGE_VALUES, _RESULT])

    def _is_run(self, numbers: Sequence[int]) -> bool:
        return not numbers or tuple(numbers) == tuple(range(numbers[0], numbers[0] + len(numbers)))

    def kernel(self) -> str:
        """The kernel: a row of blocks calls its group's function."""
        rows = range(len(self.code.groups))
        calls = [f"    case {row}: group_{row}(x, values, bias, residual, y); break;" for row in rows]
        return "\n".join([
            *(f'extern "C" __device__ GROUP void group_{row}({_ARGUMENTS});' for row in rows),
            'extern "C" __global__ void __launch_bounds__(THREADS)', f"convolve({_ARGUMENTS})",
            "{", "    BEGIN;", "    switch (blockIdx.x / TILES) {", *calls, "    }", "}", "",
        ])  # fmt: skip

    def function(self, at: int) -> str:
        """A group's function."""
        kernel, group = self.code, self.code.groups[at]
        sums = [f"a{total}_{v} = 0" for total in range(len(group.filters)) for v in range(kernel.vectors)]
        lines = [f'extern "C" __device__ GROUP void group_{at}({_ARGUMENTS})', "{", "    SHARED;"]
        lines.append("    GLOBAL(bias); GLOBAL(residual); GLOBAL(y);")
        lines.append("    const int lane = threadIdx.x % LANES, split = threadIdx.x / LANES;")
        lines += [f"    float {', '.join(sums)};", "    AWAIT;"]
        lines += self._steps(at)
        lines += self._results(at, group)
        tables = self._tables(at, group)
        return "\n".join([*tables, *lines, "    END;", "}", ""])

    def _tables(self, at: int, group: Group) -> list[str]:
        """Constants of a group: filters and planes that are not neighbours."""
        lines = []
        if not self._is_run(group.filters):
            lines.append(f"static __constant__ int filters_{at}[] = {{{', '.join(map(str, group.filters))}}};")
        for index, step in enumerate(self.steps[at]):
            if not self._is_neighbours(step):
                planes = ", ".join(map(str, step.stage))
                lines.append(f"static __constant__ int planes_{at}_{index}[] = {{{planes}}};")
        return lines

    def _is_neighbours(self, step: Step) -> bool:
        """Whether a step's planes are copied without a table."""
        return len(self.layout.phases) == 1 and self._is_run(step.stage) and self._is_run(self.layout.channels)

    def _steps(self, at: int) -> list[str]:
        """Every step's multiply-adds, with as many steps as fit on their way."""
        found = self.steps[at]
        lines: list[str] = []
        for index in range(min(self.buffers, len(found))):
            lines += self._staging(at, index)
        for index, step in enumerate(found):
            under_way = min(len(found), self.buffers + index) - index - 1
            lines += [f"    WAIT({under_way});", "    __syncthreads();"]
            lines += self._code(step, index % self.buffers * self.floats)
            if index + self.buffers < len(found):
                lines += ["    __syncthreads();", *self._staging(at, index + self.buffers)]
        return lines

    def _staging(self, at: int, index: int) -> list[str]:
        """Copies of a step's values and planes."""
        step, base = self.steps[at][index], index % self.buffers * self.floats
        lines = []
        if self.values is None:
            lines.append(f"    stage_values(staged + {base}, values + {step.packed}, {step.floats});")
        if self._is_neighbours(step):
            lines.append(f"    stage_run(staged + {base + step.floats}, x, {step.stage[0]}, {len(step.stage)});")
        else:
            lines.append(f"    stage_list(staged + {base + step.floats}, x, planes_{at}_{index}, {len(step.stage)});")
        return [*lines, "    COMMIT;"]

    def _code(self, step: Step, base: int) -> list[str]:
        """A step's multiply-adds: each split runs its own."""
        lines = ["    {"]
        lines.append(f"    const WORDS *const x = (const WORDS *)(staged + {base + step.floats}) + lane;")
        if self.values is None:
            lines.append(f"    const float4 *const w = (const float4 *)(staged + {base});")
        if self.code.splits > 1:
            lines.append("    switch (split) {")
        for piece in step.pieces:
            if self.code.splits > 1:
                lines.append(f"    case {piece.split}: {{")
            lines += self._piece(piece, step.first)
            if self.code.splits > 1:
                lines.append("    } break;")
        if self.code.splits > 1:
            lines.append("    }")
        return [*lines, "    }"]

    def _piece(self, piece: Piece, first: int) -> list[str]:
        """A piece's multiply-adds; a word is loaded where it is used first."""
        vectors = self.code.vectors
        inputs: set[int] = set()
        weights: set[int] = set()
        lines: list[str] = []
        for load in piece.loads:
            needed = [load.offset + v for v in range(vectors)]
            for word in dict.fromkeys(place // vectors for place in needed):
                if word not in inputs:
                    inputs.add(word)
                    lines.append(f"    const WORDS x{word} = x[{word}];")
            for total, value in load.uses:
                weight, word = self._weight(value, first)
                if self.values is None and word not in weights:
                    weights.add(word)
                    lines.append(f"    const float4 w{word} = w[{word}];")
                products = [
                    f"a{total}_{v} = fmaf({self._part(f'x{place // vectors}', place)}, {weight}, a{total}_{v});"
                    for v, place in enumerate(needed)
                ]
                lines.append("    " + " ".join(products))
        return lines

    def _part(self, word: str, place: int) -> str:
        """One float of a word of inputs."""
        return word if self.code.vectors == 1 else f"{word}.{'xyzw'[place % self.code.vectors]}"

    def _weight(self, value: int, first: int) -> tuple[str, int]:
        """A value as an operand, and the word that holds it."""
        if self.values is not None:
            return _literal(self.values[value]), 0
        word, place = divmod(value - first, WORD)
        return f"w{word}.{'xyzw'[place]}", word

    def _results(self, at: int, group: Group) -> list[str]:
        """Sums to y, with what follows, where the position is a pixel."""
        kernel, count = self.code, len(group.filters)
        names = [f"a{total}_{{}}" for total in range(count)]
        if kernel.splits == 1:
            lines = ["    PLACE(lane);"]
            for name, k in zip(names, group.filters, strict=True):
                sums = ", ".join(name.format(v) for v in range(kernel.vectors))
                lines += [f"    {{ const float sums[] = {{{sums}}}; store({k}, place, sums, bias, residual, y); }}"]
            return lines
        lines = ["    __syncthreads();", f"    float *const sums = staged + split * {count} * TILE + VECTORS * lane;"]
        for total, name in enumerate(names):
            lines += [f"    sums[{total} * TILE + {v}] = {name.format(v)};" for v in range(kernel.vectors)]
        filters = f"{group.filters[0]} + total" if self._is_run(group.filters) else f"filters_{at}[total]"
        return [
            *lines, "    __syncthreads();", "    PLACE(lane);", "#pragma unroll",
            f"    for (int total = split; total < {count}; total += SPLITS)",
            f"        add_splits({filters}, staged + total * TILE + VECTORS * lane, {count} * TILE, place, bias, residual, y);",
        ]  # fmt: skip


def along(span: int, planes: int, threads: int) -> int:
    """Threads that go along a plane when it is copied; others copy other planes. What leaves the fewest rounds."""
    ways = [count for count in range(1, threads + 1) if threads % count == 0 and (count % 32 == 0 or count == threads)]
    return min(ways, key=lambda count: (-(-span // count) * -(-planes // (threads // count)), -count))


def _literal(value: float) -> str:
    """A float as C: exact, whatever it is."""
    if math.isnan(value):
        return "__int_as_float(0x7fc00000)"
    if math.isinf(value):
        return f"__int_as_float({'0x7f800000' if value > 0 else '0xff800000'})"
    return f"{float(value).hex()}f"


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

/* Copies to shared memory that are not waited for; where nothing is inside, the copy is a zero. */
#define COPY4(to, from, inside) \\
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" \\
                 :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"((inside) ? 4 : 0) : "memory")
#define COPY16(to, from) \\
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" \\
                 :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory")
#define COMMIT asm volatile("cp.async.commit_group;" ::: "memory")
#define WAIT(n) asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory")
#define SHARED extern __shared__ __align__(16) float staged[]
/* A linked function does not see that its arguments are a kernel's. */
#define GLOBAL(p) __builtin_assume(__isGlobal(p))
/* A group's function ends its thread: it need not put registers aside for a caller. */
#define GROUP __noinline__ __attribute__((noreturn))
#define END asm volatile("exit;"); __builtin_unreachable()
#if __CUDA_ARCH__ >= 900 /* the next kernel's blocks may come while this one runs; this one's wait for what the last wrote */
#define BEGIN asm volatile("griddepcontrol.launch_dependents;" ::: "memory")
#define AWAIT asm volatile("griddepcontrol.wait;" ::: "memory")
#else
#define BEGIN
#define AWAIT
#endif
#endif
#define BASE ((int)blockIdx.x % TILES * TILE) /* the tile's first position */
#if HALF /* converted on the way, which an asynchronous copy cannot do */
#define COPY(to, from, inside) (*(to) = (inside) ? wide(*(from)) : 0.0f)
#else
#define COPY(to, from, inside) COPY4(to, from, inside)
#endif
#if VECTORS == 4
typedef float4 WORDS;
#elif VECTORS == 2
typedef float2 WORDS;
#else
typedef float WORDS;
#endif
"""

_STAGE_RUN: Final = """
/* Copy one tile's part of neighbouring planes to shared memory, with padding inside; ALONG threads a plane. */
static __device__ __forceinline__ void stage_run(float *to, const element *x, int first, int planes)
{
#pragma unroll 1
    for (int i = threadIdx.x % ALONG; i < SPAN; i += ALONG) {
        const int at = BASE + i, line = at / PITCH, column = at % PITCH;
        const int image = line / IMAGE_ROWS < N ? line / IMAGE_ROWS : N - 1;
        const int h = (line - image * IMAGE_ROWS) * STRIDE_H + ROW - PAD_H, w = column * STRIDE_W + COLUMN - PAD_W;
        const bool inside = h >= 0 && h < H && column >= FIRST && column < AFTER;
        const element *from = x + (first + CHANNEL) * (H * W) + (inside ? image * (C * H * W) + h * W + w : 0);
#pragma unroll 4
        for (int plane = threadIdx.x / ALONG; plane < planes; plane += THREADS / ALONG)
            COPY(to + plane * SPAN + i, from + plane * (H * W), inside);
    }
}
"""

_STAGE_LIST: Final = """
/* Copy one tile's part of some planes to shared memory, with padding inside; ALONG threads a plane. */
static __device__ __forceinline__ void stage_list(float *to, const element *x, const int *list, int planes)
{
#pragma unroll 1
    for (int i = threadIdx.x % ALONG; i < SPAN; i += ALONG) {
        const int at = BASE + i, line = at / PITCH, column = at % PITCH;
        const int image = line / IMAGE_ROWS < N ? line / IMAGE_ROWS : N - 1;
#pragma unroll 4
        for (int plane = threadIdx.x / ALONG; plane < planes; plane += THREADS / ALONG) {
            const int *phase = phases[list[plane] % PHASES], channel = channels[list[plane] / PHASES];
            const int h = (line - image * IMAGE_ROWS) * STRIDE_H + phase[0] - PAD_H;
            const int w = column * STRIDE_W + phase[1] - PAD_W;
            const bool inside = h >= 0 && h < H && column >= phase[2] && column < phase[3];
            COPY(to + plane * SPAN + i, x + (inside ? ((image * C + channel) * H + h) * W + w : 0), inside);
        }
    }
}
"""

_STAGE_VALUES: Final = """
/* Copy values to shared memory. */
static __device__ __forceinline__ void stage_values(float *to, const float *from, int count)
{
#pragma unroll 1
    for (int i = 4 * threadIdx.x; i < count; i += 4 * THREADS)
        COPY16(to + i, from + i);
}
"""

_RESULT: Final = """
/* Where a pixel of filter 0 is in y; -1: between the rows. */
static __device__ __forceinline__ int place_of(int at)
{
    const int line = at / PITCH, column = at % PITCH, image = line / IMAGE_ROWS, row = line % IMAGE_ROWS;
    return column < Q && row < P && image < N ? (image * K * P + row) * Q + column : -1;
}

static __device__ __forceinline__ float finished(float sum, int k, int to, const float *bias, const element *residual)
{
#if BIAS
    sum += bias[k];
#endif
#if RESIDUAL
    sum += wide(residual[to]);
#endif
#if RELU6
    sum = sum < 0 ? 0.0f : sum > 6 ? 6.0f : sum;
#elif RELU
    sum = sum < 0 ? 0.0f : sum;
#endif
    return sum;
}

#if WIDE_STORES /* a thread's pixels are all there, in one row, or none is */
typedef int places;
#define PLACE(lane) const places place = place_of(BASE + VECTORS * lane)
static __device__ __forceinline__ void store(
    int k, const places &place, const float *sums, const float *bias, const element *residual, element *y)
{
    if (place < 0)
        return;
    const int to = place + k * (P * Q);
    WORDS found;
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        ((float *)&found)[v] = finished(sums[v], k, to + v, bias, residual);
    *(WORDS *)(y + to) = found;
}
#else
struct places { int to[VECTORS]; };
static __device__ __forceinline__ places places_of(int at)
{
    places found;
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        found.to[v] = place_of(at + v);
    return found;
}
#define PLACE(lane) const places place = places_of(BASE + VECTORS * lane)
static __device__ __forceinline__ void store(
    int k, const places &place, const float *sums, const float *bias, const element *residual, element *y)
{
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int to = place.to[v] + k * (P * Q);
        if (place.to[v] >= 0)
            y[to] = narrow(finished(sums[v], k, to, bias, residual));
    }
}
#endif

#if SPLITS > 1
/* The sums of all splits for one filter and a thread's pixels, added in order, to y. */
static __device__ __forceinline__ void add_splits(
    int k, const float *from, int split, const places &place, const float *bias, const element *residual, element *y)
{
    float sums[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        sums[v] = 0;
#pragma unroll
    for (int i = 0; i < SPLITS; i++) {
        const WORDS found = *(const WORDS *)(from + i * split);
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            sums[v] += ((const float *)&found)[v];
    }
    store(k, place, sums, bias, residual, y);
}
#endif
"""
