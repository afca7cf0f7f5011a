"""batches: splits a convolution into micro-batches, so that its workspace is that of a smaller batch.

See Oyama et al., "Accelerating Deep Learning Frameworks with Micro-Batches", CLUSTER 2018. It is never faster than the delegate
on the whole batch, so it competes only under a memory budget, or if the user names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch

from convoy.engines.base import Buffers, Engine, Executable, Knobs, Packed
from convoy.engines.delegating import delegating
from convoy.engines.library import cudnn
from convoy.engines.manifest import load_engine
from convoy.engines.support_checks import plain_convolution
from convoy.engines.triton import triton_dgrad, triton_split_fp32, triton_stem
from convoy.problem import ConvProblem, Problem
from convoy.support import Support
from convoy.target import Target

DELEGATES: Final = tuple(engine.ENGINE.id for engine in (cudnn, triton_split_fp32, triton_stem, triton_dgrad))
"""Engines whose workspace grows with the batch."""

MOST_MICRO_BATCHES: Final = 16
"""More launches cost too much."""

MOST_DELEGATE_KNOBS: Final = 3
"""Knob settings tried of each delegate: its first ones that need workspace."""

_ALIGNMENT: Final = 16
"""Bytes. Every micro-batch's tensors begin at a multiple, which the delegates require."""


def micro_batch(problem: ConvProblem, images: int) -> ConvProblem:
    """The convolution of `images` images of the batch."""
    return replace(problem, n=images)


def sizes(problem: ConvProblem) -> Iterator[int]:
    """Images of a micro-batch, the most first: they divide the batch, and keep every micro-batch's tensors aligned."""
    each = [replace(spec, shape=(1, *spec.shape[1:])).size_bytes for spec in (problem.x_spec, problem.y_spec)]
    for parts in range(2, min(problem.n, MOST_MICRO_BATCHES) + 1):
        images = problem.n // parts
        if problem.n % parts == 0 and all(images * size % _ALIGNMENT == 0 for size in each):
            yield images


class MicroBatchedExecutable(Executable):
    """A delegate's kernel, launched for each micro-batch."""

    def __init__(self, problem: ConvProblem, images: int, executable: Executable) -> None:
        self._count, self._images, self._delegate = problem.n // images, images, executable
        self.workspace_bytes = executable.workspace_bytes
        self.deterministic = executable.deterministic
        self._split_args = 1 if problem.direction == "dgrad" else 2

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Pack for the delegate."""
        return self._delegate.pack(constants)

    def resident_bytes(self, constants: Packed) -> int:
        """The delegate's."""
        return self._delegate.resident_bytes(constants)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Launch one micro-batch after the other, all in the same workspace."""
        result = buffers.results[0]
        assert result is not None
        for index in range(self._count):
            at, count = index * self._images, self._images
            args = [t.narrow(0, at, count) if i < self._split_args else t for i, t in enumerate(buffers.args)]
            self._delegate.launch(Buffers(tuple(args), [result.narrow(0, at, count)], buffers.constants), workspace)


class MicroBatchedEngine(Engine):
    """Forward convolutions and data gradients of at least two images."""

    id = "batches"
    family = "library"
    devices = ("cuda",)
    only_under_memory_budget = True
    trusted = False
    builds_on_device = True
    quick_settings = 2

    def supports(self, problem: Problem, target: Target) -> Support:
        """Yes, if a delegate needs less workspace for fewer images."""
        if target.device != "cuda":
            return Support.no(f"needs an NVIDIA GPU, got {target.device}")
        if not (support := plain_convolution(problem, ("fprop", "dgrad"))):
            return support
        assert isinstance(problem, ConvProblem)
        if not any(True for _ in self._offered(problem, target)):
            return Support.no("no delegate's workspace grows with the batch here")
        return Support.yes()

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """The largest micro-batches first: they cost least."""
        assert isinstance(problem, ConvProblem)
        return list(self._offered(problem, target))

    def _offered(self, problem: ConvProblem, target: Target) -> Iterator[Knobs]:
        for images in sizes(problem):
            small = micro_batch(problem, images)
            for engine in DELEGATES:
                found, delegate = delegating.delegate_knobs(engine, small, target), load_engine(engine)
                needing = [
                    knobs
                    for knobs in found[: 4 * MOST_DELEGATE_KNOBS]
                    if delegating.delegate_workspace_bytes(delegate, small, knobs)
                ]
                yield from (
                    delegating.wrap_knobs(engine, knobs, part=images) for knobs in needing[:MOST_DELEGATE_KNOBS]
                )

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """The delegate's workspace for one micro-batch."""
        assert isinstance(problem, ConvProblem)
        engine, setting = delegating.unwrap_knobs(knobs, DELEGATES, "part")
        return load_engine(engine).workspace_bytes(micro_batch(problem, knobs.integer("part")), setting)

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float | None:
        """The delegate's estimate for one micro-batch, times the number of micro-batches."""
        assert isinstance(problem, ConvProblem)
        engine, setting = delegating.unwrap_knobs(knobs, DELEGATES, "part")
        images = knobs.integer("part")
        guess = load_engine(engine).estimate_us(micro_batch(problem, images), setting, target)
        return None if guess is None else guess * (problem.n // images)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Build the delegate for one micro-batch."""
        assert isinstance(problem, ConvProblem)
        engine, setting = delegating.unwrap_knobs(knobs, DELEGATES, "part")
        images = knobs.integer("part")
        return MicroBatchedExecutable(
            problem, images, load_engine(engine).build(micro_batch(problem, images), setting, target)
        )


ENGINE = MicroBatchedEngine()
