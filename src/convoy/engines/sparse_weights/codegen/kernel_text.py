"""The IR as text: printer and parser. The grammar is in docs/kernels/sparse-weights.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from convoy.engines.sparse_weights.codegen.kernel_ir import Group, Load, MaskKernel, Segment
from convoy.errors import InputError

_HEADER: Final = ("lanes", "vectors", "positions", "plane", "planes", "span", "values")
_NUMBER: Final = re.compile(r"\d{1,12}", re.ASCII)


_SEGMENT: Final = re.compile(r"(zero|keep)( [1-9][0-9]{0,5})?", re.ASCII)


@dataclass(slots=True)
class _Lines:
    """A segment that is being parsed."""

    begins: bool
    split: int
    stage: tuple[int, ...] = ()
    loads: list[tuple[int, list[tuple[int, int]]]] = field(default_factory=list[tuple[int, list[tuple[int, int]]]])

    def made(self) -> Segment:
        loads = tuple(Load(offset, tuple(uses)) for offset, uses in self.loads)
        return Segment(self.begins, loads, self.stage, self.split)


def print_kernel(kernel: MaskKernel) -> str:
    """A kernel as text; `parse_kernel` reads it back."""
    lines = ["kernel 1", *(f"{name} {getattr(kernel, name)}" for name in _HEADER)]
    for group in kernel.groups:
        lines.append(f"group {_numbers(group.filters)}".rstrip())
        for segment in group.segments:
            split = f" {segment.split}" if segment.split else ""
            lines.append(f"segment {'zero' if segment.begins else 'keep'}{split}")
            if segment.stage:
                lines.append(f"stage {_numbers(segment.stage)}")
            for load in segment.loads:
                lines.append(f"load {load.offset}")
                lines += [f"fma {total} {value}" for total, value in load.uses]
    return "\n".join([*lines, "end", ""])


def parse_kernel(text: str) -> MaskKernel:
    """Inverse of `print_kernel`; raises InputError with the line's number. `verify` checks the kernel's rules."""
    lines = text.split("\n")
    if lines[-2:] != ["end", ""]:
        raise InputError("kernel", text[-20:], "a last line `end`")
    words = [line.split(" ") for line in lines[:-2]]
    if not words or words[0] != ["kernel", "1"]:
        raise InputError("kernel line 1", lines[0], "kernel 1")
    header: dict[str, int] = {}
    for at, name in enumerate(_HEADER, 1):
        if at >= len(words) or words[at][0] != name or len(words[at]) != 2:
            raise _wrong(at, words, f"{name} NUMBER")
        header[name] = _integers(words, at)[0]
    return MaskKernel(**header, groups=_groups(words, 1 + len(_HEADER)))


def _groups(words: Sequence[list[str]], start: int) -> tuple[Group, ...]:
    groups: list[tuple[tuple[int, ...], list[_Lines]]] = []
    for at in range(start, len(words)):
        word, *rest = words[at]
        segments = groups[-1][1] if groups else []
        loads = segments[-1].loads if segments else []
        if word == "group":
            groups.append((_integers(words, at), []))
        elif word == "segment" and groups and _SEGMENT.fullmatch(" ".join(rest)):
            segments.append(_Lines(rest[0] == "zero", int(rest[1]) if len(rest) == 2 else 0))
        elif word == "stage" and segments and rest and not loads and not segments[-1].stage:
            segments[-1].stage = _integers(words, at)
        elif word == "load" and segments and len(rest) == 1:
            loads.append((_integers(words, at)[0], []))
        elif word == "fma" and loads and len(rest) == 2:
            total, value = _integers(words, at)
            loads[-1][1].append((total, value))
        else:
            raise _wrong(at, words, "group, segment, stage, load or fma, each inside what it belongs to")
    return tuple(Group(filters, tuple(segment.made() for segment in segments)) for filters, segments in groups)


def _numbers(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def _integers(words: Sequence[list[str]], at: int) -> tuple[int, ...]:
    if not all(_NUMBER.fullmatch(word) for word in words[at][1:]):
        raise _wrong(at, words, "numbers of at most 12 digits, one blank before each")
    return tuple(int(word) for word in words[at][1:])


def _wrong(at: int, words: Sequence[list[str]], expected: str) -> InputError:
    return InputError(f"kernel line {at + 1}", " ".join(words[at]) if at < len(words) else "", expected)
