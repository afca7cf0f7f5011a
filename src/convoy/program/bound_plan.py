"""BoundPlan: a plan whose steps have executables, packed constants and slots. Each pass of `bind` returns new steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from convoy.engines.base import Executable, Packed
from convoy.plan.plan import Plan, Step
from convoy.problem import TensorSpec

CHANNELS: Final = 1
"""The dimension of a tensor's channels."""


@dataclass(frozen=True, slots=True)
class ChannelSlice:
    """Some channels of the value in a slot, in which a step writes its result.

    Attributes:
        slot: slot of the larger value.
        spec: spec of the larger value.
        offset: first channel.
        channels: number of channels.
    """

    slot: int
    spec: TensorSpec
    offset: int
    channels: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The view of the larger value that has these channels."""
        return whole.narrow(CHANNELS, self.offset, self.channels)


@dataclass(frozen=True, slots=True)
class BoundStep:
    """One launch: its executable, packed constants, and the slots that it reads, writes and frees.

    Attributes:
        step: the plan's step.
        executable: launched.
        constants: packed constants.
        args: slots read.
        results: slots written.
        specs: spec of each result. The program allocates results by them.
        frees: slots that no later step uses.
        slices: for each result, the channels of a larger value in which it is written, or None; empty if there are none.
        opens: with several streams, larger values that are allocated before this launch, ahead of the frees of the step before.
    """

    step: Step
    executable: Executable
    constants: Packed
    args: tuple[int, ...]
    results: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    frees: tuple[int, ...] = ()
    slices: tuple[ChannelSlice | None, ...] = ()
    opens: tuple[ChannelSlice, ...] = ()

    def touched(self) -> tuple[int, ...]:
        """Slots whose memory the launch reads or writes."""
        return (*self.args, *self.results, *(part.slot for part in self.slices if part is not None))


@dataclass(frozen=True, slots=True)
class BoundPlan:
    """A whole plan, bound.

    Attributes:
        steps: in launch order.
        slot_names: value of each slot (`NAME` or `NAME@LAYOUT`). The first slots hold the inputs, in call order.
        inputs: (spec, layout) of each input, in call order.
        outputs: slots of the outputs, in order.
        workspace_bytes: largest workspace of a step.
        resident_bytes: bytes of all packed constants.
        plan: the plan that runs. It has the baseline in steps whose config cannot be used here, and a note for each.
    """

    steps: Sequence[BoundStep]
    slot_names: Sequence[str]
    inputs: Sequence[tuple[TensorSpec, str]]
    outputs: Sequence[int]
    workspace_bytes: int
    resident_bytes: int
    plan: Plan | None = None
