"""Programs for the buckets of a model's ranges, which share their memory, as one module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from torch import nn

from convoy.deadline import Deadline
from convoy.dynamic.batch_split import buckets, next_bucket
from convoy.dynamic.dims import Call, DynamicDims
from convoy.dynamic.dynamic_module import DynamicModule
from convoy.dynamic.independence import Run, why_not_split
from convoy.dynamic.size_programs import Sizes
from convoy.measurement.failure import is_out_of_memory
from convoy.program import OptimizedModule
from convoy.program.shared_memory import SharedMemory, sharing
from convoy.user_warning import warn_user

MOST_PROGRAMS: Final = 16
"""Programs that are made unasked for one range of batches."""

FIRST_SHARE: Final = 0.6
"""Share of the time for the first buckets, if the time is limited; the rest is for those that measured times ask for."""


class Tuned(Protocol):
    """What tuning for one size found."""

    @property
    def program(self) -> OptimizedModule:
        """The module with one program."""
        ...


_Result = TypeVar("_Result", bound=Tuned)


@dataclass(frozen=True, slots=True)
class TunedSizes(Generic[_Result]):
    """What tuning for all buckets found.

    Attributes:
        module: runs the programs.
        example: what was found for the example's own sizes.
    """

    module: OptimizedModule
    example: _Result


def tune_sizes(
    model: nn.Module,
    call: Call,
    dims: DynamicDims,
    run: Run,
    tune: Callable[[Call, Deadline], _Result],
    deadline: Deadline,
) -> TunedSizes[_Result]:
    """Tune a model for the buckets of its batch, the largest first, and for the example's other sizes.

    If batches must not be split, only the example's own sizes are tuned, and one warning gives the reason.

    Args:
        model: the stock module.
        call: the example.
        dims: the dimensions that may change.
        run: runs a copy of the model.
        tune: tunes the model for a call.
        deadline: when all must end; each size may take an equal part of what is left.
    """
    not_split = why_not_split(run, call, dims)
    memory = SharedMemory()
    found: list[tuple[Call, OptimizedModule]] = []
    example: _Result | None = None
    wanted = _wanted(dims, not_split)
    reserve = (1 - FIRST_SHARE) * deadline.left_s if deadline.is_limited and len(wanted) > 1 else 0.0
    with sharing(memory):
        for index, sizes in enumerate(wanted):
            sized = call if sizes == dims.example else dims.resized(call, sizes)
            left = len(wanted) - index
            until = _part(deadline, left, reserve)
            try:
                result = tune(sized, until)
            except Exception as error:  # out of memory has several types; any other error is raised again
                if sizes == dims.example or not is_out_of_memory(error):
                    raise
                warn_user(f"no program for {sizes[0]} images: there is too little memory; smaller batches compute them")
                continue
            if sizes == dims.example:
                example = result
            found.append((sized, result.program))
    assert example is not None
    first = example.program
    if type(first) is not OptimizedModule:  # its layers were tuned one by one: it takes any size
        return TunedSizes(first, example)
    if not_split and dims.batch is not None:
        warn_user(f"batches are not split or padded: {not_split}; call .add_size(N) to make a program for N images")
    cache = first.program_cache
    module = DynamicModule(model, first.programs[0], *call, cache.tuner, cache.check, dims, not_split, memory)
    for sized, part in found:
        module.add(*sized, part.programs[0])
    if dims.batch is not None and not not_split:
        _refine(module, call, tune, deadline)
    return TunedSizes(module, example)


def _part(deadline: Deadline, parts: int, reserve_s: float = 0.0) -> Deadline:
    """An equal part of the time that is left besides a reserve."""
    if not deadline.is_limited:
        return deadline
    left = max(0.0, deadline.left_s - reserve_s)
    return deadline.earlier(left * (parts - 1) / parts + reserve_s)


def _refine(module: DynamicModule, call: Call, tune: Callable[[Call, Deadline], _Result], deadline: Deadline) -> None:
    """Add programs for the batches that splits and paddings compute slowest, by the times that were measured."""
    known = module.size_programs
    while len(known.times_ms) < MOST_PROGRAMS and not deadline.is_over:
        rest = known.dims.example[1:]
        images = next_bucket({sizes[0]: time for sizes, time in known.times_ms.items() if sizes[1:] == rest})
        if images is None:
            return
        sized = known.dims.resized(call, (images, *rest))
        with sharing(known.memory):
            result = tune(sized, _part(deadline, MOST_PROGRAMS - len(known.times_ms)))
        module.add(*sized, result.program.programs[0])


def _wanted(dims: DynamicDims, not_split: str) -> list[Sizes]:
    if dims.batch is None or not_split:
        return [dims.example]
    batch = dims.batch
    return [(images, *dims.example[1:]) for images in buckets(batch.least, batch.most, batch.example)]
