"""IR to C: vectors of pixels, one function a segment, and a driver that pads, partitions and finishes. No torch here.

All names and numbers in the text come from integers of checked data classes. Segments are C with the vector types of gcc and
clang, or assembly if `emit_x86` supports the CPU.

Threads share the multiply-adds: blocks, groups of filters and tiles form one sequence, which is cut into parts of equal cost,
so that every thread gets equal work for many pixels and for few. Each thread pads the input of a block itself, just before it
is read: the input is then in that core's cache, and no thread waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from convoy.engines.sparse_weights.codegen import emit_x86
from convoy.engines.sparse_weights.codegen.kernel_ir import Group, MaskKernel, Segment
from convoy.engines.sparse_weights.codegen.plane_layout import PlaneLayout, odd_lines

FILL: Final = Path(__file__).with_name("fill.c")
"""The part of the driver that pads: it needs the sizes and the tables of channels and phases, which are written before it."""

FINISH: Final = Path(__file__).with_name("finish.c")
"""The code behind the sums, and the partition among threads: it needs the table of groups too."""

FUSED: Final = ("none", "relu", "relu6")
"""Activations that the C code applies; others follow by torch."""

GROUP_COST: Final = 4
"""Cost of a sum's start and end, in multiply-adds: the store, the load and the epilogue."""

SUMS_BYTES: Final = 16 << 10
"""Half a first cache of 32 KB: the other half is for the input."""

UNIT_USES: Final = {"": 6_000, "avx512": 60_000, "avx2": 60_000}
"""Multiply-adds of a translation unit, approximately, by the instruction set of its assembly: half a second of a core. Units are
compiled in parallel."""


@dataclass(frozen=True, slots=True)
class CSource:
    """C sources of one kernel, and its memory.

    Attributes:
        units: translation units, to be linked together; the last has the entry point `convoy_pruned`.
        thread_bytes: scratch of each thread.
        cost: multiply-adds of vectors in all.
    """

    units: tuple[str, ...]
    thread_bytes: int
    cost: int


