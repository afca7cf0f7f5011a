"""IR to C: vectors of pixels, one function a piece, and a driver that pads, partitions and finishes. No torch here.

Every name and number in the text is made from integers of checked data classes. Pieces are C with the vector types of gcc and
clang, or assembly where `emit_x86` knows the CPU.

Threads share out the multiply-adds: blocks, groups of filters and tiles in one row, cut into equal parts by cost, so that any
number of threads gets equal work, whether there are many pixels or few. Each thread pads the input of a block for itself, just
before it is read: it is then in that core's cache, and threads wait for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from convoy.engines.pruned import emit_x86
from convoy.engines.pruned.ir import Group, Kernel, Piece
from convoy.engines.pruned.layout import Layout, odd_lines

FUSED: Final = ("none", "relu", "relu6")
"""Activations that the C code applies; others follow by torch."""

GROUP_COST: Final = 4
"""Cost of a sum's beginning and end, in multiply-adds: the store, the load and what the epilogue does."""

SUMS_BYTES: Final = 16 << 10
"""Half a first cache of 32 KB: the other half is for the input."""

UNIT_USES: Final = {"": 6_000, "avx512": 60_000, "avx2": 60_000}
"""Multiply-adds of a translation unit, about, by the instruction set that pieces are assembly for: half a second of a core. Units
are compiled side by side."""


@dataclass(frozen=True, slots=True)
class Source:
    """C sources of one kernel, and the memory that it wants.

    Attributes:
        units: translation units, to be linked together; the last has the entry point `convoy_pruned`.
        thread_bytes: scratch of each thread.
        cost: multiply-adds of vectors in all.
    """

    units: tuple[str, ...]
    thread_bytes: int
    cost: int


