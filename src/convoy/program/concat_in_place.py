"""Concatenations without a copy: the steps that make the inputs write them where they belong in the result.

In a channels_last tensor the channels of a pixel are neighbours in memory, so the inputs of a concatenation along channels are
slices of its result: NHWC tensors with a larger pixel stride. A step whose executable can write such a slice
(`Executable.accept_slice`) gets one, and the concatenation copies the other inputs, mostly none
(docs/notes/decisions/0006-placed-results.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from convoy.engines.base import Buffers, Executable
from convoy.engines.subgraph import parse_subgraph
from convoy.problem import Problem, SubgraphProblem
from convoy.program.bound_plan import CHANNELS, BoundStep, ChannelSlice
from convoy.regions.concat import MAX_COPIED, concat_inputs


class InPlaceConcat(Executable):
    """A concatenation most of whose inputs are already in its result.

    Args:
        copied: for each input that is not, the index of the argument and its channels.
    """

    def __init__(self, copied: Sequence[tuple[int, ChannelSlice]]) -> None:
        self._copied = tuple(copied)

    @property
    def copied_count(self) -> int:
        """Number of inputs that a launch copies."""
        return len(self._copied)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Copy the inputs that are not in place."""
        del workspace
        whole = buffers.results[0]
        assert whole is not None
        for index, part in self._copied:
            part.of(whole).copy_(buffers.args[index])


def concat_channels(problem: Problem) -> tuple[int, ...]:
    """Channels of each input of a concatenation of distinct NHWC values along channels; empty for any other problem."""
    if not isinstance(problem, SubgraphProblem) or problem.layout != "nhwc":
        return ()
    graph = parse_subgraph(problem.text)
    if len(graph.nodes) != 1:
        return ()
    named = concat_inputs(graph, graph.nodes[0])
    return tuple(graph.values[name].spec.shape[CHANNELS] for name in named) if named == graph.inputs else ()


def with_results_in_place(
    steps: Sequence[BoundStep], problems: Sequence[Problem], outputs: Sequence[int]
) -> tuple[BoundStep, ...]:
    """The steps in which inputs of concatenations are written in place where possible.

    An input is written in place if one step makes it, the step's executable accepts the slice, and only the concatenation reads
    it. A concatenation becomes an `InPlaceConcat` if at most `MAX_COPIED` of its inputs must be copied.

    Args:
        steps: in launch order.
        problems: the problem of each step.
        outputs: slots of the outputs.
    """
    made = list(steps)
    readers = Counter(slot for bound in steps for slot in bound.args)
    makers = {slot: (at, index) for at, bound in enumerate(steps) for index, slot in enumerate(bound.results)}
    for at, problem in enumerate(problems):
        sizes = concat_channels(problem)
        if not sizes:
            continue
        bound, offsets = made[at], accumulate(sizes[:-1], initial=0)
        slices = [
            ChannelSlice(bound.results[0], bound.specs[0], first, size)
            for first, size in zip(offsets, sizes, strict=True)
        ]
        in_place: dict[int, tuple[int, int]] = {}
        for index, (slot, part) in enumerate(zip(bound.args, slices, strict=True)):
            if slot not in makers or readers[slot] != 1 or slot in outputs:
                continue
            maker, result = makers[slot]
            if _accepts(made[maker], result, part):
                in_place[index] = maker, result
        if not in_place or len(slices) - len(in_place) > MAX_COPIED:
            continue
        for index, (maker, result) in in_place.items():
            own = list(made[maker].slices or [None] * len(made[maker].results))
            own[result] = slices[index]
            made[maker] = replace(made[maker], slices=tuple(own))
        made[at] = replace(
            bound,
            executable=InPlaceConcat([(i, part) for i, part in enumerate(slices) if i not in in_place]),
            constants=(),
            slices=(ChannelSlice(bound.results[0], bound.specs[0], 0, sum(sizes)),),
        )
    return tuple(made)


def _accepts(maker: BoundStep, result: int, part: ChannelSlice) -> bool:
    """Whether a step can write its result there: it does not allocate its results itself, and has no slices yet."""
    if maker.executable.allocates_results or maker.step.layout != "nhwc" or maker.slices:
        return False
    return maker.executable.accept_slice(result, part.spec.shape[CHANNELS], part.offset)
