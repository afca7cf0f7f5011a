"""batches: a convolution some images at a time, so that its workspace is that of a smaller batch.

After micro-batches (Oyama et al., "Accelerating Deep Learning Frameworks with Micro-Batches", CLUSTER 2018). It is no faster than
the same kernel at once, so it competes where there is a memory budget, or where it is asked for by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch

from convoy.engines.base import Buffers, Engine, Executable, Knobs, Packed
from convoy.engines.delegating import delegating
from convoy.engines.manifest import load_engine
from convoy.engines.support_checks import plain_convolution
from convoy.problem import ConvProblem, Problem
from convoy.support import Support
from convoy.target import Target

INNER: Final = ("cudnn", "triton.split_fp32", "triton.stem", "cuda.stem", "triton.dgrad")
"""Engines whose workspace grows with the batch."""

MOST_PARTS: Final = 16
"""More launches than that cost too much."""

MOST_SETTINGS: Final = 3
"""Of an inner engine, its favourites among those that want workspace."""

_ALIGNMENT: Final = 16
"""Bytes that every part's tensors begin at a multiple of: what the inner engines ask for."""


def part(problem: ConvProblem, images: int) -> ConvProblem:
    """The convolution of some images."""
    return replace(problem, n=images)


def sizes(problem: ConvProblem) -> Iterator[int]:
    """Images of a part, the most first: whole parts, whose tensors begin where vectors may."""
    each = [replace(spec, shape=(1, *spec.shape[1:])).size_bytes for spec in (problem.x_spec, problem.y_spec)]
    for parts in range(2, min(problem.n, MOST_PARTS) + 1):
        images = problem.n // parts
        if problem.n % parts == 0 and all(images * size % _ALIGNMENT == 0 for size in each):
            yield images


class Parts(Executable):
    """One inner kernel, launched for each part."""

    def __init__(self, problem: ConvProblem, images: int, executable: Executable) -> None:
        self._parts, self._images, self._inner = problem.n // images, images, executable
        self.workspace_bytes = executable.workspace_bytes
        self.deterministic = executable.deterministic
        self._split_args = 1 if problem.direction == "dgrad" else 2

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """As the inner kernel wants them."""
        return self._inner.pack(constants)

    def resident_bytes(self, constants: Packed) -> int:
        """The inner kernel's."""
        return self._inner.resident_bytes(constants)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Part after part, in the same workspace."""
        result = buffers.results[0]
        assert result is not None
        for index in range(self._parts):
            at, count = index * self._images, self._images
            args = [t.narrow(0, at, count) if i < self._split_args else t for i, t in enumerate(buffers.args)]
            self._inner.launch(Buffers(tuple(args), [result.narrow(0, at, count)], buffers.constants), workspace)


class Batches(Engine):
    """Forward convolutions and data gradients of at least two images."""

    id = "batches"
    family = "library"
    trusted = False
    builds_on_device = True
    quick_settings = 2

    def supports(self, problem: Problem, target: Target) -> Support:
        """Where an engine wants less workspace for a part of the images."""
        if target.device != "cuda":
            return Support.no(f"needs an NVIDIA GPU, got {target.device}")
        if not (support := plain_convolution(problem, ("fprop", "dgrad"))):
            return support
        assert isinstance(problem, ConvProblem)
        if not any(True for _ in self._offered(problem, target)):
            return Support.no("no engine's workspace grows with the batch here")
        return Support.yes()

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """The largest parts first: they cost least."""
        assert isinstance(problem, ConvProblem)
        return list(self._offered(problem, target))

    def _offered(self, problem: ConvProblem, target: Target) -> Iterator[Knobs]:
        for images in sizes(problem):
            small = part(problem, images)
            for engine in INNER:
                found, wanting = delegating.settings(engine, small, target), load_engine(engine)
                hungry = [
                    knobs for knobs in found[: 4 * MOST_SETTINGS] if delegating.wanted_bytes(wanting, small, knobs)
                ]
                yield from (delegating.wrap(engine, knobs, part=images) for knobs in hungry[:MOST_SETTINGS])

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """That of a part."""
        assert isinstance(problem, ConvProblem)
        engine, setting = delegating.unwrap(knobs, INNER, "part")
        return load_engine(engine).workspace_bytes(part(problem, knobs.integer("part")), setting)

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float | None:
        """The inner engine's guess for a part, as often as there are parts."""
        assert isinstance(problem, ConvProblem)
        engine, setting = delegating.unwrap(knobs, INNER, "part")
        images = knobs.integer("part")
        guess = load_engine(engine).estimate_us(part(problem, images), setting, target)
        return None if guess is None else guess * (problem.n // images)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Build the inner kernel for a part."""
        assert isinstance(problem, ConvProblem)
        engine, setting = delegating.unwrap(knobs, INNER, "part")
        images = knobs.integer("part")
        return Parts(problem, images, load_engine(engine).build(part(problem, images), setting, target))


ENGINE = Batches()