def emit(kernel: Kernel, layout: Layout, *, bias: bool, residual: bool, activation: str, arch: str = "") -> Source:
    """The C code of a kernel.

    Args:
        kernel: verified code that is not staged.
        layout: its template.
        bias: whether a bias is added.
        residual: whether a residual is added.
        activation: one of `FUSED`.
        arch: the CPU's instruction set, as `Target.arch` names it: pieces are assembly where `emit_x86` knows it, else C.
    """
    if activation not in FUSED:
        raise ValueError(f"activation {activation!r} is not one of {FUSED}")
    if kernel.splits > 1:
        raise ValueError(f"{kernel.splits} splits: in C a thread has all of a tile's sums")
    assembly = arch if emit_x86.fits(kernel, arch) else ""
    head = _HIDDEN + ("" if assembly else prelude(kernel))
    units = [head + "".join(unit) for unit in _units(kernel, assembly)]
    driver = _driver(kernel, layout, bias=bias, residual=residual, activation=activation)
    scratch = layout.plane * layout.planes + _sums_floats(kernel)
    if len(units) == 1:  # a small kernel is one run of the compiler
        units, driver = [], units[0] + driver
    return Source((*units, driver), -(-4 * scratch // 256) * 256, _total(kernel, layout))


def run_tiles(filters: int, tile: int, positions: int) -> int:
    """Tiles whose sums are finished before the next are begun: as many as stay in the first cache, for a group's filters."""
    return max(1, min(SUMS_BYTES // (4 * max(filters, 1) * tile), positions // tile))


def sums_pitch(filters: int, tile: int, positions: int) -> int:
    """Floats from one filter's sums to the next one's."""
    return odd_lines(run_tiles(filters, tile, positions) * tile)


def _largest(kernel: Kernel) -> int:
    return max((len(group.filters) for group in kernel.groups), default=0)


def _sums_pitch(kernel: Kernel) -> int:
    return sums_pitch(_largest(kernel), kernel.tile, kernel.positions)


def _sums_floats(kernel: Kernel) -> int:
    return _sums_pitch(kernel) * _largest(kernel)


def _costs(kernel: Kernel) -> list[int]:
    """Cost of one tile of each group, in multiply-adds of vectors."""
    return [kernel.vectors * (group.uses + GROUP_COST * len(group.filters)) for group in kernel.groups]


def _total(kernel: Kernel, layout: Layout) -> int:
    images, rows = layout.blocks
    full_rows, full_images = layout.problem.p // layout.rows, layout.problem.n // layout.images
    tiles = 0
    for image in range(images) if images <= 2 else (0, images - 1):
        for row in range(rows) if rows <= 2 else (0, rows - 1):
            count_images = layout.images if image < full_images else layout.problem.n - image * layout.images
            count_rows = layout.rows if row < full_rows else layout.problem.p - row * layout.rows
            last = ((count_images - 1) * layout.image_rows + count_rows - 1) * layout.pitch + layout.problem.q
            times = (images - 1 if images > 2 and image == 0 else 1) * (rows - 1 if rows > 2 and row == 0 else 1)
            tiles += times * -(-last // layout.tile)
    return tiles * sum(_costs(kernel))


def prelude(kernel: Kernel) -> str:
    """Types of the pieces."""
    return _PRELUDE.replace("@BYTES@", str(4 * kernel.lanes))


_HIDDEN: Final = '#define HIDDEN __attribute__((visibility("hidden")))\n'

_PRELUDE: Final = """typedef float vec __attribute__((vector_size(@BYTES@)));
typedef float vec_at __attribute__((vector_size(@BYTES@), aligned(4), may_alias));
#define LOAD(at) (*(const vec_at *)(at))
#define STORE(at, v) (*(vec_at *)(at) = (v))
"""


def _units(kernel: Kernel, assembly: str) -> list[list[str]]:
    """Functions of all pieces, in units of about `UNIT_USES` multiply-adds."""
    units: list[list[str]] = [[]]
    size = 0
    for at, group in enumerate(kernel.groups):
        for index, piece in enumerate(group.pieces):
            more = piece.uses * kernel.vectors
            if size and size + more > UNIT_USES[assembly]:
                units.append([])
                size = 0
            name = f"piece_{at}_{index}"
            if assembly:
                made = emit_x86.function(kernel, group, piece, name, _sums_pitch(kernel), assembly)
            else:
                made = _function(kernel, group, piece, name)
            units[-1].append(made)
            size += more
    return units


def _function(kernel: Kernel, group: Group, piece: Piece, name: str) -> str:
    """One piece for one tile: x, w and y are the tile's input, the values and the tile's sums."""
    pitch, sums, vectors = _sums_pitch(kernel), range(len(group.filters)), range(kernel.vectors)
    lines = [
        f"HIDDEN void {name}(const float *restrict x, const float *restrict w, float *restrict y);",
        f"HIDDEN void {name}(const float *restrict x, const float *restrict w, float *restrict y)",
        "{",
    ]
    if not piece.loads:
        lines.append("    (void)x, (void)w;")
    for total in sums:
        places = [f"y + {total * pitch + v * kernel.lanes}" for v in vectors]
        held = ", ".join(f"a{total}_{v} = {'{0}' if piece.begins else f'LOAD({places[v]})'}" for v in vectors)
        lines.append(f"    vec {held};")
    first = piece.loads[0].uses[0][1] if piece.loads else 0
    for load in piece.loads:
        loaded = ", ".join(f"x{v} = LOAD(x + {load.offset + v * kernel.lanes})" for v in vectors)
        lines.append(f"    {{ const vec {loaded};")
        for total, value in load.uses:
            products = " ".join(f"a{total}_{v} += x{v} * w[{value - first}];" for v in vectors)
            lines.append(f"    {products}")
        lines.append("    }")
    lines += [f"    STORE(y + {t * pitch + v * kernel.lanes}, a{t}_{v});" for t in sums for v in vectors]
    return "\n".join([*lines, "}", ""])


def _driver(kernel: Kernel, layout: Layout, *, bias: bool, residual: bool, activation: str) -> str:
    problem = layout.problem
    images, rows = layout.blocks
    sizes = {
        "N": problem.n,
        "C": problem.c,
        "H": problem.h,
        "W": problem.w,
        "K": problem.k,
        "P": problem.p,
        "Q": problem.q,
        "PAD_H": problem.pad_h,
        "STRIDE_H": problem.stride_h,
        "STRIDE_W": problem.stride_w,
        "PAD_W": problem.pad_w,
        "REACH_H": layout.reach_h,
        "PITCH": layout.pitch,
        "IMAGE_ROWS": layout.image_rows,
        "IMAGES": layout.images,
        "ROWS": layout.rows,
        "IMAGE_BLOCKS": images,
        "ROW_BLOCKS": rows,
        "CHANNELS": len(layout.channels),
        "PHASES": len(layout.phases),
        "PLANE": layout.plane,
        "TILE": kernel.tile,
        "SUMS": _sums_pitch(kernel),
        "RUN": run_tiles(_largest(kernel), kernel.tile, kernel.positions),
        "GROUPS": len(kernel.groups),
        "GROUP_COST": sum(_costs(kernel)),
        "TOTAL_COST": _total(kernel, layout),
        "BLOCK_FLOATS": layout.plane * layout.planes,
        "THREAD_FLOATS": -(-(layout.plane * layout.planes + _sums_floats(kernel)) // 64) * 64,
    }
    flags = {"BIAS": int(bias), "RESIDUAL": int(residual), "RELU": int(activation != "none")}
    flags["RELU6"] = int(activation == "relu6")
    lines = ["#include <stddef.h>", "#include <string.h>", _HIDDEN.rstrip()]
    lines += [f"#define {name} ((ptrdiff_t){value})" for name, value in sizes.items()]
    lines += [f"#define {name} {value}" for name, value in flags.items()]
    phases = ", ".join(f"{{{p.row}, {p.column}, {p.first}, {p.after}}}" for p in layout.phases) or "{0, 0, 0, 0}"
    lines.append(f"static const ptrdiff_t channels[] = {{{_list(layout.channels) or '0'}}};")
    lines.append(f"static const struct {{ ptrdiff_t row, column, first, after; }} phases[] = {{{phases}}};")
    return "\n".join([*lines, _FILL, *_group_functions(kernel), _FINISH, _ENTRY])


def _group_functions(kernel: Kernel) -> list[str]:
    """One function a group, which runs its pieces over tiles; and the table of groups."""
    lines: list[str] = []
    table: list[str] = []
    filters: list[int] = []
    for at, (group, cost) in enumerate(zip(kernel.groups, _costs(kernel), strict=True)):
        names = [f"piece_{at}_{index}" for index in range(len(group.pieces))]
        lines += [f"HIDDEN void {name}(const float *, const float *, float *);" for name in names]
        lines.append(f"static void group_{at}(const float *x, const float *w, float *y, ptrdiff_t tiles)")
        lines.append("{")
        for name, piece in zip(names, group.pieces, strict=True):
            first = piece.loads[0].uses[0][1] if piece.loads else 0
            lines.append("    for (ptrdiff_t t = 0; t < tiles; t++)")
            lines.append(f"        {name}(x + t * TILE, w + {first}, y + t * TILE);")
        lines.append("}")
        table.append(f"{{group_{at}, {cost}, {len(filters)}, {len(group.filters)}}}")
        filters += group.filters
    lines.append(f"static const int filters[] = {{{_list(filters)}}};")
    lines.append("static const struct group {")
    lines.append("    void (*run)(const float *, const float *, float *, ptrdiff_t);")
    lines.append(
        f"    ptrdiff_t cost, first, count;\n}} groups[] = {{\n    {(',' + chr(10) + '    ').join(table)}\n}};"
    )
    return lines


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


_FILL: Final = """
struct job {
    const float *x, *w, *bias, *residual;
    float *y, *scratch;
};

static inline ptrdiff_t least(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }
static inline ptrdiff_t most(ptrdiff_t a, ptrdiff_t b) { return a > b ? a : b; }

/* The padded input of a block: its images from `image` on, its output rows from `row` on. */
static void fill(const float *restrict x, float *restrict block, ptrdiff_t image, ptrdiff_t images, ptrdiff_t row,
                 ptrdiff_t rows)
{
    for (ptrdiff_t slot = 0; slot < CHANNELS; slot++)
        for (ptrdiff_t phase = 0; phase < PHASES; phase++) {
            float *restrict to = block + (slot * PHASES + phase) * PLANE;
            float *const end = to + PLANE;
            const ptrdiff_t first = phases[phase].first, after = phases[phase].after;
            for (ptrdiff_t i = 0; i < images; i++) {
                const float *in = x + ((image + i) * C + channels[slot]) * H * W;
                const ptrdiff_t tall = i + 1 < images ? IMAGE_ROWS : rows + REACH_H;
                for (ptrdiff_t j = 0; j < tall; j++, to += PITCH) {
                    const ptrdiff_t h = (row + j) * STRIDE_H + phases[phase].row - PAD_H;
                    if (h < 0 || h >= H) {
                        memset(to, 0, sizeof(float) * (size_t)PITCH);
                        continue;
                    }
                    const float *restrict from = in + h * W + (first * STRIDE_W + phases[phase].column - PAD_W);
                    for (ptrdiff_t t = 0; t < first; t++)
                        to[t] = 0;
                    for (ptrdiff_t t = first; t < after; t++)
                        to[t] = from[(t - first) * STRIDE_W];
                    for (ptrdiff_t t = after; t < PITCH; t++)
                        to[t] = 0;
                }
            }
            memset(to, 0, sizeof(float) * (size_t)(end - to));
        }
}
"""

_FINISH: Final = """
static inline float finished(float v)
{
#if RELU
    v = v < 0 ? 0 : v;
#endif
#if RELU6
    v = v > 6 ? 6 : v;
#endif
    return v;
}

/* Sums at positions [from, to) of a block, the first of them at `sums`, to y, with all that follows. */
static void finish(const struct job *job, const struct group *group, const float *restrict sums, ptrdiff_t image,
                   ptrdiff_t row, ptrdiff_t rows, ptrdiff_t from, ptrdiff_t to)
{
    for (ptrdiff_t f = 0; f < group->count; f++, sums += SUMS) {
        const ptrdiff_t k = filters[group->first + f];
#if BIAS
        const float bias = job->bias[k];
#else
        const float bias = 0;
#endif
        for (ptrdiff_t line = from / PITCH; line * PITCH < to; line++) {
            const ptrdiff_t i = IMAGES > 1 ? line / IMAGE_ROWS : 0, p = IMAGES > 1 ? line % IMAGE_ROWS : line;
            const ptrdiff_t a = most(from - line * PITCH, 0), b = least(to - line * PITCH, Q);
            if (p >= rows)
                continue;
            const float *restrict s = sums + (line * PITCH - from);
            const ptrdiff_t at = (((image + i) * K + k) * P + row + p) * Q;
            float *restrict y = job->y + at;
#if RESIDUAL
            const float *restrict residual = job->residual + at;
            for (ptrdiff_t q = a; q < b; q++)
                y[q] = finished(s[q] + bias + residual[q]);
#else
            for (ptrdiff_t q = a; q < b; q++)
                y[q] = finished(s[q] + bias);
#endif
        }
    }
}
"""

_ENTRY: Final = """
/* First tile whose cost begins at `bound` or later, of tiles that begin at `at` and cost `cost` each. */
static inline ptrdiff_t tile_at(ptrdiff_t bound, ptrdiff_t at, ptrdiff_t cost, ptrdiff_t tiles)
{
    return bound <= at ? 0 : least((bound - at + cost - 1) / cost, tiles);
}

/* The share of one thread: everything whose cost begins in [low, high). */
static void share(const struct job *job, ptrdiff_t thread, ptrdiff_t threads)
{
    const ptrdiff_t low = TOTAL_COST / threads * thread + TOTAL_COST % threads * thread / threads;
    const ptrdiff_t high = TOTAL_COST / threads * (thread + 1) + TOTAL_COST % threads * (thread + 1) / threads;
    float *block = job->scratch + thread * THREAD_FLOATS, *sums = block + BLOCK_FLOATS;
    ptrdiff_t at = 0;
    for (ptrdiff_t index = 0; index < IMAGE_BLOCKS * ROW_BLOCKS && at < high; index++) {
        const ptrdiff_t image = index / ROW_BLOCKS * IMAGES, row = index % ROW_BLOCKS * ROWS;
        const ptrdiff_t images = least(IMAGES, N - image), rows = least(ROWS, P - row);
        const ptrdiff_t positions = ((images - 1) * IMAGE_ROWS + rows - 1) * PITCH + Q;
        const ptrdiff_t tiles = (positions + TILE - 1) / TILE;
        int filled = 0;
        for (ptrdiff_t g = 0; g < GROUPS; g++) {
            const ptrdiff_t cost = groups[g].cost;
            const ptrdiff_t from = tile_at(low, at, cost, tiles), to = tile_at(high, at, cost, tiles);
            at += tiles * cost;
            if (from >= to)
                continue;
            if (!filled)
                fill(job->x, block, image, images, row, rows);
            filled = 1;
            for (ptrdiff_t t = from; t < to; t += RUN) {
                const ptrdiff_t end = least(t + RUN, to);
                groups[g].run(block + t * TILE, job->w, sums, end - t);
                finish(job, &groups[g], sums, image, row, rows, t * TILE, least(end * TILE, positions));
            }
        }
    }
}

#ifdef _OPENMP
#include <omp.h>
#endif

void convoy_pruned(const float *x, const float *w, const float *bias, const float *residual, float *y, float *scratch,
                   int threads);
void convoy_pruned(const float *x, const float *w, const float *bias, const float *residual, float *y, float *scratch,
                   int threads)
{
    const struct job job = {x, w, bias, residual, y, scratch};
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        share(&job, omp_get_thread_num(), omp_get_num_threads());
        return;
    }
#endif
    (void)threads;
    share(&job, 0, 1);
}
"""