def emit(
    kernel: MaskKernel, layout: PlaneLayout, *, bias: bool, residual: bool, activation: str, arch: str = ""
) -> CSource:
    """The C code of a kernel.

    Args:
        kernel: verified code that is not staged.
        layout: the layout of its input.
        bias: whether a bias is added.
        residual: whether a residual is added.
        activation: one of `FUSED`.
        arch: the CPU's instruction set, as `Target.arch` names it: segments are assembly if `emit_x86` supports it, else C.
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
    if len(units) == 1:  # a small kernel is compiled at once
        units, driver = [], units[0] + driver
    return CSource((*units, driver), -(-4 * scratch // 256) * 256, _total(kernel, layout))


def run_tiles(filters: int, tile: int, positions: int) -> int:
    """Tiles whose sums are finished before the next tiles: as many as stay in the L1 cache, for a group's filters."""
    return max(1, min(SUMS_BYTES // (4 * max(filters, 1) * tile), positions // tile))


def sums_pitch(filters: int, tile: int, positions: int) -> int:
    """Floats from one filter's sums to the next one's."""
    return odd_lines(run_tiles(filters, tile, positions) * tile)


def _largest(kernel: MaskKernel) -> int:
    return max((len(group.filters) for group in kernel.groups), default=0)


def _sums_pitch(kernel: MaskKernel) -> int:
    return sums_pitch(_largest(kernel), kernel.tile, kernel.positions)


def _sums_floats(kernel: MaskKernel) -> int:
    return _sums_pitch(kernel) * _largest(kernel)


def _costs(kernel: MaskKernel) -> list[int]:
    """Cost of one tile of each group, in multiply-adds of vectors."""
    return [kernel.vectors * (group.uses + GROUP_COST * len(group.filters)) for group in kernel.groups]


def _total(kernel: MaskKernel, layout: PlaneLayout) -> int:
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


def prelude(kernel: MaskKernel) -> str:
    """Types that the segments use."""
    return _PRELUDE.replace("@BYTES@", str(4 * kernel.lanes))


_HIDDEN: Final = '#define HIDDEN __attribute__((visibility("hidden")))\n'

_PRELUDE: Final = """typedef float vec __attribute__((vector_size(@BYTES@)));
typedef float vec_at __attribute__((vector_size(@BYTES@), aligned(4), may_alias));
#define LOAD(at) (*(const vec_at *)(at))
#define STORE(at, v) (*(vec_at *)(at) = (v))
"""


def _units(kernel: MaskKernel, assembly: str) -> list[list[str]]:
    """Functions of all segments, in units of about `UNIT_USES` multiply-adds."""
    units: list[list[str]] = [[]]
    size = 0
    for at, group in enumerate(kernel.groups):
        for index, segment in enumerate(group.segments):
            more = segment.uses * kernel.vectors
            if size and size + more > UNIT_USES[assembly]:
                units.append([])
                size = 0
            name = f"piece_{at}_{index}"
            if assembly:
                made = emit_x86.function(kernel, group, segment, name, _sums_pitch(kernel), assembly)
            else:
                made = _function(kernel, group, segment, name)
            units[-1].append(made)
            size += more
    return units


def _function(kernel: MaskKernel, group: Group, segment: Segment, name: str) -> str:
    """One segment for one tile: x, w and y are the tile's input, the values and the tile's sums."""
    pitch, sums, vectors = _sums_pitch(kernel), range(len(group.filters)), range(kernel.vectors)
    lines = [
        f"HIDDEN void {name}(const float *restrict x, const float *restrict w, float *restrict y);",
        f"HIDDEN void {name}(const float *restrict x, const float *restrict w, float *restrict y)",
        "{",
    ]
    if not segment.loads:
        lines.append("    (void)x, (void)w;")
    for total in sums:
        places = [f"y + {total * pitch + v * kernel.lanes}" for v in vectors]
        held = ", ".join(f"a{total}_{v} = {'{0}' if segment.begins else f'LOAD({places[v]})'}" for v in vectors)
        lines.append(f"    vec {held};")
    first = segment.loads[0].uses[0][1] if segment.loads else 0
    for load in segment.loads:
        loaded = ", ".join(f"x{v} = LOAD(x + {load.offset + v * kernel.lanes})" for v in vectors)
        lines.append(f"    {{ const vec {loaded};")
        for total, value in load.uses:
            products = " ".join(f"a{total}_{v} += x{v} * w[{value - first}];" for v in vectors)
            lines.append(f"    {products}")
        lines.append("    }")
    lines += [f"    STORE(y + {t * pitch + v * kernel.lanes}, a{t}_{v});" for t in sums for v in vectors]
    return "\n".join([*lines, "}", ""])


def _driver(kernel: MaskKernel, layout: PlaneLayout, *, bias: bool, residual: bool, activation: str) -> str:
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
    return "\n".join([*lines, *_fixed(FILL), *_group_functions(kernel), *_fixed(FINISH)])


def _fixed(source: Path) -> list[str]:
    """The lines of a part that is the same in every kernel."""
    return ["", source.read_text(encoding="utf-8")]


def _group_functions(kernel: MaskKernel) -> list[str]:
    """One function a group, which runs its segments over tiles; and the table of groups."""
    lines: list[str] = []
    table: list[str] = []
    filters: list[int] = []
    for at, (group, cost) in enumerate(zip(kernel.groups, _costs(kernel), strict=True)):
        names = [f"piece_{at}_{index}" for index in range(len(group.segments))]
        lines += [f"HIDDEN void {name}(const float *, const float *, float *);" for name in names]
        lines.append(f"static void group_{at}(const float *x, const float *w, float *y, ptrdiff_t tiles)")
        lines.append("{")
        for name, segment in zip(names, group.segments, strict=True):
            first = segment.loads[0].uses[0][1] if segment.loads else 0
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
