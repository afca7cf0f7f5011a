"""Programs for the buckets of a model's ranges, which share their memory, as one module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import nn

from convoy.deadline import Deadline
from convoy.dynamic.cover import buckets
from convoy.dynamic.dims import Call, DynamicDims
from convoy.dynamic.dynamic_module import DynamicModule
from convoy.dynamic.independence import Run, why_not_split
from convoy.dynamic.size_programs import Sizes
from convoy.measurement.failure import is_out_of_memory
from convoy.program import OptimizedModule
from convoy.program.shared_memory import SharedMemory, sharing
from convoy.user_warning import warn_user


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
    with sharing(memory):
        for index, sizes in enumerate(wanted):
            sized = call if sizes == dims.example else dims.resized(call, sizes)
            left = len(wanted) - index
            until = deadline.earlier(deadline.left_s * (left - 1) / left) if deadline.is_limited else deadline
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
    return TunedSizes(module, example)


def _wanted(dims: DynamicDims, not_split: str) -> list[Sizes]:
    if dims.batch is None or not_split:
        return [dims.example]
    batch = dims.batch
    return [(images, *dims.example[1:]) for images in buckets(batch.least, batch.most, batch.example)]
