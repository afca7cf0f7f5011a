"""The text of generated CUDA kernels: one function for each group of filters, and the kernel that calls them. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from convoy.engines.hopper.nvrtc_source import defines, header_text
from convoy.engines.sparse_weights.codegen.cuda_copies import FOUR, MOST_ROUNDS, along, fours
from convoy.engines.sparse_weights.codegen.kernel_ir import Group, MaskKernel, Segment
from convoy.engines.sparse_weights.codegen.plane_layout import PlaneLayout
from convoy.engines.sparse_weights.codegen.staging_steps import WORD, StagingStep

FLOAT_BYTES: Final = 4

UNROLL_NONE: Final = "#pragma unroll 1"

CONSTANT_BYTES: Final = 60 << 10
"""Bytes of constant memory, of 64 KB, that all units' tables together may take once they are linked."""

ELEMENT: Final = {"fp32": ("float", 4), "fp16": ("unsigned short", 2)}
"""Storage type and its bytes; fp16 is converted by instructions, for which no header is needed. Shared memory holds floats."""

_ARGUMENTS: Final = (
    "const element *__restrict__ x, const float *__restrict__ values, const float *__restrict__ bias,\n"
    "    const element *__restrict__ residual, element *__restrict__ y"
)


class CudaWriter:
    """Writes all units of a kernel."""

    def __init__(
        self,
        kernel: MaskKernel,
        layout: PlaneLayout,
        found: list[list[StagingStep]],
        buffers: tuple[int, int],
        values: Sequence[float] | None,
        units: int,
    ) -> None:
        self.code, self.layout, self.steps, self.values = kernel, layout, found, values
        self.buffers, self.floats = buffers
        self.tiles, self.splits = kernel.positions // kernel.tile, kernel.splits
        self.threads = kernel.lanes * self.splits
        self.planes = max((len(step.stage) for group in found for step in group), default=0)
        shift = fours(layout, kernel.tile)
        copied = kernel.span if shift is None else kernel.span // FOUR
        self.along = along(copied, max(self.planes, 1), self.threads)
        self.rounds = -(-copied // self.along)
        # Neighbouring planes are copied without a table, by a thread that knows where its positions are.
        stages = [step.stage for group in found for step in group]
        self.run = (
            len(layout.phases) <= 1 and all(map(_is_run, (layout.channels, *stages))) and self.rounds <= MOST_ROUNDS
        )
        self.fours = self.run and shift is not None
        self.shift = shift if self.fours and shift is not None else 0
        sums = max(len(group.filters) for group in kernel.groups) * kernel.tile * self.splits
        self.shared_bytes = 4 * max(self.buffers * self.floats, sums if self.splits > 1 else 0)
        fits = self._table_bytes(units) <= CONSTANT_BYTES
        self.table = f"static {'__constant__' if fits else '__device__ const'}"

    def head(self, *, bias: bool, residual: bool, activation: str) -> str:
        """Sizes and flags as macros, and the functions that all groups use."""
        kernel, layout, problem = self.code, self.layout, self.layout.problem
        element = ELEMENT[problem.x_dtype][0]
        phases = [(p.row, p.column, p.first, p.after) for p in layout.phases] or [(0, 0, 0, 0)]
        sizes = {
            "N": problem.n, "C": problem.c, "H": problem.h, "W": problem.w, "K": problem.k, "P": problem.p, "Q": problem.q,
            "STRIDE_H": problem.stride_h, "STRIDE_W": problem.stride_w, "PAD_H": problem.pad_h, "PAD_W": problem.pad_w,
            "PITCH": layout.pitch, "IMAGE_ROWS": layout.image_rows, "PHASES": len(phases), "LANES": kernel.lanes,
            "VECTORS": kernel.vectors, "SPLITS": self.splits, "TILE": kernel.tile, "SPAN": kernel.span,
            "TILES": self.tiles, "THREADS": self.threads, "ALONG": self.along, "ROUNDS": self.rounds,
            "SHIFT": self.shift,
        }  # fmt: skip
        flags = {
            "BIAS": int(bias), "RESIDUAL": int(residual), "RELU": int(activation != "none"),
            "RELU6": int(activation == "relu6"), "HALF": int(element != "float"), "RUN": int(self.run), "FOURS": int(self.fours),
            "WIDE_STORES": int(element == "float" and kernel.vectors > 1 and problem.q % kernel.vectors == 0
                               and layout.pitch % kernel.vectors == 0),
        }  # fmt: skip
        where = dict.fromkeys(("ROW", "COLUMN", "CHANNEL"), 0)
        if self.run:
            first = layout.channels[0] if layout.channels else 0
            where = dict(zip(where, (*phases[0][:2], first), strict=True))
        table = ", ".join(f"{{{', '.join(map(str, phase))}}}" for phase in phases)
        tables = [] if self.run else [
            f"{self.table} int phases[][4] = {{{table}}};",
            f"{self.table} int channels[] = {{{', '.join(map(str, layout.channels)) or '0'}}};",
        ]  # fmt: skip
        return "\n".join(
            [defines(sizes | flags | where) + f"typedef {element} element;", *tables, header_text("pruned.cuh")]
        )

    def _table_bytes(self, units: int) -> int:
        """Bytes of `_tables` and of the head's tables, in `units` units that are linked."""
        found = sum(16 for group in self.steps for _ in group)
        found += sum(4 * len(group.filters) for group in self.code.groups if not _is_run(group.filters))
        if not self.run:
            found += sum(4 * len(step.stage) for group in self.steps for step in group)
            found += units * (16 * max(len(self.layout.phases), 1) + 4 * max(len(self.layout.channels), 1))
        return found

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
        sums = [f"a{index} = 0" for index in range(len(group.filters) * kernel.vectors)]
        lines = [f'extern "C" __device__ GROUP void group_{at}({_ARGUMENTS})', "{", "    SHARED;"]
        lines.append("    GLOBAL(bias); GLOBAL(residual); GLOBAL(y);")
        lines.append("    const int lane = threadIdx.x % LANES, split = threadIdx.x / LANES;")
        lines.append(f"    float {', '.join(sums)};")
        lines += ["    const sources source = sources_of();"] if self.run else []
        lines += self._steps(at)
        lines += self._results(at, group)
        tables = self._tables(at, group)
        return "\n".join([*tables, *lines, "    END;", "}", ""])

    def _tables(self, at: int, group: Group) -> list[str]:
        """Constants of a group: filters and planes that are not neighbours."""
        lines: list[str] = []
        if not _is_run(group.filters):
            lines.append(f"{self.table} int filters_{at}[] = {{{', '.join(map(str, group.filters))}}};")
        rows = [(step.packed, step.floats, step.stage[0], len(step.stage)) for step in self.steps[at]]
        if rows:
            table = ", ".join(f"{{{', '.join(map(str, row))}}}" for row in rows)
            lines.append(f"{self.table} int steps_{at}[][4] = {{{table}}};")
        for index, step in enumerate(self.steps[at]):
            if not self.run:
                planes = ", ".join(map(str, step.stage))
                lines.append(f"{self.table} int planes_{at}_{index}[] = {{{planes}}};")
        return lines

    def _steps(self, at: int) -> list[str]:
        """Every step's multiply-adds, with as many steps as fit on their way."""
        count, sums = len(self.steps[at]), len(self.code.groups[at].filters) * self.code.vectors
        under_way = min(self.buffers, count)
        lines = [*self._values(at, 0, under_way), "    AWAIT;", *self._planes(at, 0, under_way)]
        for index, step in enumerate(self.steps[at]):
            lines += [f"    WAIT({under_way - index - 1});", "    __syncthreads();"]
            lines += self._code(step, index % self.buffers * self.floats, sums)
            if under_way < count:
                first, under_way = under_way, under_way + 1
                lines.append("    __syncthreads();")
                lines += [*self._values(at, first, under_way), *self._planes(at, first, under_way)]
        return lines

    def _values(self, at: int, start: int, stop: int) -> list[str]:
        """Copies of some steps' values."""
        if self.values is not None or start == stop:
            return []
        return [
            UNROLL_NONE, f"    for (int i = {start}; i < {stop}; i++)",
            f"        stage_values(staged + i % {self.buffers} * {self.floats}, values + steps_{at}[i][0], steps_{at}[i][1]);",
        ]  # fmt: skip

    def _planes(self, at: int, start: int, stop: int) -> list[str]:
        """Copies of some steps' planes, each step with its own wait."""
        found = self.steps[at][start:stop]
        if self.run and found:
            base = f"staged + i % {self.buffers} * {self.floats} + steps_{at}[i][1]"
            return [
                UNROLL_NONE, f"    for (int i = {start}; i < {stop}; i++) {{",
                f"        stage_run({base}, x, steps_{at}[i][2], steps_{at}[i][3], source);", "        COMMIT;", "    }",
            ]  # fmt: skip
        lines: list[str] = []
        for index, step in enumerate(found, start):
            base = f"staged + {index % self.buffers * self.floats + step.floats}"
            lines += [f"    stage_list({base}, x, planes_{at}_{index}, {len(step.stage)});", "    COMMIT;"]
        return lines

    def _code(self, step: StagingStep, base: int, sums: int) -> list[str]:
        """A step's multiply-adds: each split runs its own."""
        lines = ["    {"]
        lines.append(f"    const address inputs = ADDRESS((const WORDS *)(staged + {base + step.floats}) + lane);")
        lines.append(f"    const address weights = ADDRESS(staged + {base});")
        if self.splits > 1:
            lines.append("    switch (split) {")
        for segment in step.segments:
            if self.splits > 1:
                lines.append(f"    case {segment.split}: {{")
            lines += self._segment(segment, step.first, sums)
            if self.splits > 1:
                lines.append("    } break;")
        if self.splits > 1:
            lines.append("    }")
        return [*lines, "    }"]

    def _segment(self, segment: Segment, first: int, sums: int) -> list[str]:
        """A segment's multiply-adds, as macros of pruned.cuh; a word is loaded at its first use."""
        vectors = self.code.vectors
        inputs: set[int] = set()
        weights: set[int] = set()
        lines = [f"    BEGIN_CODE({sums}, {sums + 1})"]
        for load in segment.loads:
            needed = [load.offset + self.shift + v for v in range(vectors)]
            for word in dict.fromkeys(place // vectors for place in needed):
                if word not in inputs:
                    inputs.add(word)
                    lines.append(f"    LOAD{vectors}({word}, {FLOAT_BYTES * vectors * word})")
            for total, value in load.uses:
                multiply, weight, word = self._weight(value, first)
                if self.values is None and word not in weights:
                    weights.add(word)
                    lines.append(f"    VALUES({word}, {FLOAT_BYTES * WORD * word})")
                products = [
                    f"{multiply}({total * vectors + v}, {self._part(place)}, {weight})"
                    for v, place in enumerate(needed)
                ]
                lines.append("    " + " ".join(products))
        return [*lines, f"    END_CODE({', '.join(f'SUM(a{index})' for index in range(sums))})"]

    def _part(self, place: int) -> str:
        """The variable that holds one input."""
        word, part = divmod(place, self.code.vectors)
        return f"x{word}" if self.code.vectors == 1 else f"x{word}{'xyzw'[part]}"

    def _weight(self, value: int, first: int) -> tuple[str, str, int]:
        """The multiply macro of a value, its operand, and the word that holds it."""
        if self.values is not None:
            return "FMA_BITS", _bits(self.values[value]), 0
        word, place = divmod(value - first, WORD)
        return "FMA", f"w{word}{'xyzw'[place]}", word

    def _results(self, at: int, group: Group) -> list[str]:
        """Store the sums with the epilogue to y, if the position is a pixel."""
        kernel, count = self.code, len(group.filters)
        names = [[f"a{total * kernel.vectors + v}" for v in range(kernel.vectors)] for total in range(count)]
        if self.splits == 1:
            lines = ["    PLACE(lane);"]
            for own, k in zip(names, group.filters, strict=True):
                sums = ", ".join(own)
                lines += [f"    {{ const float sums[] = {{{sums}}}; store({k}, place, sums, bias, residual, y); }}"]
            return lines
        lines = ["    __syncthreads();", f"    float *const sums = staged + split * {count} * TILE + VECTORS * lane;"]
        for total, own in enumerate(names):
            lines += [f"    sums[{total} * TILE + {v}] = {name};" for v, name in enumerate(own)]
        filters = f"{group.filters[0]} + total" if _is_run(group.filters) else f"filters_{at}[total]"
        return [
            *lines, "    __syncthreads();", "    PLACE(lane);", UNROLL_NONE,
            f"    for (int total = split; total < {count}; total += SPLITS)",
            f"        add_splits({filters}, staged + total * TILE + VECTORS * lane, {count} * TILE, place, bias, residual, y);",
        ]  # fmt: skip


def _is_run(numbers: Sequence[int]) -> bool:
    """Whether the numbers are consecutive."""
    return tuple(numbers) == tuple(range(numbers[0], numbers[0] + len(numbers))) if numbers else True


def _bits(value: float) -> str:
    """A float's bits in hexadecimal: exact, whatever it is."""
    return f"{int(np.float32(value).view(np.uint32)):08X}"
