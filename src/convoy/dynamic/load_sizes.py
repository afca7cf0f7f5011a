"""A module for several sizes from saved plans."""

from __future__ import annotations

from torch import nn

from convoy.dynamic.dims import Call, DynamicDims
from convoy.dynamic.dynamic_module import DynamicModule
from convoy.dynamic.independence import why_not_split_now
from convoy.errors import InputError
from convoy.plan import PlansForSizes
from convoy.program.calls import tensors_of
from convoy.program.program_cache import Tuner
from convoy.program.shared_memory import SharedMemory, sharing


def load_sizes(
    model: nn.Module,
    found: PlansForSizes,
    call: Call,
    tuner: Tuner,
    check: str,
) -> DynamicModule:
    """The module that was saved, with its programs bound again, in shared memory.

    Args:
        model: the model that the plans were made for.
        found: the plans.
        call: inputs of any sizes within the ranges.
        tuner: makes programs, of plans and by tuning.
        check: how changes of the stock module are detected (`Settings.check`).

    Raises:
        InputError: the inputs are not within the ranges.
        PlanError: a plan does not fit.
    """
    shapes = tuple(tuple(tensor.shape) for tensor in tensors_of(call))
    dims = DynamicDims(found.ranges, shapes)
    for one in found.ranges:
        for index, dim in one.places:
            if index >= len(shapes) or dim >= len(shapes[index]):
                raise InputError("args", [list(shape) for shape in shapes], f"an input {index} with dimension {dim}")
    sizes = dims.sizes_of(list(tensors_of(call)))
    outside = "sizes that differ where they must be equal" if sizes is None else dims.outside(sizes)
    if outside:
        raise InputError("args", outside, "inputs within the ranges of the plans")
    first = dims.resized(call, dims.example)
    dims = DynamicDims(found.ranges, tuple(tuple(tensor.shape) for tensor in tensors_of(first)))
    memory = SharedMemory()
    with sharing(memory):
        programs = [
            (one, sized := dims.resized(first, one.sizes), tuner(model, *sized, one.plan)) for one in found.programs
        ]
    # A file is not believed where it would lead to wrong results.
    not_split = found.not_split or why_not_split_now(tuner, model, first, dims, found.not_split)
    module = DynamicModule(model, programs[0][2], *programs[0][1], tuner, check, dims, not_split, memory)
    for one, sized, program in programs:
        module.add(*sized, program, one.time_ms)
    return module
