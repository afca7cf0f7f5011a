"""Concatenations without a copy: their pieces are written where they belong, by the steps that make them.

A channels_last tensor's channels are neighbours in memory, so the pieces of a concatenation along channels are slices of
it: NHWC tensors whose pixels lie further apart. A step whose executable can write such a slice (`Executable.accept_slice`)
is given one, and the concatenation copies what is left, which mostly is nothing (docs/notes/decisions/0006-placed-results.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from convoy.engines.base import Buffers, Executable
from convoy.engines.subgraph import parse_subgraph
from convoy.problem import Problem, SubgraphProblem, TensorSpec
from convoy.regions.concat import MAX_COPIED, concat_inputs

if TYPE_CHECKING:
    from convoy.program.bind import BoundStep

_CHANNELS = 1


@dataclass(frozen=True, slots=True)
class ChannelSlice:
    """Where a result lies: `channels` channels from `offset` on of the value in a slot.

    Attributes:
        slot: the larger value's.
        spec: the larger value's.
        offset: first channel.
        channels: how many.
    """

    slot: int
    spec: TensorSpec
    offset: int
    channels: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The slice of the larger value."""
        return whole.narrow(_CHANNELS, self.offset, self.channels)


class InPlaceConcat(Executable):
    """A concatenation most of whose pieces are in their places already.

    Args:
        copied: for each piece that is not, its argument's index and its place.
    """

    def __init__(self, copied: Sequence[tuple[int, ChannelSlice]]) -> None:
        self._copied = tuple(copied)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Copy what is left."""
        del workspace
        whole = buffers.results[0]
        assert whole is not None
        for index, place in self._copied:
            place.of(whole).copy_(buffers.args[index])


def concat_channels(problem: Problem) -> tuple[int, ...]:
    """Channels of each piece, where a problem is one concatenation of different NHWC values along channels; else nothing."""
    if not isinstance(problem, SubgraphProblem) or problem.layout != "nhwc":
        return ()
    graph = parse_subgraph(problem.text)
    if len(graph.nodes) != 1:
        return ()
    named = concat_inputs(graph, graph.nodes[0])
    return tuple(graph.values[name].spec.shape[_CHANNELS] for name in named) if named == graph.inputs else ()


def with_results_in_place(steps: Sequence[BoundStep], problems: Sequence[Problem], outputs: Sequence[int]) -> int:
    """Give the pieces of concatenations their places in it, where the steps that make them can write there.

    A piece is placed where one step makes it, by an executable that accepts the slice, and the concatenation alone reads it.
    A concatenation becomes `InPlaceConcat` where all of its pieces but one at most are placed.

    Args:
        steps: in order; their `places` and executables are changed.
        problems: the problem of each.
        outputs: slots that the caller gets.

    Returns:
        The number of concatenations that became `InPlaceConcat`.
    """
    readers = Counter(slot for bound in steps for slot in bound.args)
    makers = {slot: (bound, index) for bound in steps for index, slot in enumerate(bound.results)}
    changed = 0
    for bound, problem in zip(steps, problems, strict=True):
        sizes = concat_channels(problem)
        if not sizes:
            continue
        offsets = accumulate(sizes[:-1], initial=0)
        places = [
            ChannelSlice(bound.results[0], bound.specs[0], at, size) for at, size in zip(offsets, sizes, strict=True)
        ]
        placed: dict[int, tuple[BoundStep, int]] = {}
        for index, (slot, place) in enumerate(zip(bound.args, places, strict=True)):
            maker = makers.get(slot)
            if maker is not None and readers[slot] == 1 and slot not in outputs and _accepts(*maker, place):
                placed[index] = maker
        if not placed or len(places) - len(placed) > MAX_COPIED:
            continue
        for index, (maker_step, result) in placed.items():
            found = list(maker_step.places or [None] * len(maker_step.results))
            found[result] = places[index]
            maker_step.places = tuple(found)
        bound.executable = InPlaceConcat([(i, place) for i, place in enumerate(places) if i not in placed])
        bound.constants = ()
        bound.places = (ChannelSlice(bound.results[0], bound.specs[0], 0, sum(sizes)),)
        changed += 1
    return changed


def _accepts(maker: BoundStep, result: int, place: ChannelSlice) -> bool:
    """Whether a step can write its result there; not where the library below makes new tensors, or it has a place already."""
    if maker.executable.allocates_results or maker.step.layout != "nhwc" or maker.places:
        return False
    return maker.executable.accept_slice(result, place.spec.shape[_CHANNELS], place.offset)
